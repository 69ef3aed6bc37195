"""Paged KV: many sequences in one pool of pages, which share what they have in common.

    pool      PagePool: which pages are free, how often each of the others is referred to
    names     which page holds the KV of which tokens
    tables    PageTables: a page table a sequence; fork, copy on write, cut, free, find. Arithmetic only
    kv        PagedKV: the memory, and reading and writing it by the tables
    batch     Batch: rows of one length, as attention takes them

A page is `page_tokens` tokens of all layers. Any free page serves any sequence, so a pool never needs to be
defragmented, and a sequence wastes less than one page. Slots follow from the count of tokens (token t: page
t // page_tokens, offset t % page_tokens), never from how many pages are allocated. Pages are taken when tokens need
them: all that a call needs, or none.

Who is about to write into a page that others have, too, gets a copy of it first. That can only be a sequence's last,
partial page, because sequences grow at their end: a fork costs a page at most, and beams, samples of one prompt and
turns that branch off hold once what they share. Reference counts are the tables' own; nobody else keeps any.

Prefixes are also found by content: full pages that were named for their tokens (the chain of `kvtier.keys`: only the
same tokens behind the same tokens match) are given to whoever asks for those tokens, as long as some sequence has them.
Keep a sequence to keep its prefix; what is to outlive it is the business of tiers.

The layer knows neither codecs nor engines. `PagedKV.pools` is what the codecs' views take, so that a block is decoded
into pages and encoded out of them in place; `Batch` is what a cache of transformers is made of
(`kvtier.connectors.transformers.paged`).
"""

from kvtier.pages.batch import Batch
from kvtier.pages.kv import PAGE_TOKENS, PagedKV
from kvtier.pages.pool import PagePool
from kvtier.pages.tables import PageTable, PageTables

__all__ = ["PAGE_TOKENS", "Batch", "PagePool", "PageTable", "PageTables", "PagedKV"]
