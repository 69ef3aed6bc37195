"""The state of a sequence as bytes, and the name of the context that it is of."""

from __future__ import annotations

import hashlib
import io
import pickle
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
        turns: lengths of the sequence at which calls of `Flow.generate` began and ended.
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
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as exc:
        raise CorruptPayload(f"these {packed.nbytes} bytes are no state of a flow: {exc}") from exc
    if not isinstance(state, dict):
        raise CorruptPayload(f"the state is a {type(state).__name__}")
    return state


def _alone(state: Any) -> Any:
    """Without the memory that tensors are only views of."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {name: _alone(each) for name, each in state.items()}
    return [_alone(each) for each in state] if isinstance(state, list) else state
