"""Which page holds the KV of which tokens, and all before them."""

from __future__ import annotations

from typing import Any

from kvtier.errors import UsageError
from kvtier.keys import chain

NO_ROOT = bytes(32)
"""Where one pool holds the KV of one keyspace."""


class Names:
    """Names of full pages: the chain of SHA-256 over their tokens and all before (`kvtier.keys`), pages for blocks.

    It refers to no page: who frees or rewrites one says `forget`. Not thread-safe.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._page: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}

    def keys(self, token_ids: Any, root: bytes) -> list[bytes]:
        """What pages with these tokens are called.

        Raises:
            UsageError: the root is none.
        """
        if len(root) != len(NO_ROOT):
            raise UsageError(f"a root of {len(root)} bytes; pass that of a keyspace, {len(NO_ROOT)} bytes")
        return chain(root, token_ids, self._page_tokens)

    def give(self, pages: list[int], keys: list[bytes]) -> None:
        """Name pages; of two with the same KV the first one keeps the name.

        Raises:
            UsageError: one is called otherwise; none is named.
        """
        for number, (page, key) in enumerate(zip(pages, keys, strict=False)):
            if self._name.get(page, key) != key:
                raise UsageError(f"page {number} of the sequence was named for other tokens, or another root")
        for page, key in zip(pages, keys, strict=False):
            if self._page.setdefault(key, page) == page:
                self._name[page] = key

    def find(self, keys: list[bytes]) -> list[int]:
        """The pages that are called so, up to the first that there is not."""
        found = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def forget(self, page: int) -> None:
        """Take a page's name, if it has one."""
        key = self._name.pop(page, None)
        if key is not None:
            del self._page[key]
