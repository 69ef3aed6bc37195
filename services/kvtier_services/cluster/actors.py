"""Actors in Ray: the only module that imports it. Every wait has a deadline."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers.base import TierNumber
from kvtier_services.actors.cpu_tier import CpuTierActor, Parts
from kvtier_services.actors.gpu_worker import GpuWorkerActor
from kvtier_services.actors.hands import Hand
from kvtier_services.actors.index import open_index
from kvtier_services.actors.nvme_tier import NvmeTierActor
from kvtier_services.actors.peers import open_peers
from kvtier_services.cluster.parts import about, open_door, open_exporter, open_page, writer_gone
from kvtier_services.controller import Controller
from kvtier_services.hosts import Host
from kvtier_services.settings import Settings

CONTROLLER = "controller"
MEMBERS = b"members"
HOST_LABEL = "kvtier.io/host"
TIERS = ("cpu", "gpu", "nvme")
HELD = 0.01
"""What a tier's process holds of its node's resource, so that others may hold some too."""
LIVES = {"num_cpus": 0, "lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}
NO_LIMIT = 30.0
"""Seconds that are taken as a node's last ones where Ray names no limit."""
KNOCK = 5.0
"""Seconds within which a Ray head must take a connection."""
TIER_CALLS = 8
"""Calls that a tier's process works on at a time."""
BRAIN_CALLS = 32


@contextmanager
def connected(address: str, namespace: str, host: str = "") -> Iterator[None]:
    """Be a driver of a cluster.

    Args:
        address: of its head.
        namespace: for actors; empty for none.
        host: this machine's address in the cluster; empty for the one that Ray finds.

    Raises:
        ConfigError: it does not answer, or does not let this process in.
    """
    _knock(address)
    ray._private.worker._worker_logs_enabled = False  # noqa: SLF001 - else it prints other hosts' deaths to stdout
    try:
        ray.init(
            address,
            namespace=namespace or None,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            _node_ip_address=host or None,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as exc:
        raise ConfigError(
            f"the Ray cluster at {address} does not take this process in: {one_line(exc)}; see ray.address, and for a "
            "cluster with token authentication RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"
        ) from exc
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries for minutes, and says so in its own words."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), KNOCK):
            pass
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({exc}); set ray.address to the host:port of its head"
        ) from exc


_finders = ThreadPoolExecutor(4, "kvtier-find")
"""Ray looks for actors with a time-out of its own, a minute; those who wait here wait no longer than they like."""


def _found(name: str, namespace: str, timeout: float) -> Any:
    pending = _finders.submit(ray.get_actor, name, namespace)
    try:
        return pending.result(timeout)
    except TimeoutError as exc:
        pending.cancel()
        raise TimeoutError(f"the Ray head did not say in {timeout:g} s where {name} is") from exc


@dataclass(slots=True)
class ActorCall:
    """Calls methods of a named actor; found when it is first called, and again after it was made anew.

    Attributes:
        name: of the actor.
        namespace: of the actor.
    """

    name: str
    namespace: str
    _handle: Any = field(default=None, repr=False)

    def __call__(self, method: str, *args: object, timeout: float) -> Any:
        """Call and wait.

        Raises:
            TimeoutError: no answer in time.
            ConnectionError: the actor is not there.
            KVTierError: what the method raised.
        """
        began = time.monotonic()
        try:
            handle = self._handle = self._handle or _found(self.name, self.namespace, timeout)
            timeout = max(0.0, timeout - (time.monotonic() - began))
            return ray.get(getattr(handle, method).remote(*args), timeout=timeout)
        except RayTaskError as exc:
            # Its text is a traceback; what the method raised says what is wrong.
            raise (exc.cause or exc) from None
        except GetTimeoutError as exc:
            raise TimeoutError(f"{self.name} did not answer {method} in {timeout:g} s") from exc
        except (RayActorError, ValueError) as exc:
            self._handle = None
            raise ConnectionError(f"the process of {self.name} is not there: {one_line(exc)}") from exc

    def __reduce__(self) -> tuple[type[ActorCall], tuple[str, str]]:
        return ActorCall, (self.name, self.namespace)


@dataclass(frozen=True, slots=True)
class RayHostActors:
    """The actors of one host.

    Attributes:
        cpu: calls the CPU tier's actor.
        others: call the other tiers' actors.
    """

    cpu: ActorCall
    others: tuple[ActorCall, ...]

    def ready(self, timeout: float) -> dict[str, Any]:
        """See `HostActors`."""
        answer: dict[str, Any] = self.cpu("ready", timeout, timeout=timeout + 5)
        return answer

    def status(self, timeout: float) -> dict[str, Any]:
        """See `HostActors`."""
        answer: dict[str, Any] = self.cpu("status", timeout=timeout)
        return answer

    def check_index(self, seconds: float, how: str) -> dict[str, Any]:
        """See `HostActors`."""
        answer: dict[str, Any] = self.cpu("check_index", seconds, how, timeout=seconds + 5)
        return answer

    def drain(self, seconds: float, timeout: float) -> dict[str, int]:
        """See `HostActors`."""
        answer: dict[str, int] = self.cpu("drain", seconds, timeout=timeout)
        return answer

    def stop(self, flush_seconds: float, timeout: float) -> dict[str, int]:
        """See `HostActors`."""
        try:
            answer: dict[str, int] = self.cpu("stop", flush_seconds, timeout=timeout)
            with ThreadPoolExecutor(len(self.others) or 1) as threads:
                list(threads.map(lambda other: _stop(other, timeout), self.others))
            return answer
        finally:
            for call in (self.cpu, *self.others):
                kill(call.name, call.namespace)


def _stop(actor: ActorCall, timeout: float) -> None:
    with suppress(KVTierError, OSError):
        actor("stop", timeout=timeout)


@dataclass(frozen=True, slots=True)
class RayFleet:
    """The machines of a Ray cluster.

    Attributes:
        namespace: of kvtier's actors.
        labels: that a node must have.
    """

    namespace: str
    labels: dict[str, str] = field(default_factory=dict)

    def hosts(self) -> Sequence[Host]:
        """See `Fleet`; a machine's own name is the label `kvtier.io/host`, where its node has that."""
        found = []
        ending = ray._private.state.state.get_draining_nodes()  # noqa: SLF001 - there is no public way to hear of it
        for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"])):  # type: ignore[no-untyped-call]
            labels = node.get("Labels") or {}
            if node["Alive"] and self.labels.items() <= labels.items():
                name, has = _name(node), node["Resources"]
                tiers = tuple(tier for tier in TIERS if has.get(f"kvtier.{tier}", 0) > 0)
                gpus, ends = int(has.get("GPU", 0)), _ends(ending.get(node["NodeID"]))
                found.append(Host(name, node["NodeID"], node["NodeManagerAddress"], gpus, tiers, ends))
        return found

    def start(self, settings: Settings, host: Host) -> RayHostActors:
        """See `Fleet`."""
        return start_host(settings, host)

    def sweep(self, live: Sequence[Host]) -> int:
        """See `Fleet`; what Ray would restart on a dead node would wait for it, and be there beside its successor."""
        nodes = {host.node for host in live}
        named = ray.util.list_named_actors(all_namespaces=True)
        mine = [actor["name"] for actor in named if actor["namespace"] == self.namespace]
        return sum(kill(name, self.namespace) for name in mine if "@" in name and name.rpartition("@")[2] not in nodes)


def _name(node: dict[str, Any]) -> str:
    """A machine's own name is the label, where its node has that."""
    return str((node.get("Labels") or {}).get(HOST_LABEL) or node["NodeManagerHostname"])


def namesake(name: str, temp: str, seconds: float) -> str:
    """Address of another live node of this name; empty for none, or when it has ended in this time.

    Args:
        name: of the host.
        temp: temporary folder of this host's node; of several nodes at one address Ray connects to any.
        seconds: that the other one may take to end.
    """
    deadline = time.monotonic() + seconds
    while True:
        live = [node for node in ray.nodes() if node["Alive"] and _name(node) == name]  # type: ignore[no-untyped-call]
        others = [node for node in live if not str(node["RayletSocketName"]).startswith(f"{temp}/")]
        if not others:
            return ""
        if time.monotonic() > deadline:
            return str(others[0]["NodeManagerAddress"])
        time.sleep(0.5)


def _ends(deadline_ms: int | None) -> float:
    """When a node that is being drained ends, in seconds since the epoch; Ray says 0 where it has no limit."""
    if deadline_ms is None:
        return 0.0
    return deadline_ms / 1000.0 if deadline_ms else time.time() + NO_LIMIT


@dataclass(frozen=True, slots=True)
class RayLedger:
    """A page in the memory of the Ray head, which its storage keeps over the head's restart.

    Attributes:
        namespace: of kvtier's actors.
    """

    namespace: str

    def read(self) -> bytes:
        """See `Ledger`."""
        return internal_kv._internal_kv_get(MEMBERS, namespace=self.namespace.encode()) or b""  # noqa: SLF001

    def write(self, page: bytes) -> None:
        """See `Ledger`."""
        internal_kv._internal_kv_put(MEMBERS, page, overwrite=True, namespace=self.namespace.encode())  # noqa: SLF001


def start_host(settings: Settings, host: Host) -> RayHostActors:
    """Start the actors of a host; those that run are left as they are.

    Names have the node in them, so those of a host's former node are never taken for the present ones. Where the node
    declares a resource `kvtier.TIER`, that tier's processes hold a little of it, so that no autoscaler takes the node
    for idle.
    """
    where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(host.node, soft=False)}

    def start(kind: type, name: str, tier: str, calls: int, *args: object) -> ActorCall:
        call = ActorCall(f"{name}:{host.name}@{host.node}", settings.namespace)
        named = {"name": call.name, "namespace": call.namespace, "get_if_exists": True}
        held = {"resources": {f"kvtier.{tier}": HELD}} if tier in host.tiers else {}
        ray.remote(kind).options(max_concurrency=calls, **named, **where, **held, **LIVES).remote(*args)
        return call

    def wanted(tier: str) -> bool:
        return not host.tiers or tier in host.tiers

    hands: dict[TierNumber, list[Hand]] = {}
    others = []
    device = settings.gpu_device(host.gpus) if wanted("gpu") else ""
    for name, folder in settings.nvme_dirs_on(host.name).items() if wanted("nvme") else ():
        others.append(start(NvmeTierActor, name, "nvme", TIER_CALLS, settings, name))
        label = name if name == "nvme" else f"nvme {folder}"
        hands.setdefault(TierNumber.NVME, []).append(Hand(name, label, others[-1], str(folder)))
    if device:
        others.append(start(GpuWorkerActor, "gpu", "gpu", TIER_CALLS, settings, device))
        hands[TierNumber.GPU] = [Hand("gpu", "gpu(host)" if device == "cpu" else "gpu", others[-1])]
    peers = partial(open_peers, address=host.address)
    parts = Parts(hands, open_index, open_door, open_exporter, writer_gone, peers)
    return RayHostActors(start(CpuTierActor, "cpu", "cpu", BRAIN_CALLS, settings, parts), tuple(others))


def start_controller(settings: Settings) -> ActorCall:
    """Start the controller of a cluster that this process is connected to, on this process's node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    fleet = RayFleet(settings.namespace, settings.config.ray.selected)
    ray.remote(Controller).options(
        name=CONTROLLER,
        namespace=settings.namespace,
        scheduling_strategy=here,
        max_concurrency=BRAIN_CALLS,
        get_if_exists=True,
        **LIVES,
    ).remote(
        settings,
        fleet,
        RayLedger(settings.namespace),
        about=partial(about, settings),
        page=partial(open_page, settings),
    )
    return ActorCall(CONTROLLER, settings.namespace)


def controllers() -> list[str]:
    """Namespaces of the kvtiers of this cluster."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["namespace"] for actor in named if actor["name"] == CONTROLLER)


def kill(name: str, namespace: str) -> bool:
    """End an actor's process for good; False when there is none."""
    try:
        ray.kill(ray.get_actor(name, namespace), no_restart=True)
    except (ValueError, RayError):
        return False
    return True


def kill_all(namespace: str) -> int:
    """End all actors of a namespace for good; how many there were."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sum(kill(actor["name"], namespace) for actor in named if actor["namespace"] == namespace)


def one_line(exc: BaseException) -> str:
    """An exception as a few words: Ray's go over many lines."""
    return " ".join(str(exc).split())[:300] or type(exc).__name__
