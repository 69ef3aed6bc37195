"""What a user may say of the connector, in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvtier.connectors.options import read

WHERE = "--hicache-storage-backend-extra-config"
OWN = frozenset(
    (
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    )
)
"""Names in there that are SGLang's."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the SGLang connector; all but `revision` have a default."""

    revision: Annotated[
        str, Meta(min_length=1, description="the weights' revision in keys: another one for whatever changes the KV")
    ]
    target: Annotated[
        str | None, Meta(description="the host's door.sock, a kvtier.toml, or grpcs://host:port; default: this host's")
    ] = None
    token: Annotated[str, Meta(description="of another host, for grpcs://; default: $KVTIER_TOKEN")] = ""
    ca: Annotated[str | None, Meta(description="certificates (PEM) of who may vouch for that host")] = None
    model: Annotated[str, Meta(description="the model's name in keys; default: SGLang's name of it")] = ""
    kv_cache_dtype: Annotated[
        str, Meta(description="what SGLang was started with, where its pages do not say it: fp8_e4m3, fp8_e5m2")
    ] = ""
    wait: Annotated[
        float, Meta(ge=0, le=60, description="seconds that a batch of pages may wait for what is on its way to memory")
    ] = 1.0
    ttl: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="seconds after which saved pages expire; null for never")
    ] = None
    tenant: Annotated[str, Meta(description="salt: who has another one shares nothing")] = ""
    threads: Annotated[int, Meta(ge=1, le=64, description="threads that copy one batch of pages")] = 1

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """Check what a user gave.

        Raises:
            ConfigError: an unknown name, or a value that cannot be.
        """
        return read(cls, {name: value for name, value in (given or {}).items() if name not in OWN}, WHERE)
