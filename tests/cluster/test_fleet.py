"""Three hosts, one cache: what one has computed all have, and whatever dies, no byte is wrong and no request fails.

During each trial an engine on every host reads and saves, and compares what it loads with what it must be.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import kvtier
from kvtier.client.scope import Chain
from kvtier.errors import SessionError
from tests.cluster.engines import BRANCH, GUARDED, IDLE, STEM, Shelf, served, shelves, starting
from tests.cluster.fleet import NAMES, Fleet, Host, fleet
from tests.cluster.kit import within

pytestmark = pytest.mark.slow

WHOLE = STEM + BRANCH
PATIENCE = 60.0
LOOKUP = 2.0
"""Seconds within which a lookup of what cannot be reached must have said so, on a machine that does much else."""
documents = itertools.count(GUARDED)


class Trial:
    """A running fleet, an engine's view of each host, and prefixes that nobody but the test uses."""

    def __init__(self, running: Fleet, folder: Path, say: Callable[[str], None]) -> None:
        self.fleet = running
        self._folder = folder
        self._say = say

    def __getitem__(self, name: str) -> Host:
        return self.fleet[name]

    @contextmanager
    def shelf(self, name: str) -> Iterator[Shelf]:
        """What an engine of that host sees; of 256 KiB blocks."""
        with ExitStack() as stack:
            cache = within(PATIENCE, lambda: self._connected(name))
            stack.enter_context(cache)
            yield shelves(cache)[1]

    def save(self, name: str, *, to_nvme: bool = False) -> tuple[int, int]:
        """Let a host compute a new prefix."""
        document = next(documents)
        with self.shelf(name) as shelf:
            chain = shelf.chain(document, 0)
            within(PATIENCE, lambda: self._kept(shelf, chain, to_nvme=to_nvme))
        return document, 0

    def served(self, name: str, prefix: tuple[int, int], wait: float = 10.0) -> int:
        """How many blocks of a prefix a host's engine gets."""
        with self.shelf(name) as shelf:
            return served(shelf, shelf.chain(*prefix), wait)

    def back(self, what: str, name: str, prefix: tuple[int, int]) -> None:
        """Wait until a prefix is whole again on a host, and say how long that took."""
        began = time.monotonic()
        within(PATIENCE, lambda: self.served(name, prefix) == WHOLE)
        self._say(f"{what}: hits on {name} are back after {time.monotonic() - began:.1f} s")

    def quick(self, name: str, prefix: tuple[int, int]) -> int:
        """The same as `served`, without waiting for anything; it must not take long."""
        with self.shelf(name) as shelf:
            began = time.monotonic()
            got = served(shelf, shelf.chain(*prefix), wait=0.0)
            assert time.monotonic() - began < LOOKUP
            return got

    def host(self, name: str, asked: str = NAMES[0]) -> dict:
        """Of the status."""
        return next(host for host in self[asked].status()["hosts"] if host["host"] == name)

    def life(self, name: str) -> int:
        """Incarnation of a host; 0 when it does not serve."""
        host = self.host(name)
        return host["hierarchy"]["index"]["incarnation"] if host.get("serving") else 0

    @contextmanager
    def load(self, what: str) -> Iterator[None]:
        """An engine on every host, reading and saving whatever happens; no byte is wrong, and no request fails."""
        with ExitStack() as stack:
            engines = []
            for host in self.fleet.hosts:
                folder = self._folder / f"{what}-{host.name}"
                folder.mkdir()
                engines.append(stack.enter_context(starting(host.socket, folder))())
            for engine in engines:  # the first one imports a lot
                within(PATIENCE, lambda: engine.doing != IDLE, every=0.002)  # noqa: B023
            yield
            said = [engine.end() for engine in engines]
        counts = ", ".join(f"{h.name} {s['loaded']}" for h, s in zip(self.fleet.hosts, said, strict=True))
        self._say(f"{what}: blocks loaded and compared: {counts}")
        assert sum(one["loaded"] for one in said) > 0, "no load was on it"

    def _connected(self, name: str) -> kvtier.Cache | None:
        try:
            return kvtier.connect(self[name].socket)
        except SessionError:
            return None

    def _kept(self, shelf: Shelf, chain: Chain, *, to_nvme: bool) -> bool:
        saved = shelf.space.save(chain, shelf.computed(chain)).result()
        there = served(shelf, chain) == WHOLE or saved.blocks == WHOLE
        return there and (not to_nvme or shelf.space.move(chain, "nvme", wait=10.0) == WHOLE)


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet() as made:
        made.up()
        yield made


@pytest.fixture
def trial(running: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Trial:
    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n    {line}", end="", flush=True)  # noqa: T201

    return Trial(running, tmp_path, say)


@pytest.fixture
def apart(running: Fleet) -> None:
    if running.network is None:
        pytest.skip("this kernel, or this user's rights, allow no network namespaces: nothing can be cut off")


def test_what_one_host_has_computed_is_a_hit_on_all(trial):
    prefix = trial.save("alpha")
    with trial.load("together"):
        for name in ("beta", "gamma"):
            trial.back("together", name, prefix)
    assert {host["host"] for host in trial["gamma"].status()["hosts"] if host["serving"]} == set(NAMES)


def test_a_cut_of_seconds_ends_nothing(trial, apart):
    near, far = trial.save("gamma"), trial.save("beta")
    life, pid = trial.life("gamma"), trial.host("gamma")["pid"]
    with trial.load("cut of 6 s"):
        trial.fleet.network.unplug(3)
        end = time.monotonic() + 6.0
        assert trial.quick("gamma", near) == WHOLE, "what a host has itself it serves"
        trial.quick("gamma", far)
        time.sleep(max(0.0, end - time.monotonic()))
        trial.fleet.network.plug(3)
        trial.back("cut of 6 s", "gamma", far)
        trial.back("cut of 6 s", "alpha", near)
    assert (trial.life("gamma"), trial.host("gamma")["pid"]) == (life, pid)


def test_a_host_that_was_cut_off_for_long_comes_back_as_a_new_one(trial, apart):
    volatile, lasting = trial.save("gamma"), trial.save("gamma", to_nvme=True)
    life = trial.life("gamma")
    with trial.load("long cut"):
        trial.fleet.network.unplug(3)
        began = time.monotonic()
        gone = within(PATIENCE, lambda: trial.host("gamma").get("gone_since"))
        assert gone
        trial.quick("alpha", lasting)
        assert trial.served("gamma", volatile) == WHOLE, "its own engines lose nothing"
        time.sleep(max(0.0, began + 30.0 - time.monotonic()))
        trial.fleet.network.plug(3)
        within(PATIENCE, lambda: trial.life("gamma") > life)
        trial.back("long cut", "alpha", lasting)
        trial.back("long cut", "gamma", lasting)
    processes = trial["gamma"].place.inside("sh", "-c", "grep -l ray::CpuTierActor /proc/[0-9]*/cmdline 2>/dev/null")
    assert len(subprocess.run(processes, capture_output=True, check=False).stdout.split()) == 1, "no zombie is left"


def test_a_hosts_actors_are_killed(trial):
    lasting, life = trial.save("beta", to_nvme=True), trial.life("beta")
    host = trial.host("beta")
    with trial.load("actors"):
        for pid in (host["pid"], *(hand["pid"] for hand in host["hands"])):
            trial["beta"].kill(pid)
        within(PATIENCE, lambda: trial.life("beta") > life)
        trial.back("actors", "beta", lasting)
        trial.back("actors", "alpha", lasting)


def test_a_host_loses_power_and_comes_back_in_place(trial, apart):
    volatile, lasting, life = trial.save("beta"), trial.save("beta", to_nvme=True), trial.life("beta")
    with trial.load("power"):
        trial.fleet.power_off(trial["beta"])
        trial.quick("alpha", volatile)
        within(PATIENCE, lambda: trial.host("beta").get("gone_since"))
        trial.fleet.power_on(trial["beta"])
        assert "has joined" in trial.fleet.join(trial["beta"])
        trial.back("power", "beta", lasting)
        trial.back("power", "gamma", lasting)
        assert trial.served("gamma", volatile) in (0, WHOLE), "whole where it had been fetched before, else nowhere"
    assert trial.life("beta") > life


def test_the_controller_is_killed(trial):
    prefix, before = trial.save("alpha"), trial["alpha"].status()["controller"]["pid"]
    with trial.load("controller"):
        for host in trial.fleet.hosts:
            host.signal_all("ray::Controller")
        trial.back("controller", "gamma", prefix)
        within(PATIENCE, lambda: trial["alpha"].status().get("controller", {}).get("pid") not in (None, before))
        assert {host["host"] for host in trial["alpha"].status()["hosts"] if host.get("serving")} == set(NAMES)


def test_redis_is_killed(trial):
    near, far = trial.save("beta"), trial.save("alpha")
    with trial.load("Redis killed"):
        trial["alpha"].kill(trial["alpha"].status()["redis"]["pid"])
        assert trial.quick("beta", near) == WHOLE
        trial.quick("beta", trial.save("alpha"))
        assert "Redis server was gone and was started again" in trial["alpha"].cli("up")
        trial.back("Redis killed", "beta", far)
        trial.back("Redis killed", "gamma", near)


def test_redis_hangs(trial):
    near, far = trial.save("beta"), trial.save("alpha")
    with trial.load("Redis hangs for 30 s"):
        pid = trial["alpha"].status()["redis"]["pid"]
        trial["alpha"].kill(pid, "STOP")
        try:
            end = time.monotonic() + 30.0
            while time.monotonic() < end:
                assert trial.quick("beta", near) == WHOLE
                trial.quick("beta", far)
                time.sleep(0.5)
        finally:
            trial["alpha"].kill(pid, "CONT")
        trial.back("Redis hangs", "beta", far)
        trial.back("Redis hangs", "gamma", near)


def test_redis_is_flushed(trial):
    near, far = trial.save("beta"), trial.save("alpha")
    with trial.load("flush"):
        run = trial["alpha"].folder / "run"
        url = trial["alpha"].status()["index"]["url"]
        command = trial["alpha"].place.inside("redis-cli", "-u", url, "FLUSHALL")
        secret = (run / "redis.password").read_text()
        done = subprocess.run(command, env=os.environ | {"REDISCLI_AUTH": secret}, capture_output=True, check=True)
        assert done.stdout.strip() == b"OK", done
        assert trial.quick("beta", near) == WHOLE
        trial.back("flush", "beta", far)
        trial.back("flush", "gamma", near)


def test_the_head_is_killed_and_started_again(trial, apart):
    near, far, lasting = trial.save("beta"), trial.save("gamma"), trial.save("alpha", to_nvme=True)
    lives = {name: (trial.life(name), trial.host(name)["pid"]) for name in ("beta", "gamma")}
    with trial.load("head"):
        trial.fleet.power_off(trial["alpha"])
        assert trial.quick("beta", near) == WHOLE
        trial.fleet.power_on(trial["alpha"])
        began = time.monotonic()
        said = trial["alpha"].cli("up")
        assert "its Ray head was gone and was started again; other hosts kept what they had" in said
        trial._say(f"head: `kvtier up` took {time.monotonic() - began:.1f} s")
        for name, prefix in (("alpha", lasting), ("beta", far), ("alpha", near), ("gamma", lasting)):
            trial.back("head", name, prefix)
        within(PATIENCE, lambda: all(trial.life(name) for name in NAMES))
    assert {name: (trial.life(name), trial.host(name)["pid"]) for name in ("beta", "gamma")} == lives


def test_a_host_leaves_and_is_not_missed(trial):
    assert "kvtier is down" in trial["gamma"].cli("down")
    within(PATIENCE, lambda: {host["host"] for host in trial["alpha"].status()["hosts"]} == {"alpha", "beta"})
    assert "has joined" in trial.fleet.join(trial["gamma"])
    assert trial.life("gamma")
