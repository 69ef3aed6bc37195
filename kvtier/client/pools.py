"""A pool that all share, and blocks that only one session finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvtier.client.save import Saved
from kvtier.client.scope import whole
from kvtier.client.space import Space
from kvtier.errors import ConfigError, UsageError

AFTER = "kvtier.after"
"""The override that says which public blocks a session's own ones follow."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What was loaded of a prompt.

    Attributes:
        public: tokens that the public pool has, from the first on.
        own: tokens that the session's own blocks have, from the edge on.
        edge: where what may be public ends, in whole blocks.
        space: the session's own blocks behind it.
    """

    public: int
    own: int
    edge: int
    space: Space = field(compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """Verified, from the first on."""
        return max(self.public, self.edge + self.own if self.public >= self.edge else 0)


class Pools:
    """Routes one session's prompts: first the public chain, then the session's own.

        tokens    | system prompt, documents    | conversation          |
        blocks    | public pool, for everybody  | the session's own     |
                                                ^ edge

    The session's own blocks are keyed by its secret and by the key of the last public block, which stands for all
    tokens before them: so they are found by nobody else, and behind nothing else. What is public is the caller's to
    say; behind the edge nothing is ever stored where others look.

    Args:
        open: opens a keyspace of the model for exact KV, given `tenant` and `overrides`: for example
            `functools.partial(space_for, cache, model, model_name=..., revision=...)`.
        session: secret that the session's own keys are salted with. Who knows it finds its blocks.

    Raises:
        ConfigError: no secret.
    """

    def __init__(self, open: Callable[..., Space], session: str) -> None:  # noqa: A002
        self._open, self._session = open, secret_of(session)
        self.public = open()

    def own(self, token_ids: Any, edge: int) -> Space:
        """The session's own blocks behind the first `edge` tokens of a sequence, which are whole public blocks."""
        keyspace = self.public.keyspace
        keys = keyspace.chain(token_ids[:edge])
        after = (keys[-1] if keys else keyspace.root).hex()
        return self._open(tenant=self._session, overrides={AFTER: after})

    def load(self, token_ids: Any, kv: Any, public: int, *, most: int | None = None, wait: float = 0.0) -> Pooled:
        """Load the longest stored prefix.

        A session's own blocks are looked for only behind a public part that is there as a whole. What the public pool
        has beyond that part is loaded, too: reading it tells nobody anything.

        Args:
            token_ids: of the sequence, one dimension.
            kv: where to, from token 0 on: as for `Hit.load`, but no view.
            public: how many first tokens may be shared with everybody; down to whole blocks.
            most: how many first tokens may be loaded; all unless given. It does not move the edge.
            wait: as for `Space.match`.

        Raises:
            UsageError: `public` is more than there are tokens.
            KVMismatch: as for `Hit.load`.
        """
        edge = self._edge(token_ids, public)
        own = self.own(token_ids, edge)
        most = len(token_ids) if most is None else most
        with self.public.match(token_ids[:most], wait=wait) as hit:
            shared = hit.load(kv)
        if shared < edge:
            return Pooled(shared, 0, edge, own)
        with own.match(token_ids[edge:most], wait=wait) as hit:
            # What is there already stays: both are the KV of these tokens.
            return Pooled(shared, hit.load(_behind(kv, edge)) if edge + hit.tokens > shared else 0, edge, own)

    def save(self, token_ids: Any, kv: Any, loaded: Pooled) -> list[Future[Saved]]:
        """Store what was computed behind what was loaded: up to the edge for everybody, the rest for the session.

        `kv` must be exact: computed on nothing but what `load` verified and itself.

        Args:
            token_ids: of the sequence, as for `load` or longer.
            kv: its KV from token 0 on; as for `Space.save`, but no view.
            loaded: what `load` returned for it.

        Returns:
            A future for the public part and one for the session's own, as far as there is anything to store.
        """
        edge, done = loaded.edge, []
        if loaded.public < edge:
            done.append(self.public.save(token_ids[:edge], kv, start=loaded.public, vouched=True))
        if len(token_ids) - edge >= loaded.space.block_tokens + loaded.own:
            done.append(loaded.space.save(token_ids[edge:], _behind(kv, edge), start=loaded.own, vouched=True))
        return done

    def _edge(self, token_ids: Any, public: int) -> int:
        count = whole(public, "public")
        if not 0 <= count <= len(token_ids):
            raise UsageError(f"public is {count}; pass how many of the {len(token_ids)} tokens may be shared")
        return count - count % self.public.block_tokens


def secret_of(session: Any) -> str:
    """A session's secret.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(session, str):
        raise ConfigError(f"session is {type(session).__name__}; give text: of bytes, their hex()")
    if not session:
        raise ConfigError("session is empty; give a secret of this session's own, or nothing would be private")
    return session


def _behind(kv: Any, edge: int) -> Any:
    """Views of KV from a token on."""
    if hasattr(kv, "shape"):
        return kv[:, edge:] if len(kv.shape) == 3 else kv[:, :, edge:]
    return [_layer(layer, edge) for layer in kv]


def _layer(layer: Any, edge: int) -> Any:
    if hasattr(layer, "shape"):
        return layer[edge:]
    parts: Sequence[Any] = layer
    return tuple(part[edge:] for part in parts)
