"""kvtier.toml, from file to frozen structs.

    units       sizes ("32GiB") and durations ("30s")
    schema      every field, described once
    remote      those of clients on other hosts
    load        find, read and check a file; explain the fields

Everything has a default that works on one machine, so there need not be a file. What a file says is checked where it is
read: a misspelt name, a wrong type or a value that cannot work is a `ConfigError` that names the field, the line and
what to set. Defaults that depend on the machine (free memory, the user's folders) are worked out once, when a `Config`
is made; everything that `kvtier up` starts is given the result, so a restarted process never sees other values.

There are no secrets in a `Config`: passwords are in files or in the environment, and a URL that carries one is refused.
"""

from kvtier.config.load import explain, find, load
from kvtier.config.remote import RemoteConfig
from kvtier.config.schema import (
    ClientConfig,
    Config,
    CpuConfig,
    EventsConfig,
    FleetConfig,
    GpuConfig,
    IndexConfig,
    MetricsConfig,
    NvmeConfig,
    RayConfig,
    StatusConfig,
)
from kvtier.config.units import Duration, Size

__all__ = [
    "ClientConfig",
    "Config",
    "CpuConfig",
    "Duration",
    "EventsConfig",
    "FleetConfig",
    "GpuConfig",
    "IndexConfig",
    "MetricsConfig",
    "NvmeConfig",
    "RayConfig",
    "RemoteConfig",
    "Size",
    "StatusConfig",
    "explain",
    "find",
    "load",
]
