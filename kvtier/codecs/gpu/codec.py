"""The codec of every plan, on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.codecs.codebook import LEVELS, MIDPOINTS
from kvtier.codecs.gpu import jobs
from kvtier.codecs.gpu.batch import Batch, batch
from kvtier.codecs.gpu.decode import decode
from kvtier.codecs.gpu.encode_halves import encode_halves
from kvtier.codecs.gpu.encode_rows import encode_rows, pack
from kvtier.codecs.gpu.encode_shared import encode_shared
from kvtier.codecs.gpu.exact import copy
from kvtier.codecs.gpu.jobs import Jobs
from kvtier.codecs.gpu.tiles import decode_tile, group_tile, plain_tile, shared_tile
from kvtier.codecs.gpu.traits import Stored
from kvtier.codecs.gpu.view import DeviceView
from kvtier.codecs.layout import layout
from kvtier.codecs.plan import canonical, parse_plan, resolve
from kvtier.codecs.reference import CLIPS
from kvtier.spec import KVSpec


class GpuCodec:
    """Carries out a plan for blocks of one spec, on a GPU: the bodies and the KV of `PlanCodec`, bit for bit.

    Every operation is IEEE arithmetic in float32, in the order of `reference`, and none is fused with another. Only the
    bits of a NaN, decoded from a body that was never encoded, are the device's own.

    Work is queued on the current stream: `decode` returns before it is done; `encode` waits, for it says what could be
    stored. Nothing is allocated that grows with the KV, but for a byte an element while rows are packed whose groups
    are not whole units of 32 elements.

    Args:
        plan: as for `PlanCodec`. "hadamard" with groups that are neither whole rotated runs nor parts of one is refused
            with `ConfigError`: there is no kernel for it.
        spec: of the blocks.
        device: where KV and bodies are; "cpu" in Triton's interpreter.
    """

    number = 3

    def __init__(self, plan: str, spec: KVSpec, device: torch.device | str) -> None:
        layers = resolve(parse_plan(plan), spec)
        self.plan, self.spec = canonical(layers), spec
        self.layouts = layout(layers, spec, first=True), layout(layers, spec, first=False)
        self.device = torch.empty(0, device=device).device
        self._quantised = jobs.quantised(self.layouts, spec, self.device)
        self._raw = jobs.raw(self.layouts, spec, self.device)
        self._sinks = jobs.sinks(self.layouts, spec, self.device)
        self._tables = {each.parts: _table(each.parts, self.device) for each in self._quantised}

    def layers(self, position: int) -> NDArray[np.int64]:
        return self.layouts[position > 0].layers

    def nbytes(self, position: int) -> int:
        return self.layouts[position > 0].nbytes

    def encode(
        self,
        kv: DeviceView,
        tokens: NDArray[np.int64],
        memory: torch.Tensor,
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
        layers: range,
    ) -> NDArray[np.bool_]:
        call = batch(self.spec, self.layouts, kv, (tokens, offsets, positions), memory, layers, device=self.device)
        stored = torch.ones(call.count, dtype=torch.uint8, device=self.device)
        with self._current():
            self._copy(call, load=False)
            for each in self._quantised:
                self._encode(call, each, stored)
            return stored.cpu().numpy().astype(np.bool_)

    def decode(
        self,
        memory: torch.Tensor,
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
        kv: DeviceView,
        tokens: NDArray[np.int64],
        layers: range,
    ) -> None:
        kv.require_writable()
        call = batch(self.spec, self.layouts, kv, (tokens, offsets, positions), memory, layers, device=self.device)
        with self._current():
            self._copy(call, load=True)
            for each in self._quantised:
                parts, (count, where, numbers) = each.parts, call.work(each)
                rows, columns, alike = decode_tile(parts)
                grid = grid_of(count, parts, rows, columns)
                launch(decode, grid, *where, self._tables[parts], *numbers, parts, kv.seen, rows, columns, alike)

    def _copy(self, call: Batch, *, load: bool) -> None:
        for each in (*self._raw, *(self._sinks if call.firsts else ())):
            parts, (count, where, numbers) = each.parts, call.work(each)
            rows, columns = plain_tile(parts)
            grid = grid_of(count, parts, rows, columns)
            launch(copy, grid, *where, *numbers, parts, call.kv.seen, rows, columns, load)

    def _encode(self, call: Batch, each: Jobs, stored: torch.Tensor) -> None:
        parts, seen, (count, where, numbers) = each.parts, call.kv.seen, call.work(each)
        if parts.granularity == "row":
            self._encode_rows(call, each, stored)
        elif parts.granularity == "none":
            rows, columns = plain_tile(parts)
            grid = grid_of(count, parts, rows, columns)
            launch(encode_halves, grid, *where, stored, *numbers, parts, seen, rows, columns)
        else:
            tile = _, columns, _, tiles = shared_tile(parts)
            grid = (count, -(-parts.tokens // parts.group), -(-parts.elements // (columns * tiles)))
            launch(encode_shared, grid, *where, self._tables[parts], stored, *numbers, parts, seen, *tile)

    def _encode_rows(self, call: Batch, each: Jobs, stored: torch.Tensor) -> None:
        parts, (count, where, numbers) = each.parts, call.work(each)
        tile = rows, _, groups, whole = group_tile(parts)
        room = count * parts.tokens * parts.elements
        apart = stored if whole else torch.empty(room, dtype=torch.uint8, device=self.device)
        grid = (count, -(-parts.tokens // rows), parts.heads * parts.groups // groups)
        launch(encode_rows, grid, *where, self._tables[parts], stored, apart, *numbers, parts, call.kv.seen, *tile)
        if not whole:
            rows, columns = plain_tile(parts)
            grid = grid_of(count, parts, rows, columns)
            launch(pack, grid, *where[:3], apart, *numbers, parts, rows, columns)

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def grid_of(count: int, parts: Stored, rows: int, columns: int) -> tuple[int, int, int]:
    """So many programs that each tile of each part has one."""
    return count, -(-parts.tokens // rows), -(-parts.elements // columns)


def launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
    """Run a kernel over a grid; a product and a sum must not become one operation, which rounds once."""
    if all(grid):
        kernel[grid](*arguments, enable_fp_fusion=False)


def _table(parts: Stored, device: torch.device) -> torch.Tensor:
    """Levels and midpoints, or the shares that `clip` tries and what of the range it cuts away at each end."""
    if parts.form == "lloyd":
        positive = LEVELS[parts.bits]
        numbers = np.concatenate([-positive[::-1], positive, MIDPOINTS[parts.bits]])
    else:
        shares = np.array(CLIPS, np.float32)
        numbers = np.concatenate([shares, np.float32(0.5) * (np.float32(1) - shares)])
    return torch.from_numpy(numbers).to(device)
