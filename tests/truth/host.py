"""A whole host in this process, without Ray; what passes at its edges is noted, and its exporter is scraped."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvtier.config import Config, CpuConfig, GpuConfig, IndexConfig, MetricsConfig, NvmeConfig, RayConfig, Size
from kvtier.config.remote import RemoteConfig
from kvtier.config.schema import EventsConfig
from kvtier.index.address import RedisAddress
from kvtier.index.base import Index
from kvtier.index.connect import connect
from kvtier.index.options import RedisIndexOptions
from kvtier.tiers.base import TierNumber
from kvtier_services.actors import wire
from kvtier_services.actors.cpu_tier import CpuTierActor, Parts
from kvtier_services.actors.gpu_worker import GpuWorkerActor
from kvtier_services.actors.hands import Hand
from kvtier_services.actors.nvme_tier import NvmeTierActor
from kvtier_services.actors.peers import open_peers
from kvtier_services.cluster.parts import open_door, open_exporter, writer_gone
from kvtier_services.settings import Settings, host_name
from tests.door_fixture import Loop, folders
from tests.fleet_host import SECRET

CPU, NVME, GPU = 4 << 20, 8 << 20, 2 << 20
ENDURANCE = 32 << 20
"""Bytes that NVMe may write an hour; with half of it left, nothing is written that was not used since it came."""


def open_index(settings: Settings, door: str) -> Index:
    """As a host opens it, but that lookups have time on a busy machine."""
    address = RedisAddress(settings.redis_url, settings.redis_password_file)
    return connect(address, host=host_name(), door=door, options=RedisIndexOptions(lookup_timeout=5.0))


class Edge:
    """Reaches a tier's process, here an object, and notes what it was told and what it answered.

    Attributes:
        written, read: blocks that it said it wrote and read, with their payload bytes, by key.
        batches: calls that wrote or read.
        nbytes: of all blocks written and read.
        seconds: that those calls took.
        gate: reads wait for it.
    """

    def __init__(self, service) -> None:
        self.service = service
        self.written: Counter[bytes] = Counter()
        self.read: Counter[bytes] = Counter()
        self.batches: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, method, *args, timeout):
        if method == "read":
            assert self.gate.wait(10.0)
        began = time.perf_counter()
        answer = getattr(self.service, method)(*args)
        if method in ("write", "read"):
            keys, slots = wire.split(args[1]), wire.unpack_slots(args[2])
            done = {"write": self.written, "read": self.read}[method]
            whole, _ = wire.unpack_answer(answer)
            for key, nbytes, ok in zip(keys, slots.nbytes.tolist(), whole, strict=True):
                done[key] += ok
                self.nbytes[method] += ok * nbytes
            self.batches[method] += 1
            self.seconds[method] += time.perf_counter() - began
        return answer

    @property
    def tier(self):
        return self.service._tier

    def has(self) -> set[bytes]:
        return set(self.tier.inventory().keys)


class TruthHost:
    """The actor of a CPU tier with everything that `kvtier up` gives it."""

    def __init__(self, folder: Path, socket: Path, arena: Path, redis) -> None:
        devices = (str(folder / "a"), str(folder / "b"))
        self.config = Config(
            run_dir=str(socket.parent),
            arena_dir=str(arena / "arena"),
            ray=RayConfig(host="127.0.0.1"),
            index=IndexConfig(redis.address.url, redis.address.password_file),
            cpu=CpuConfig(capacity=Size(CPU)),
            nvme=NvmeConfig(capacity=Size(NVME), path=devices, endurance=Size(24 * ENDURANCE)),
            gpu=GpuConfig(capacity=Size(GPU), device="cpu"),
            metrics=MetricsConfig(port=0),
            events=EventsConfig(endpoint=f"ipc://{socket.parent}/events"),
            remote=RemoteConfig(listen="127.0.0.1:0", tokens_file=str(folder / "tokens.json")),
        )
        self.settings = Settings(self.config, redis.address.url, fleet_secret=SECRET)
        self.loop = Loop()
        names = list(self.settings.nvme_dirs)
        self.nvme = [Edge(NvmeTierActor(self.settings, name)) for name in names]
        self.gpu = Edge(GpuWorkerActor(self.settings, "cpu"))
        hands = {
            TierNumber.NVME: [Hand(name, name, edge, name) for name, edge in zip(names, self.nvme, strict=True)],
            TierNumber.GPU: [Hand("gpu", "gpu(host)", self.gpu)],
        }
        peers = partial(open_peers, address="127.0.0.1")
        self.began = time.time()
        self.actor = self.loop.run(self._start(Parts(hands, open_index, open_door, open_exporter, writer_gone, peers)))
        status = self.loop.run(self.actor.ready(10.0))
        assert not status["fault"], status["fault"]
        self.url = status["metrics"]["url"]
        self.remote = status["remote"]["address"]

    async def _start(self, parts: Parts) -> CpuTierActor:
        return CpuTierActor(self.settings, parts)

    @property
    def hierarchy(self):
        return self.actor._hierarchy

    def status(self) -> dict:
        return self.loop.run(self.actor.status())

    def scrape(self) -> Scrape:
        return Scrape(self.url)

    def close(self) -> None:
        self.loop.run(self.actor.stop(0.0))
        for edge in (*self.nvme, self.gpu):
            edge.service.stop()
        self.loop.run(asyncio.sleep(0))
        self.loop.close()


@contextmanager
def truth_host(folder: Path, redis) -> Iterator[TruthHost]:
    with folders() as (socket, arena):
        host = TruthHost(folder, socket, arena, redis)
        try:
            yield host
        finally:
            host.close()


class Scrape:
    """One scrape over HTTP; it remembers which metrics were looked at.

    Attributes:
        seen: their names.
        families: all of them, by name.
        host: the label of all samples.
    """

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=10) as answer:
            self.text = answer.read().decode()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self.seen: set[str] = set()
        (self.host,) = {sample.labels.pop("host") for one in self.families.values() for sample in one.samples}

    def all(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Values of a counter or gauge, by the values of its labels, in this order or in that of their names."""
        self.seen.add(name)
        samples = self.families[name].samples
        return {tuple(one.labels[label] for label in labels or sorted(one.labels)): one.value for one in samples}

    def some(self, name: str) -> dict[str, float]:
        """Of a metric with one label those values that are not 0."""
        return {label: value for (label,), value in self.all(name).items() if value}

    def one(self, name: str) -> float:
        """Of a metric without labels."""
        return self.all(name)[()]

    def histogram(self, name: str, *labels: str) -> tuple[float, float]:
        """Count and sum of a histogram; its buckets must go with its count."""
        self.seen.add(name)
        samples = [
            (one.name.removeprefix(name), one.labels.get("le"), one.value)
            for one in self.families[name].samples
            if tuple(value for label, value in one.labels.items() if label != "le") == labels
        ]
        found = {kind: value for kind, le, value in samples if le in (None, "+Inf")}
        below = [value for kind, le, value in samples if kind == "_bucket"]
        assert below == sorted(below)
        assert found["_bucket"] == found["_count"]
        return found["_count"], found["_sum"]
