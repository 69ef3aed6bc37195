"""Running an emitter of vector code over an array."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from kvtier.codecs.cpu.intrinsics import load_vector, store_vector


def emitted(convert: Any, item: Any, source: np.ndarray, out: np.ndarray, lanes: int) -> np.ndarray:
    """What `convert(builder, vector)` makes of each `lanes` elements, which are LLVM's `item`."""

    @intrinsic
    def step(typingctx: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            store_vector(builder, convert(builder, load_vector(builder, args[1], item, lanes)), args[0])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    @numba.njit
    def loop(target: int, source: int, count: int, wide: int, narrow: int) -> None:
        for i in range(0, count, lanes):
            step(target + i * wide, source + i * narrow)

    assert source.size % lanes == 0
    loop(out.ctypes.data, source.ctypes.data, source.size, out.itemsize, source.itemsize)
    return out
