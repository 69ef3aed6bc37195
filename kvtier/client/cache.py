"""A host's kvtier, as one engine sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from kvtier.client.device import Device
from kvtier.client.headers import Headers
from kvtier.client.save import Saver
from kvtier.client.scope import Scope, is_lifetime
from kvtier.client.session import Session
from kvtier.client.space import Space
from kvtier.codecs.plan import canonical_plan
from kvtier.codecs.registry import codec_for
from kvtier.errors import ConfigError, SessionError
from kvtier.keys import Keyspace
from kvtier.spec import KVSpec

LARGEST_PAYLOAD = 1 << 32


class Cache:
    """One session with a host; made by `kvtier.connect` or `kvtier.open`. Thread-safe.

    Args:
        session: with the host.
        threads: how many threads decode one load.
        closing: what else `close` closes, in order.

    Attributes:
        session: what lies below.
        counters: what went wrong on this client's side, by reason; a plain counter that metrics may read.
    """

    def __init__(self, session: Session, *, threads: int = 1, closing: Sequence[Callable[[], None]] = ()) -> None:
        self.session = session
        self.counters: Counter[str] = Counter()
        self._threads = threads
        self._device = Device(session, self.counters)
        self._closing = closing
        self._saver = Saver()
        # Who serves many tenants or sessions opens keyspaces without end.
        self._lock = Lock()
        self._spaces: WeakValueDictionary[tuple[bytes, int, float | None, bool], Space] = WeakValueDictionary()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def keyspace(
        self,
        spec: KVSpec,
        *,
        model: str,
        revision: str,
        plan: str = "raw",
        rank: int = 0,
        ttl: float | None = None,
        overrides: Mapping[str, str] | None = None,
        chained: bool = True,
        **parts: Any,
    ) -> Space:
        """Open the family of blocks that is shared by all engines which give the same answers here.

        Args:
            spec: shape of the KV.
            model: model name.
            revision: weights revision; other weights must have another one.
            plan: precision plan, by name ("raw", "int8", "int4", ...) or text: see `kvtier.codecs.plan`.
            rank: this engine's tensor-parallel rank.
            ttl: seconds after which blocks that are saved here expire, in every tier, within a second; None for never.
                A block keeps the time that it was first saved with.
            overrides: whatever else changes the KV: RoPE scaling, config overrides.
            chained: whether blocks are named by the tokens before them; see `kvtier.client.rows` for those that are
                not. Their plan is "raw".
            **parts: the other fields of `Keyspace`: `tenant`, `layout`, `kv_scales`, `tp_size`, `adapter`,
                `adapter_digest`, `recipe`.

        Raises:
            ConfigError: no such plan, or parts that do not fit together.
        """
        if not revision:
            raise ConfigError("revision is empty; name the weights' revision, so that other weights never answer")
        parts["tenant"] = self.session.salt + parts.get("tenant", "")
        keyspace = Keyspace(spec, model, revision, canonical_plan(plan, spec), overrides=overrides or {}, **parts)
        if not chained and keyspace.plan != canonical_plan("raw", spec):
            raise ConfigError(f"the plan is {plan!r}; blocks that are not chained have no first tokens: use raw")
        if not 0 <= rank < keyspace.tp_size:
            raise ConfigError(f"rank {rank} is not one of the {keyspace.tp_size} tensor-parallel ranks (tp_size)")
        codec = codec_for(keyspace.plan, spec)
        headers = Headers(keyspace, codec, rank, chained=chained)
        if headers.payload_nbytes(0) >= LARGEST_PAYLOAD:
            raise ConfigError(
                f"a block of {spec.block_tokens} tokens has {headers.payload_nbytes(0):,} bytes; the limit is 4 GiB: "
                "make block_tokens smaller"
            )
        if ttl is not None and not is_lifetime(ttl):
            raise ConfigError(f"ttl is {ttl!r}; pass seconds above 0, a billion at most, or None")
        self.session.claim(keyspace.canonical())
        scope = Scope(self.session, keyspace, codec, headers, self.counters, self._threads, self._device, ttl or 0.0)
        space = Space(scope, rank=rank, saver=self._saver)
        with self._lock:
            return self._spaces.setdefault((keyspace.root, rank, ttl, chained), space)

    def inspect(self, token_ids: Any) -> list[dict[str, Any]]:
        """What the host knows of a sequence's blocks, in every keyspace opened through this cache that is still in use.

        Returns:
            One dictionary a stored block: what `Space.inspect` says, with `model`, `plan` and `position`.
        """
        return [
            {"model": space.keyspace.model, "plan": space.keyspace.plan, "position": position, **block}
            for space in self._used()
            for position, block in enumerate(space.inspect(token_ids))
            if block is not None
        ]

    def where(self, token_ids: Any) -> list[dict[str, Any]]:
        """Which hosts hold how much of a sequence, in every keyspace of this cache in use, longest prefix first.

        Returns:
            One dictionary a keyspace and host: what `Space.where` says, with `model` and `plan`.
        """
        found = [
            {"model": space.keyspace.model, "plan": space.keyspace.plan, **place}
            for space in self._used()
            for place in space.where(token_ids)
        ]
        return sorted(found, key=lambda place: -int(place["tokens"]))

    def _used(self) -> list[Space]:
        """One space of each keyspace and rank in use."""
        with self._lock:  # a dictionary must not grow while it is gone through
            found = list(self._spaces.items())
        return list({(root, rank): space for (root, rank, *_), space in found}.values())

    def status(self) -> dict[str, Any]:
        """The host's status, with this client's counters as `client`, and how it reads the GPU tier as `device`.

        Only these two, and `error`, when the host does not answer.
        """
        mine = {"client": dict(self.counters), "device": str(self._device)}
        try:
            return self.session.status() | mine
        except SessionError as exc:
            return {"error": str(exc)} | mine

    def close(self) -> None:
        """Finish the saves that are queued, then end the session; idempotent."""
        self._saver.close()
        self.session.close()
        for close in self._closing:
            close()
