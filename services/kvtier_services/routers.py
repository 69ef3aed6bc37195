"""What routers see, on the command line: where a prompt is, and what enters and leaves a host."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvtier.client.description import Description
from kvtier.client.door import ask_status, ask_where
from kvtier.config import Config
from kvtier.errors import ConfigError, SessionError, SessionUnavailable
from kvtier.events import Batch, Subscriber
from kvtier.events.publisher import next_to
from kvtier.events.schema import AllBlocksCleared, AnyEvent, BlockStored
from kvtier.hierarchy.answers import Placement

PATIENCE = 3.0
"""Seconds until it is said that nobody answers."""


def tokens_of(text: str, file: Path | None) -> list[int]:
    """Token ids: numbers with commas or spaces between them, or a JSON list; "-" reads the standard input.

    Raises:
        ConfigError: neither or both are given, or something else is in it.
    """
    if bool(text) == (file is not None):
        raise ConfigError("name the token ids, or a file that holds them with --file (- for the standard input)")
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{file} cannot be read: {exc}") from exc
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    wrong = next((word for word in words if not (word.isascii() and word.isdecimal())), None)
    if wrong is not None:
        raise ConfigError(f"{wrong[:40]!r} is no token id; write numbers, with commas or spaces between them")
    return [int(word) for word in words]


def where(config: Config, keyspace: Path, tokens: list[int], *, json: bool) -> str:
    """Which hosts hold how much of a prompt, as this host knows.

    Raises:
        ConfigError: no keyspace.
        SessionError: this host does not answer.
    """
    described = Description.read(keyspace)
    addresses = described.addresses(tokens)
    placement = ask_where(config.socket, addresses)
    size = described.block_tokens
    if json:
        places = [asdict(place) | {"tokens": place.blocks * size} for place in placement.places]
        answer = {"tokens": len(tokens), "blocks": len(addresses), "complete": placement.complete, "places": places}
        return msgspec.json.encode(answer).decode()
    return _table(placement, len(tokens), len(addresses), size)


def _table(placement: Placement, tokens: int, blocks: int, size: int) -> str:
    lines = []
    if not placement.complete:
        lines.append("the index does not answer: other hosts may have it too")
    if not placement.places:
        why = "" if blocks else f"; {tokens} tokens are no whole block of {size}"
        return "\n".join([*lines, f"no host has anything of it{why}"])
    width = max(len(place.host) for place in placement.places)
    for place in placement.places:
        tiers = ", ".join(f"{count} {tier}" for tier, count in place.tiers.items())
        here = "  (this host)" if place.here else ""
        lines.append(f"{place.host:{width}}  {place.blocks * size:,} of {tokens:,} tokens  blocks: {tiers}{here}")
    return "\n".join(lines)


def lines(config: Config, host: str, *, since: int | None, dump: bool, json: bool) -> Iterator[str]:
    """What a host publishes, as it comes; only what it has now, if `dump`.

    Args:
        config: of this host; the fleet's hosts have the same ports.
        host: name or address of another host; "" for this one.
        since: number of the first batch that is wanted; None for what comes from now on.
        dump: tell what the host has, and end; `since` is ignored then.
        json: a JSON object a line.

    Raises:
        ConfigError: that host publishes nothing, or not where it can be reached.
        SessionUnavailable: nobody answers there.
    """
    endpoint, replay = endpoints(config, host)
    with Subscriber(endpoint, replay, since=None if dump else since, dump=dump, patience=PATIENCE) as subscriber:
        while True:
            batch = subscriber.receive(1.0)
            if subscriber.fault:
                raise SessionUnavailable(subscriber.fault)
            if batch is None:
                continue
            yield from _told(batch, json=json)
            if dump and subscriber.whole:
                return


def endpoints(config: Config, host: str) -> tuple[str, str]:
    """Where a host publishes, and where it is asked for what was missed.

    Raises:
        ConfigError: nowhere.
    """
    if not host:
        try:
            status = ask_status(config.socket)["events"]
        except SessionError:
            status = None
        if status:
            if status["fault"]:
                raise ConfigError(status["fault"])
            return _reachable(status["endpoint"]), _reachable(status["replay_endpoint"])
    events = config.events
    if not events.endpoint:
        raise ConfigError(
            'no events are published: set events.endpoint, as "tcp://127.0.0.1:5557", and start kvtier anew'
        )
    endpoint, replay = events.endpoints
    replay = replay or next_to(endpoint)
    if not host:
        return _reachable(endpoint), _reachable(replay)
    ports = [re.fullmatch(r"tcp://.*:(\d+)", one) for one in (endpoint, replay)]
    if not all(ports) or any(port and port[1] == "0" for port in ports):
        raise ConfigError(f"events.endpoint is {events.endpoint}: other hosts are reached at a fixed port of tcp only")
    address = f"[{host}]" if ":" in host else host
    first, second = [f"tcp://{address}:{port[1]}" for port in ports if port]
    return first, second


def _reachable(endpoint: str) -> str:
    """The same for who connects: not to all addresses, but to this machine."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", "tcp://127.0.0.1:", endpoint)


def _told(batch: Batch, *, json: bool) -> Iterator[str]:
    if batch.missed or batch.fresh:
        said = {"seq": batch.seq, "ts": batch.ts, "missed": batch.missed, "fresh": batch.fresh}
        text = "what came before is lost, or the host began anew" if batch.missed else "what the host has from here on:"
        yield msgspec.json.encode(said).decode() if json else text
    for event in batch.events:
        yield _json(batch, event) if json else _text(batch, event)


def _json(batch: Batch, event: AnyEvent) -> str:
    said: dict[str, Any] = {"seq": batch.seq, "ts": batch.ts} | msgspec.to_builtins(event, builtin_types=(bytes,))
    for name in ("block_hashes", "parent_block_hash"):
        if name in said:
            said[name] = _hex(said[name])
    return msgspec.json.encode(said).decode()


def _hex(value: Any) -> Any:
    if isinstance(value, list):
        return [_hex(one) for one in value]
    return value.hex() if isinstance(value, bytes) else value


def _text(batch: Batch, event: AnyEvent) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(batch.ts))
    if isinstance(event, AllBlocksCleared):
        return f"{at}  {event.node}  has nothing: it begins or ends"
    stored = isinstance(event, BlockStored)
    first = event.block_hashes[0]
    name = first.hex()[:12] if isinstance(first, bytes) else str(first)
    count = len(event.block_hashes)
    return f"{at}  {event.node}  {event.tier or event.medium}  {'+' if stored else '-'}{count} from {name}"
