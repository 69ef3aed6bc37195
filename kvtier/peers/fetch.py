"""Fetching blocks over one link, right into their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.block import verify_payload
from kvtier.errors import CorruptPayload, ProtocolMismatch
from kvtier.peers import wire
from kvtier.peers.choose import Want
from kvtier.peers.link import Link
from kvtier.peers.wire import Kind, Status

WHOLE, CORRUPT, ABSENT = "fetched", "corrupt", "absent"
"""What becomes of a block that was answered."""


def fetch(
    link: Link, wants: Sequence[Want], wait: float, *, seconds: float, until: float, tell: Callable[[str], None]
) -> None:
    """Fetch these blocks; when it returns or raises, nothing writes into them any more.

    Args:
        link: to who has them.
        wants: the blocks.
        wait: seconds for which the other host may bring blocks up.
        seconds: left for all of it.
        until: when that is, by the link's clock.
        tell: is told what became of each block, in their order.

    Raises:
        DeadlineExceeded, SessionUnavailable, Unauthenticated, ProtocolMismatch: the rest of the blocks will not come.
    """
    sizes = np.array([want.nbytes for want in wants], np.int64)
    link.send(Kind.FETCH, wire.fetch(seconds, wait, wire.items([want.key for want in wants], sizes)), until)
    at = 0
    while at < len(wants):
        kind, body = link.receive(until, wait)
        if kind is not Kind.BLOCKS:
            raise ProtocolMismatch(f"another host answered a request for blocks with a frame of kind {kind.name}")
        for status in wire.read_blocks(body, at, len(wants) - at):
            tell(_take(link, wants[at], until) if status == Status.SENT else ABSENT)
            at += 1


def _take(link: Link, want: Want, until: float) -> str:
    """Read one payload and verify it at once: it is in the processor's cache, and the next one comes meanwhile."""
    link.fill(want.into, until)
    try:
        header = verify_payload(want.into, expected=want.key)
    except CorruptPayload:
        return CORRUPT
    return WHOLE if header.payload_nbytes == want.nbytes else CORRUPT
