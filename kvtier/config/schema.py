"""What a kvtier.toml may say."""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from kvtier.config import machine
from kvtier.config.remote import RemoteConfig
from kvtier.config.units import Duration, Size
from kvtier.errors import ConfigError

SOCKET_PATH_LIMIT = 103
"""Bytes that the path of a Unix socket may have on every platform (on Linux it is 107)."""
GiB = 1 << 30
ENDPOINT = re.compile(r"tcp://[^/\s]+:(\d{1,5}|\*)|ipc://\S+")
Port = Annotated[int, Meta(ge=0, le=65535)]
Part = Annotated[float, Meta(gt=0.0, le=1.0)]


def folder(path: str, host: str = "") -> Path:
    """A folder that a file names, absolute; "{host}" in it stands for the name of a host, of this one by default."""
    return Path(path.replace("{host}", host or machine.host_name())).expanduser().absolute()


def _default_run_dir() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return str(Path(runtime, "kvtier") if runtime else Path(tempfile.gettempdir(), f"kvtier-{os.getuid()}"))


def _default_arena_dir() -> str:
    shared = Path("/dev/shm")  # noqa: S108
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return str(parent / (f"kvtier-{os.getuid()}" if parent == shared else f"kvtier-arena-{os.getuid()}"))


def _default_cpu_capacity() -> Size:
    return Size(max(1, min(4 * GiB, machine.memory().nbytes // 4) >> 20) << 20)


def _default_nvme_path() -> str:
    cache = os.environ.get("XDG_CACHE_HOME")
    return str((Path(cache) if cache else Path.home() / ".cache") / "kvtier" / "nvme")


class CpuConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The arena: memory that every engine of the host maps."""

    capacity: Annotated[
        Size,
        Meta(
            description="Memory of the CPU tier. Default: a quarter of what machine and container leave, at most 4GiB."
        ),
    ] = field(default_factory=_default_cpu_capacity)
    high: Annotated[Part, Meta(description="Part in use above which old blocks move down to NVMe.")] = 0.9
    low: Annotated[Part, Meta(description="Part in use at which moving down stops.")] = 0.8
    pinned: Annotated[Part, Meta(description="Part of the tier that pinned blocks may take.")] = 0.25
    policy: Annotated[
        str,
        Meta(
            description='Which blocks leave memory first: "lru", used longest ago; "fifo", came longest ago; '
            '"s3fifo", not used since they came; "cost", cheap to compute again.'
        ),
    ] = "lru"

    def __post_init__(self) -> None:
        if self.capacity < 1 << 20:
            raise ConfigError(f"cpu.capacity is {self.capacity}; set at least 1MiB")
        if not self.low <= self.high:
            raise ConfigError(f"cpu.low is {self.low}; set it to at most cpu.high ({self.high})")
        if self.policy not in ("lru", "fifo", "s3fifo", "cost"):
            raise ConfigError(f'cpu.policy is {self.policy!r}; set it to "lru", "fifo", "s3fifo" or "cost"')


class NvmeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The tier on disk."""

    capacity: Annotated[
        Size, Meta(description="Disk space of the NVMe tier, taken at once, on each of its devices; 0 for none.")
    ] = Size(8 * GiB)
    path: Annotated[
        str | tuple[str, ...],
        Meta(
            description="Folder of its file; for several devices a list with a folder on each, over which blocks are "
            "spread. Default: kvtier/nvme in $XDG_CACHE_HOME, else in ~/.cache."
        ),
    ] = field(default_factory=_default_nvme_path)
    region_size: Annotated[
        Size, Meta(description="Unit in which it writes and evicts; lowered to an eighth of the capacity.")
    ] = Size(257 << 20)
    lossless: Annotated[
        str,
        Meta(
            description='How 16-bit blocks of the plan "raw" are packed: with "zstd" 1.4 times as many have room, with '
            '"lz4" 1.2 times; "auto" packs where reads become faster by it, as on disks below about 0.5 GB/s; "off" '
            "reads and writes fastest on NVMe."
        ),
    ] = "off"
    admission: Annotated[
        str,
        Meta(
            description='Which blocks are written when it is full: "all"; "second", those seen for the second time; '
            '"auto", whichever of these would have had more of what was asked for.'
        ),
    ] = "auto"
    endurance: Annotated[Size, Meta(description="Bytes that it may write a day; 0 for no limit.")] = Size(0)

    def __post_init__(self) -> None:
        if self.lossless not in ("off", "auto", "lz4", "zstd"):
            raise ConfigError(f'nvme.lossless is {self.lossless!r}; set it to "off", "auto", "lz4" or "zstd"')
        if self.admission not in ("auto", "all", "second"):
            raise ConfigError(f'nvme.admission is {self.admission!r}; set it to "auto", "all" or "second"')
        if not self.folders:
            raise ConfigError("nvme.path is an empty list; name a folder, or set nvme.capacity to 0 for no NVMe tier")
        folders = [Path(os.path.normpath(one)) for one in self.folders]
        for number, one in enumerate(folders):
            for other in folders[:number]:
                if one.is_relative_to(other) or other.is_relative_to(one):
                    how = "names one folder twice" if one == other else "has a folder inside another"
                    raise ConfigError(f"nvme.path {how}: {other}, {one}; name one folder on each device")

    @property
    def folders(self) -> tuple[Path, ...]:
        """Of each device, absolute."""
        return self.folders_on(machine.host_name())

    def folders_on(self, host: str) -> tuple[Path, ...]:
        """The same, on a host of this name."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(folder(path, host) for path in paths)


class GpuConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The tier in GPU memory."""

    capacity: Annotated[Size, Meta(description="GPU memory of the tier; 0 for none.")] = Size(2 * GiB)
    device: Annotated[
        str,
        Meta(
            description='"auto": the first CUDA device, none where there is no CUDA; "cuda:N"; '
            '"cpu": an emulation in host memory, shown as gpu(host); "off".'
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|off|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f'gpu.device is {self.device!r}; set it to "auto", "cuda:0", "cpu" or "off"')


class IndexConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where hosts tell which blocks they have."""

    url: Annotated[
        str,
        Meta(
            description='"embedded": a Redis server that `kvtier up` starts; "local": none, for a single host; or '
            "redis://[user@]host:port/db, unix:///path, redis+sentinel://host:port,host:port/NAME[/db], "
            "redis+cluster://host:port,host:port; rediss... in place of redis for TLS."
        ),
    ] = "embedded"
    password_file: Annotated[
        str, Meta(description="File that holds the Redis password; else $KVTIER_REDIS_PASSWORD is used.")
    ] = ""
    port: Annotated[
        Port, Meta(description="Port of the Redis server that `kvtier up` starts, where ray.host is set; 0: any free.")
    ] = 0

    def __post_init__(self) -> None:
        if re.search(r"//[^/@]*:[^/@]*@|[?&]password=", self.url):
            raise ConfigError(
                "index.url carries a password: take it out, and set index.password_file to a file that holds it, "
                "or $KVTIER_REDIS_PASSWORD"
            )
        if self.url not in ("embedded", "local") and not re.match(
            r"(rediss?(\+sentinel|\+cluster)?|unix)://", self.url
        ):
            raise ConfigError(
                f'index.url is {self.url!r}; set it to "embedded", "local", or a URL that begins with redis://, '
                "rediss://, unix://, redis+sentinel:// or redis+cluster://"
            )


class RayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The Ray cluster that runs kvtier's processes."""

    address: Annotated[
        str,
        Meta(description='host:port of a running Ray cluster to use; "" to start one for kvtier alone.'),
    ] = ""
    host: Annotated[
        str,
        Meta(
            description="This machine's address for other hosts. Set it on the first host of a fleet: then Ray, and "
            'the Redis server that `kvtier up` starts, can be reached there by `kvtier join`; "" for a single host.'
        ),
    ] = ""
    port: Annotated[Port, Meta(description="Port of the Ray head that kvtier starts; 0 for any free one.")] = 0
    storage: Annotated[
        str,
        Meta(
            description="Where the Ray head that kvtier starts keeps what it knows, so that `kvtier up` starts it "
            'again after its death without ending other hosts: "rocksdb", in run_dir; redis://host:port; "memory", '
            'nowhere; "auto", rocksdb where ray.host is set.'
        ),
    ] = "auto"
    labels: Annotated[
        str,
        Meta(
            description="Ray nodes that get kvtier's actors: those with all these labels, as in \"kvtier.io/cache=true,"
            'zone=a"; "" for every node.'
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.storage not in ("auto", "memory", "rocksdb") and not re.fullmatch(r"redis://[^/@]+:\d+", self.storage):
            raise ConfigError(
                f'ray.storage is {self.storage!r}; set it to "auto", "memory", "rocksdb" or redis://host:port (without '
                "a password: Ray would show it in the process list)"
            )
        for label in filter(None, self.labels.split(",")):
            if not re.fullmatch(r"\s*[^=\s]+\s*=\s*[^=\s]*\s*", label):
                raise ConfigError(f'ray.labels has {label!r}; write it as "name=value", several with commas between')

    @property
    def selected(self) -> dict[str, str]:
        """The labels, by name."""
        pairs = (label.partition("=") for label in self.labels.split(",") if label)
        return {name.strip(): value.strip() for name, _, value in pairs}


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What hosts of one fleet do for each other; a host that is alone does nothing of it."""

    peers: Annotated[
        bool, Meta(description="Whether blocks are fetched from other hosts and lent to them, where there are any.")
    ] = True
    address: Annotated[
        str, Meta(description='IP address at which other hosts reach this one; "" for that of its Ray node.')
    ] = ""
    port: Annotated[Port, Meta(description="Port at which they do; 0 for any free one.")] = 0
    replicate: Annotated[
        int,
        Meta(ge=0, description="Hits a minute from which on a block is offered to a second host; 0 for never."),
    ] = 30
    drain: Annotated[
        Duration, Meta(description="For handing blocks over to other hosts when a host is drained or told to end.")
    ] = Duration(20.0)
    cert: Annotated[
        str, Meta(description='PEM file of the certificate of this host, for TLS between hosts; "" for none.')
    ] = ""
    key: Annotated[str, Meta(description="PEM file of its key.")] = ""
    ca: Annotated[str, Meta(description="PEM file of the authority that signed the certificates of all hosts.")] = ""

    def __post_init__(self) -> None:
        if self.address:
            try:
                usable = not ipaddress.ip_address(self.address).is_unspecified
            except ValueError:
                usable = False
            if not usable:
                raise ConfigError(
                    f"fleet.address is {self.address!r}; set it to an IP address of this machine, without a port"
                )
        named = [name for name in ("cert", "key", "ca") if getattr(self, name)]
        if len(named) not in (0, 3):
            raise ConfigError(f"fleet.{named[0]} is set; TLS between hosts needs fleet.cert, fleet.key and fleet.ca")


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The Prometheus exporter of each host."""

    host: Annotated[str, Meta(description="Address that it listens on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Its port; 0 for any free one (`kvtier status` shows it).")] = 9400


class StatusConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The status page of the fleet, on the host where `kvtier up` ran (docs/status.md)."""

    host: Annotated[
        str, Meta(description="Address that it listens on; any but a loopback address needs status.token_file.")
    ] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Its port; 0 for any free one (`kvtier status` shows it).")] = 9401
    token_file: Annotated[
        str, Meta(description='File with the token that who looks must have; "" for none, on a loopback address only.')
    ] = ""

    def __post_init__(self) -> None:
        if not self.token_file and not machine.is_loopback(self.host):
            raise ConfigError(
                f"status.host is {self.host!r}, which others reach: set status.token_file to a file with a token, or "
                'status.host to "127.0.0.1"'
            )


class EventsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What enters and leaves the tiers of each host, told to routers in vLLM's schema (docs/events.md)."""

    endpoint: Annotated[
        str,
        Meta(
            description='Where routers subscribe: "tcp://ADDRESS:PORT", as "tcp://127.0.0.1:5557" or "tcp://*:5557" '
            '(all addresses), or "ipc://PATH"; {host} stands for the host\'s name; "" for no events. Whoever reaches '
            "it reads all of it."
        ),
    ] = ""
    replay_endpoint: Annotated[
        str, Meta(description='Where they ask for what they missed; "" for the port after that one.')
    ] = ""
    topic: Annotated[str, Meta(description='Topic of all events; "{host}" in it stands for the name of the host.')] = (
        "kvtier@{host}"
    )
    buffer: Annotated[int, Meta(ge=1, le=1_000_000, description="Batches that are kept for those who missed some.")] = (
        10_000
    )

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value and not ENDPOINT.fullmatch(value):
                raise ConfigError(
                    f'events.{name} is {value!r}; write "tcp://ADDRESS:PORT", as "tcp://127.0.0.1:5557", or "ipc://PATH"'
                )

    @property
    def endpoints(self) -> tuple[str, str]:
        """Both, on this host; the second is empty for what goes with the first."""
        host = machine.host_name()
        return self.endpoint.replace("{host}", host), self.replay_endpoint.replace("{host}", host)


class ClientConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How long an engine waits for its host before it goes on without."""

    connect_timeout: Annotated[Duration, Meta(description="To attach to the host.")] = Duration(5.0)
    call_timeout: Annotated[Duration, Meta(description="For one call; then it counts as a miss.")] = Duration(1.0)

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "call_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f'client.{name} is 0; set a time, like "1s"')


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    run_dir: Annotated[
        str,
        Meta(
            description="Folder of socket, state file and secrets; mode 0700. {host} in a folder stands for the host's "
            "name. Default: $XDG_RUNTIME_DIR/kvtier, else kvtier-UID in the temporary folder."
        ),
    ] = field(default_factory=_default_run_dir)
    arena_dir: Annotated[
        str,
        Meta(
            description="Folder of the shared memory. Default: /dev/shm/kvtier-UID; a folder in the temporary folder "
            "where there is no /dev/shm."
        ),
    ] = field(default_factory=_default_arena_dir)
    group: Annotated[
        str, Meta(description="Name of a group whose engines may map the arena too; empty for this user's only.")
    ] = ""
    cpu: CpuConfig = field(default_factory=CpuConfig)
    nvme: NvmeConfig = field(default_factory=NvmeConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    status: StatusConfig = field(default_factory=StatusConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)

    def __post_init__(self) -> None:
        size = len(os.fsencode(self.socket))
        if size > SOCKET_PATH_LIMIT:
            raise ConfigError(
                f"run_dir {self.run_dir} is too long: a Unix socket's path has at most {SOCKET_PATH_LIMIT} bytes, "
                f"{self.socket} has {size}; set run_dir to a shorter folder"
            )

    @property
    def socket(self) -> Path:
        """The host's door."""
        return folder(self.run_dir) / "door.sock"

    @property
    def mode(self) -> int:
        """Of the arena's files and the socket."""
        return 0o660 if self.group else 0o600
