"""vLLM's objects as far as the scheduler's side uses them; `tests/engines_vllm` has the real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

PAGE, BLOCK = 16, 64


class Request:
    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.request_id, self.prompt_token_ids, self.all_token_ids = name, list(tokens), list(tokens)
        self.prompt_embeds = self.lora_request = self.cache_salt = None
        self.mm_features: tuple[()] = ()
        self.skip_reading_prefix_cache = self.resumable = False
        self.num_computed_tokens = 0
        self.status = SimpleNamespace(name="FINISHED_STOPPED")

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Pool:
    """Counts references to pages; the first page stands for none."""

    def __init__(self, pages: int) -> None:
        self.num_gpu_blocks = pages
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(pages)]
        self.null_block = self.blocks[0]
        self.cached = set(range(1, pages))

    def evict_blocks(self, numbers: set[int]) -> None:
        self.cached -= numbers

    def touch(self, blocks: Iterable[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    @property
    def held(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


class Manager:
    def __init__(self, pool: Pool) -> None:
        self.block_pool = pool
        self.pages: dict[str, tuple[list[int], ...]] = {}

    def reset_prefix_cache(self) -> bool:
        return not self.block_pool.held

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        return self.pages[name]


def output(**tokens: int) -> SimpleNamespace:
    """A step that computes so many tokens of each request."""
    return SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))
