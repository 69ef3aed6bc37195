"""Three hosts, one cache: what one has computed all have, and whatever dies, no byte is wrong and no request fails.

During each trial an engine on every host reads and saves, and compares what it loads with what it must be.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fleet import NAMES, Fleet, fleet
from tests.cluster.kit import environment, within
from tests.cluster.trial import PATIENCE, WHOLE, Trial

pytestmark = pytest.mark.slow


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


def serving(trial: Trial) -> set[str]:
    """Names of the hosts that serve."""
    return {host["host"] for host in trial["alpha"].status()["hosts"] if host.get("serving")}


def test_what_one_host_has_computed_is_a_hit_on_all(trial):
    prefix = trial.save("alpha")
    with trial.load("together"):
        for name in ("beta", "gamma"):
            trial.back("together", name, prefix, time.monotonic())
    assert serving(trial) == set(NAMES)


def test_a_cut_of_seconds_ends_nothing(trial, apart):
    near, far = trial.save("gamma"), trial.save("beta")
    life, pid = trial.life("gamma"), trial.host("gamma")["pid"]
    with trial.load("cut of 6 s"):
        trial.fleet.network.unplug(3)
        end = time.monotonic() + 6.0
        trial.serves_itself("gamma", near)
        trial.quick("gamma", far)
        time.sleep(max(0.0, end - time.monotonic()))
        trial.fleet.network.plug(3)
        healed = time.monotonic()
        trial.back("cut of 6 s", "gamma", far, healed)
        trial.back("cut of 6 s", "alpha", near, healed)
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
        trial.serves_itself("gamma", volatile)
        time.sleep(max(0.0, began + 90.0 - time.monotonic()))
        trial.fleet.network.plug(3)
        healed = time.monotonic()
        within(PATIENCE, lambda: trial.life("gamma") > life)
        trial.say(f"long cut: a new life after {time.monotonic() - healed:.1f} s")
        trial.back("long cut", "gamma", lasting, healed)
        trial.back("long cut", "alpha", lasting, healed)
    processes = trial["gamma"].place.inside("sh", "-c", "grep -l ray::CpuTierActo[r] /proc/[0-9]*/cmdline 2>/dev/null")
    assert len(subprocess.run(processes, capture_output=True, check=False).stdout.split()) == 1, "no zombie is left"


def test_a_hosts_actors_are_killed(trial):
    lasting, life = trial.save("beta", to_nvme=True), trial.life("beta")
    host = trial.host("beta")
    with trial.load("actors"):
        for pid in (host["pid"], *(hand["pid"] for hand in host["hands"])):
            trial["beta"].kill(pid)
        killed = time.monotonic()
        trial.back("actors", "beta", lasting, killed)
        trial.back("actors", "alpha", lasting, killed)
        within(PATIENCE, lambda: trial.life("beta") > life)


def test_a_hosts_cpu_tier_hangs(trial):
    """It is said of that host, by the controller, and the others are shown as they are."""
    prefix, host, life = trial.save("alpha"), trial.host("gamma"), trial.life("gamma")
    trial["gamma"].kill(host["pid"], "STOP")
    try:
        began = time.monotonic()
        snapshot = trial["beta"].status()
        trial.say(f"hangs: a status takes {time.monotonic() - began:.1f} s")
        assert "fault" not in snapshot
        health = {one["host"]: one["health"] for one in snapshot["hosts"]}
        assert health.pop("gamma") == "down"
        assert set(health) == {"alpha", "beta"}
        assert "down" not in health.values()
        assert any("gamma: the CPU tier's process does not answer" in why for why in snapshot["reasons"])
        trial.serves_itself("alpha", prefix)
    finally:
        trial["gamma"].kill(host["pid"], "CONT")
    within(PATIENCE, lambda: serving(trial) == set(NAMES))
    assert (trial.life("gamma"), trial.host("gamma")["pid"]) == (life, host["pid"])


def test_a_host_loses_power_and_comes_back_in_place(trial, apart):
    volatile, lasting, life = trial.save("beta"), trial.save("beta", to_nvme=True), trial.life("beta")
    with trial.load("power"):
        trial.fleet.power_off(trial["beta"])
        trial.quick("alpha", volatile)
        within(PATIENCE, lambda: trial.host("beta").get("gone_since"))
        trial.fleet.power_on(trial["beta"])
        began = time.monotonic()
        assert "has joined" in trial.fleet.join(trial["beta"])
        trial.back("power", "beta", lasting, began)
        trial.back("power", "gamma", lasting, began)
        trial.served("gamma", volatile)
    assert trial.life("beta") > life


def test_the_controller_is_killed(trial):
    prefix, before = trial.save("alpha"), trial["alpha"].status()["controller"]["pid"]
    with trial.load("controller"):
        for host in trial.fleet.hosts:
            host.signal_all("ray::Controller")
        trial.back("controller", "gamma", prefix, time.monotonic())
        within(PATIENCE, lambda: trial["alpha"].status().get("controller", {}).get("pid") not in (None, before))
        assert serving(trial) == set(NAMES)


def test_redis_is_killed(trial):
    near, far = trial.save("beta"), trial.save("alpha")
    with trial.load("Redis killed"):
        trial["alpha"].kill(trial["alpha"].status()["redis"]["pid"])
        trial.serves_itself("beta", near)
        trial.quick("beta", trial.save("alpha"))
        assert "Redis server was gone and was started again" in trial["alpha"].cli("up")
        began = time.monotonic()
        trial.back("Redis killed", "beta", far, began)
        trial.back("Redis killed", "gamma", near, began)


def test_redis_hangs(trial):
    near, far = trial.save("beta"), trial.save("alpha")
    with trial.load("Redis hangs for 30 s"):
        pid = trial["alpha"].status()["redis"]["pid"]
        trial["alpha"].kill(pid, "STOP")
        try:
            end = time.monotonic() + 30.0
            while time.monotonic() < end:
                trial.serves_itself("beta", near)
                trial.quick("beta", far)
                time.sleep(0.5)
        finally:
            trial["alpha"].kill(pid, "CONT")
        began = time.monotonic()
        trial.back("Redis hangs", "beta", far, began)
        trial.back("Redis hangs", "gamma", near, began)


def test_redis_is_flushed(trial):
    near, far = trial.save("beta"), trial.save("alpha")
    with trial.load("flush"):
        script = "import os, redis, sys; redis.Redis.from_url(sys.argv[1], password=os.environ['SECRET']).flushall()"
        secret = (trial["alpha"].folder / "run" / "redis.password").read_text()
        url = trial["alpha"].status()["index"]["url"]
        command = trial["alpha"].place.inside(sys.executable, "-c", script, url)
        subprocess.run(command, env=os.environ | {"SECRET": secret}, check=True)
        began = time.monotonic()
        trial.serves_itself("beta", near)
        trial.back("flush", "beta", far, began)
        trial.back("flush", "gamma", near, began)


def test_the_head_is_killed_and_started_again(trial, apart):
    near, far, lasting = trial.save("beta"), trial.save("gamma"), trial.save("alpha", to_nvme=True)
    lives = {name: (trial.life(name), trial.host(name)["pid"]) for name in ("beta", "gamma")}
    with trial.load("head"):
        trial.fleet.power_off(trial["alpha"])
        trial.serves_itself("beta", near)
        trial.fleet.power_on(trial["alpha"])
        began = time.monotonic()
        said = trial["alpha"].cli("up")
        assert "its Ray head was gone and was started again; other hosts kept what they had" in said
        trial.say(f"head: `kvtier up` took {time.monotonic() - began:.1f} s")
        for name, prefix in (("alpha", lasting), ("beta", far), ("alpha", near), ("gamma", lasting)):
            trial.back("head", name, prefix, began)
        within(PATIENCE, lambda: all(trial.life(name) for name in NAMES))
    assert {name: (trial.life(name), trial.host(name)["pid"]) for name in ("beta", "gamma")} == lives


def test_no_autoscaler_can_take_a_cache_for_an_idle_node(trial):
    script = "\n".join(
        (
            "import json, ray, sys",
            "ray.init(sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)",
            "print(json.dumps([ray.cluster_resources(), ray.available_resources()]))",
        )
    )
    env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(trial["alpha"].folder / "run" / "ray.token"))
    host = trial["alpha"]
    command = host.place.inside(sys.executable, "-c", script, trial.fleet.head_address, host.address)
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    there, free = json.loads(done.stdout.splitlines()[-1])
    for tier in ("kvtier.cpu", "kvtier.nvme"):
        assert there[tier] == 3
        assert free[tier] < 3


def test_a_drained_host_gives_away_what_it_has_and_rests(trial):
    prefix = trial.save("gamma")
    with trial.load("drain"):
        said = trial["alpha"].cli("drain", "gamma", "--seconds", "20")
        trial.say(f"drain: {said.strip()}")
        assert trial.served("alpha", prefix) == WHOLE, "it was handed over"
        assert trial.host("gamma")["drained_since"]
        assert "drained for" in trial["beta"].cli("status")
        for host in trial.fleet.hosts:
            host.signal_all("ray::Controller")
        time.sleep(5.0)
        assert not within(PATIENCE, lambda: trial.host("gamma")).get("serving"), "the next controller knows it too"
        assert "gamma works again" in trial["beta"].cli("undrain", "gamma")
        trial.back("drain", "gamma", prefix, time.monotonic())


def test_a_host_that_is_told_to_end_hands_over_first(trial):
    """As an orchestrator does it: SIGTERM for the node, and some seconds until SIGKILL."""
    prefix = trial.save("gamma")
    with trial.load("SIGTERM"):
        trial["gamma"].signal_all("ray.scripts.scripts start", "TERM")
        began = time.monotonic()
        within(PATIENCE, lambda: "gamma" not in serving(trial))
        trial.say(f"SIGTERM: gone after {time.monotonic() - began:.1f} s")
        assert max(trial.served(name, prefix) for name in ("alpha", "beta")) == WHOLE, "it was handed over"
        # Here it is `kvtier join` that starts a node again.
        within(PATIENCE, lambda: "gamma" in serving(trial))
        trial.back("SIGTERM", "gamma", prefix, time.monotonic())


def test_a_host_leaves_and_is_not_missed(trial):
    assert "kvtier is down" in trial["gamma"].cli("down")
    within(PATIENCE, lambda: {host["host"] for host in trial["alpha"].status()["hosts"]} == {"alpha", "beta"})
    assert "has joined" in trial.fleet.join(trial["gamma"])
    assert trial.life("gamma")


def test_who_has_no_token_or_a_name_that_is_taken_does_not_join(trial, tmp_path):
    gamma, life = trial["gamma"], trial.life("alpha")
    gamma.cli("down")
    join = ("join", trial.fleet.head_address, "--host", gamma.address, "--token")
    (tmp_path / "token").write_text("0" * 64)
    assert "does not know this token" in gamma.cli(*join, str(tmp_path / "token"), rc=1)
    (tmp_path / "kvtier.toml").write_text(f'run_dir = "{gamma.folder}/other"')
    namesake = dataclasses.replace(gamma, name="alpha", config=tmp_path / "kvtier.toml")
    token = trial["alpha"].folder / "run" / "ray.token"
    assert "has a host named 'alpha' already" in namesake.cli(*join, str(token), rc=1)
    assert trial.life("alpha") == life, "its tiers were not ended with the other one's node"
    assert "has joined" in trial.fleet.join(gamma)
