"""What happens on one scripted day."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

import kvtier
from kvtier import KVSpec
from kvtier.block import slot_nbytes
from kvtier.testing.payloads import payload_of
from kvtier.testing.session import NBYTES, chain, eventually
from tests.fleet_host import FleetHost
from tests.truth.host import CPU, TruthHost
from tests.truth.script import TOKENS, WAIT, Follower, Script

SLOT = slot_nbytes(NBYTES)
PREFILL = 500.0
SPEC = KVSpec(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=TOKENS)
KV = torch.randn(SPEC.layers, 2, 4 * TOKENS, SPEC.kv_heads, SPEC.head_dim, generator=torch.manual_seed(1)).bfloat16()
IDS = list(range(4 * TOKENS))


def tear(folders: tuple[str, ...], seed: int) -> None:
    """Change one byte of a block's payload on disk."""
    files = (file for folder in folders for file in Path(folder).rglob("*") if file.is_file() and file.stat().st_size)
    for file in files:
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
            at = mapped.find(payload_of(seed, NBYTES)[-256:])
            if at >= 0:
                mapped[at] ^= 1
                mapped.flush()
                os.fsync(opened.fileno())
                return
    raise AssertionError(f"payload {seed} is not on disk")


class Day:
    """The script, and the other things of its host."""

    def __init__(self, host: TruthHost, red: str, far: FleetHost) -> None:
        self.host, self.far = host, far
        self.script = Script(host)
        self.follower = Follower(host.config.events.endpoint)
        self.follower.hear()
        self.before = host.scrape()
        self.red = kvtier.connect(f"grpc://{host.remote}", token=red)
        self.cache = kvtier.connect(host.settings.socket)
        self.offered = 0
        self.codecs: dict[str, int] = {}
        self.theirs: list[bytes] = []

    def close(self) -> None:
        for one in (self.follower, self.red, self.cache, self.script.session):
            one.close()

    def morning(self) -> None:
        """Hits, misses, and moves that were asked for; what is hit is copied to the GPU tier."""
        script = self.script
        script.save(0, 10)
        script.match(0, 12, prefill=PREFILL, expected="c" * 10)
        script.match(5000, 3, expected="")
        script.down(0, 10)
        script.match(0, 10, expected="n" * 10)
        script.match(0, 10, expected="c" * 10)
        script.refuse(9000, 2 * CPU, "too_large")

    def peers(self) -> None:
        """Blocks of another host, which is lent some in return, and offers some when it goes."""
        state = self.host.hierarchy.state
        assert eventually(lambda: state.index.others() and self.far.hierarchy.state.index.others())
        assert self.far.save(range(7000, 7003)) == 3
        assert eventually(lambda: state.index.match(chain(7000, 3)) and all(state.index.match(chain(7000, 3))))
        self.script.match(7000, 3, expected="ppp")
        self.script.stored.update(chain(7000, 3))
        state.index.flush(WAIT)
        assert self.far.load(range(10), WAIT) == 10
        assert self.far.save([7200]) == 1
        assert eventually(lambda: all(state.index.match(chain(7200, 1))))
        self.far.spoil(7200)
        self.script.match(7200, 1, expected="")
        assert self.far.session.evict(chain(7200, 1)) == 1
        assert eventually(lambda: self.host.scrape().all("kvtier_peer_up") == {("b",): 1}), "it is asked again"
        assert self.far.save(range(7100, 7104)) == 4
        self.offered = self.far.hierarchy.hand_over(WAIT).taken
        assert self.offered == 4
        assert eventually(lambda: all(self.script.session.inspect(chain(7100, 4))))
        self.script.stored.update(chain(7100, 4))

    def noon(self) -> None:
        """Wrong bytes on disk and in memory, and blocks that nobody wants any more."""
        script, session = self.script, self.script.session
        script.save(100, 2)
        script.down(100, 2)
        tear(self.host.config.nvme.path, 101)
        script.went(101, 1, "nvme_lost")
        script.match(100, 2, expected="n")
        script.save(110, 1)
        script.went(110, 1, "bad_checksum")
        session.condemn(chain(110, 1), "bad_checksum")
        assert eventually(lambda: session.inspect(chain(110, 1)) == [None])
        script.save(120, 4)
        script.went(120, 4, "evict")
        assert session.evict(chain(120, 4)) == 4

    def clients(self) -> None:
        """A client that says how large its KV is, and one of another host, whose tenant wants too much."""
        script = self.script
        space = self.cache.keyspace(SPEC, model="m", revision="1", plan="int8")
        assert space.save(IDS, KV).result(WAIT).blocks == 4
        self._stored(space, "int8", 4)
        with space.match(IDS, wait=WAIT) as hit:
            assert hit.load(torch.empty_like(KV)) == 4 * TOKENS
        script.asked.update(space.chain(IDS).addresses)
        script.hits["cpu"] += 4
        script.tokens["cpu"] += 4 * TOKENS
        script.lookups["full"] += 1
        tenant = self.red.keyspace(SPEC, model="m", revision="1")
        assert tenant.save(IDS[: 2 * TOKENS], KV[:, :, : 2 * TOKENS]).result(WAIT).blocks == 2
        self._stored(tenant, "raw", 2)
        self.theirs = list(tenant.chain(IDS).addresses)
        assert tenant.pin(IDS[: 2 * TOKENS], ttl=600.0) == 2
        assert tenant.save(IDS, KV, start=2 * TOKENS, vouched=True).result(WAIT).refused == "quota"
        script.refused["quota"] += 2

    def afternoon(self) -> None:
        """More than there is room for: what was used is written to NVMe, what was not is not, after some time."""
        script = self.script
        unused, used = range(10_000, 10_900, 20), range(20_000, 20_500, 20)
        for first in unused:
            script.save(first, 20)
        for first in used:
            script.save(first, 20)
            script.match(first, 20)
        for first in (*unused[::4], *used[::4]):
            script.match(first, 20)
            script.match(first, 20)

    def _stored(self, space, codec: str, blocks: int) -> None:
        keys = list(space.chain(IDS).addresses)[:blocks]
        self.script.stored.update(keys)
        self.codecs[codec] = sum(block["nbytes"] for block in space.session.inspect(keys))
