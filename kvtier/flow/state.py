"""The state of a sequence as bytes, and the name of the context that it is of."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.errors import CorruptPayload
from kvtier.keys import tokens_u32

DOMAIN = b"kvtier/context/1\0"


def context_of(ids: Any, turns: Sequence[int]) -> bytes:
    """SHA-256 of a sequence's tokens and of where its turns were: all that its state depends on, but for the recipe.

    Args:
        ids: its tokens.
        turns: lengths of the sequence at which calls of `Flow.generate` began and ended, and at which a later turn's
            tokens were cut into chunks.
    """
    ends = np.array([len(turns), *turns], np.dtype("<u4"))
    return hashlib.sha256(DOMAIN + ends.tobytes() + tokens_u32(ids).tobytes()).digest()


def pack(state: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Tensors, numbers, lists and dictionaries of them, as bytes."""
    file = io.BytesIO()
    torch.save(_alone(state), file)
    return np.frombuffer(file.getbuffer(), np.uint8)


def unpack(packed: NDArray[np.uint8]) -> dict[str, Any]:
    """The inverse of `pack`.

    Raises:
        CorruptPayload: it is none of its making.
    """
    try:
        state = torch.load(io.BytesIO(packed.data), weights_only=True)
    except Exception as exc:  # what torch raises for bytes that are none of its own is not said anywhere
        raise CorruptPayload(f"these {packed.nbytes} bytes are no state of a flow: {exc}") from exc
    return part({"state": state}, "state")


def told(state: Mapping[str, Any], name: bytes, count: int) -> tuple[torch.Tensor, list[int]]:
    """Tokens and turns of a sequence's state, which must be those that the context has its name from.

    Raises:
        CorruptPayload: they are not.
    """
    ids, turns = tensor(state, "ids", torch.int64, count), state.get("turns")
    if not isinstance(turns, list) or not all(type(turn) is int and 0 <= turn <= count for turn in turns):
        raise CorruptPayload(f"the state's turns are {turns!r}")
    if (ids < 0).any() or (ids >> 32).any() or context_of(ids, turns) != name:
        raise CorruptPayload("the state is of another context")
    return ids, turns


def part(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is in a part of a state.

    Raises:
        CorruptPayload: there is no such part.
    """
    found = state.get(name)
    if not isinstance(found, dict):
        raise CorruptPayload(f"the state's {name} is a {type(found).__name__}")
    return found


def tensor(state: Mapping[str, Any], name: str, dtype: torch.dtype, *shape: int | None) -> torch.Tensor:
    """A tensor of a state.

    Args:
        state: or a part of it.
        name: of the tensor.
        dtype: that it must have.
        shape: likewise; None for any size.

    Raises:
        CorruptPayload: it is not there, or is another.
    """
    found = state.get(name)
    if (
        not isinstance(found, torch.Tensor)
        or found.dtype != dtype
        or found.dim() != len(shape)
        or any(size not in (None, has) for size, has in zip(shape, found.shape, strict=True))
    ):
        raise CorruptPayload(f"the state's {name} is not {dtype} {list(shape)}")
    return found.contiguous()


def _alone(state: Any) -> Any:
    """Without the memory that tensors are only views of."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {name: _alone(each) for name, each in state.items()}
    return [_alone(each) for each in state] if isinstance(state, list) else state
