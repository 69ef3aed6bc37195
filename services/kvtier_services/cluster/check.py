"""Index and hosts of a fleet, compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_services.cluster.state import Running
from kvtier_services.cluster.up import enter

GRACE = 15.0
"""Seconds that the answers may take beyond the comparing."""
OF_A_HOST = ("missing", "wrong", "stale")
OF_ALL = ("dead", "partly_dead")


@dataclass(frozen=True, slots=True)
class Compared:
    """What `kvtier index check` found.

    Attributes:
        hosts: the answer of each; see `kvtier.hierarchy.checking.Check.run`.
    """

    hosts: Sequence[Mapping[str, Any]]

    @property
    def differing(self) -> int:
        """Blocks that index and hosts do not agree on."""
        own = sum(int(host.get(kind, 0)) for host in self.hosts for kind in OF_A_HOST)
        return own + sum(max((int(host.get(kind, 0)) for host in self.hosts), default=0) for kind in OF_ALL)

    @property
    def mended(self) -> int:
        """Of these, mended."""
        return sum(int(host.get("mended", 0)) for host in self.hosts)

    @property
    def whole(self) -> bool:
        """Whether every host answered, and had the time for all."""
        return bool(self.hosts) and all(not host.get("fault") and host.get("complete") for host in self.hosts)

    @property
    def well(self) -> bool:
        """Whether all was compared and agrees, perhaps by now."""
        return self.whole and self.mended >= self.differing

    def lines(self) -> Iterator[str]:
        """For people."""
        for host in self.hosts:
            if host.get("fault"):
                yield f"{host['host']}: {host['fault']}"
                continue
            kinds = ", ".join(f"{host[kind]:,} {kind}" for kind in OF_A_HOST)
            notes = "" if host["complete"] else "; not all was compared: give it more --seconds"
            notes += "; a publication is due" if host["needs_publish"] else ""
            mended = f"; {host['mended']:,} mended" if host["mended"] else ""
            yield f"{host['host']}: {host['blocks']:,} blocks, in the index {kinds}{mended}{notes}"
            for kind, keys in host["examples"].items():
                yield f"  {kind}: {' '.join(keys)}"
        if all(host.get("fault") for host in self.hosts):
            return
        entries, dead, partly = (
            max((int(host.get(kind, 0)) for host in self.hosts), default=0) for kind in ("entries", *OF_ALL)
        )
        silent = sorted({name for host in self.hosts for name in host.get("silent", ())})
        heard = f"; not heard of lately: {', '.join(silent)}" if silent else ""
        yield f"index: {entries:,} blocks, {dead:,} of dead hosts only, {partly:,} of dead hosts too{heard}"


def check_index(known: Running, seconds: float, *, repair: bool) -> Compared:
    """Let every host of the fleet compare itself with the index, one after the other.

    Raises:
        ConfigError: the cluster does not answer.
        OSError: the controller does not.
    """
    enter(known)
    from kvtier_services.cluster import actors

    controller = actors.ActorCall(actors.CONTROLLER, known.namespace)
    with actors.connected(known.address, known.namespace, known.host):
        answers = controller("check_index", seconds, "repair" if repair else "check", timeout=seconds + GRACE)
    return Compared(answers)
