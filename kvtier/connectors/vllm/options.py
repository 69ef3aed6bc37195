"""What a user may say of the connector, under `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvtier.connectors.options import read


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the vLLM connector; each has a default."""

    target: Annotated[
        str | None, Meta(description="the host's door.sock, a kvtier.toml, or grpcs://host:port; default: this host's")
    ] = None
    token: Annotated[str, Meta(description="of another host, for grpcs://; default: $KVTIER_TOKEN")] = ""
    ca: Annotated[str | None, Meta(description="certificates (PEM) of who may vouch for that host")] = None
    plan: Annotated[str, Meta(min_length=1, description="precision plan; on a CPU only raw")] = "raw"
    model: Annotated[str, Meta(description="the model's name in keys; default: its name, or its folder's")] = ""
    revision: Annotated[
        str,
        Meta(description="the weights' revision in keys; default: the hub's commit, or SHA-256 of the weight files"),
    ] = ""
    load: Annotated[
        Literal["async", "sync"],
        Meta(description="async: others compute meanwhile; sync: within the step, layer by layer"),
    ] = "async"
    block_tokens: Annotated[
        int, Meta(ge=1, le=65536, description="tokens in a block: the multiple of vLLM's page nearest to this")
    ] = 64
    wait: Annotated[
        float, Meta(ge=0, le=60, description="seconds that a request may wait for blocks on their way to memory")
    ] = 1.0
    decline: Annotated[
        bool, Meta(description="compute what would take longer to load; the engine's speed is measured")
    ] = True
    ttl: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="seconds after which saved blocks expire; null for never")
    ] = None
    tenant: Annotated[str, Meta(description="salt: who has another one shares nothing")] = ""
    verify: Annotated[bool, Meta(description="verify the checksum of every block at each load, in memory too")] = False
    save: Annotated[bool, Meta(description="whether to save what is computed")] = True
    threads: Annotated[int, Meta(ge=1, le=64, description="threads that decode one load in CPU memory")] = 1

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Check what a user gave.

        Raises:
            ConfigError: an unknown name, or a value that cannot be.
        """
        return read(cls, given, "kv_connector_extra_config")

    def block_of(self, page_tokens: int) -> int:
        """Tokens in a block: the multiple of a page nearest to `block_tokens`, one page at least."""
        return max(1, round(self.block_tokens / page_tokens)) * page_tokens
