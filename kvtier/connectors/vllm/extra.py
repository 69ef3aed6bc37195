"""What of a request, besides its tokens, its KV depends on."""

from __future__ import annotations

import re
import struct
from typing import Any

CONTENT = re.compile(r"(?:^|:)(?:[0-9a-f]{64}|[0-9a-f]{128})\Z")
"""How vLLM names a multimodal input by its content (BLAKE3, SHA-256, SHA-512); a name that a caller chose, such as a
UUID, says nothing of it."""


class Unstorable(Exception):
    """Blocks of this request cannot be named by what they hold. The message is the counted reason."""


def extras(request: Any, block_tokens: int, blocks: int) -> list[bytes] | None:
    """For each of the first blocks what else it depends on, as `Keyspace.chain` takes it; None for nothing.

    An entry is a tag and its values, each with its length in front: `mm` with the digest of the input and, as a signed
    64-bit number, where it begins relative to the block; `salt`, in the first block, with vLLM's `cache_salt`. LoRAs
    have keyspaces of their own.

    Args:
        request: vLLM's.
        block_tokens: tokens in a block.
        blocks: how many.

    Raises:
        Unstorable: embeddings in place of tokens, a LoRA that is loaded in place, or an input with a name of the
            caller's choice.
    """
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        raise Unstorable("prompt_embeds")
    if getattr(getattr(request, "lora_request", None), "load_inplace", False):
        raise Unstorable("adapter_in_place")  # read anew whenever vLLM likes
    features = getattr(request, "mm_features", None) or ()
    if not features and not request.cache_salt:
        return None
    found = [b""] * blocks
    if blocks and request.cache_salt:
        found[0] += _entry(b"salt", request.cache_salt.encode())
    for feature in features:
        name, at = feature.identifier, feature.mm_position
        if not CONTENT.search(name or ""):
            raise Unstorable("multimodal_name")
        last = min(blocks, -(-(at.offset + at.length) // block_tokens))
        for block in range(at.offset // block_tokens, last):
            found[block] += _entry(b"mm", name.encode(), struct.pack("<q", at.offset - block * block_tokens))
    return found


def _entry(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)
