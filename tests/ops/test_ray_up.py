"""examples/ray_up: Ray's own schema takes it, and its commands start hosts on two machines."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from kvtier.config import load
from kvtier_services.redis_server import find_binary
from tests.cluster.kit import within
from tests.cluster.network import PREFIX, Machine, network, why_not
from tests.ops.manifests import ROOT, Doc, UniqueLoader

FOLDER = ROOT / "examples" / "ray_up"


def cluster() -> Doc:
    return yaml.load((FOLDER / "cluster.yaml").read_text(), UniqueLoader)


def test_ray_takes_it():
    validate_config(prepare_config(cluster()))
    assert load(FOLDER / "kvtier.toml").ray.selected == {"kvtier.io/cache": "true"}


@pytest.mark.parametrize("change", [{"clustername": "x"}, {"upscaling_speed": "fast"}, {"auth": {"ssh_user": 3}}])
def test_ray_refuses_what_is_broken(change):
    with pytest.raises(ValidationError):
        validate_config(prepare_config(copy.deepcopy(cluster()) | change))


class Computer:
    """A machine with a home of its own, in which the files are that `ray up` brings, and what it installs."""

    def __init__(self, machine: Machine, home: Path, folder: Path) -> None:
        self.machine, self.home = machine, home
        (home / "kvtier").mkdir(parents=True)
        (home / "kvtier" / "venv").symlink_to(sys.prefix)  # in place of setup_commands
        for name in ("kvtier.toml", "ray.token"):
            shutil.copy(folder / name, home / "kvtier")

    def run(self, typed: str) -> subprocess.CompletedProcess[str]:
        """As `ray up` does by SSH."""
        kept = {"PATH": os.environ["PATH"], "HOME": str(self.home), "RAY_TMPDIR": str(self.home / "ray")}
        command = self.machine.inside("bash", "--login", "-c", typed)
        env = kept | {"RAY_HEAD_IP": f"{PREFIX}.1"}
        return subprocess.run(command, env=env, cwd=self.home, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvu"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"no machines of their own: {why_not()}")
def test_its_commands_start_hosts_and_change_nothing_when_they_are_given_again(folder):
    text = (FOLDER / "kvtier.toml").read_text()
    smaller = {"32GiB": "64MiB", "200GiB": "128MiB", "/mnt/nvme0/kvtier": f"{folder}/{{host}}/nvme"}
    for there, here in (smaller | {"10.0.0.1:6380": f"{PREFIX}.254:6380"}).items():
        assert there in text
        text = text.replace(there, here)
    own = f'run_dir = "{folder}/{{host}}/run"\narena_dir = "{folder}/{{host}}/arena"\n'
    (folder / "kvtier.toml").write_text(own + text)
    (folder / "ray.token").write_text("0123456789abcdef" * 4)
    said = cluster()
    bootstrap = "--autoscaling-config=~/ray_bootstrap_config.yaml"  # a file that `ray up` brings
    start = [command.replace(bootstrap, "") for command in said["head_start_ray_commands"]]
    with network() as net:
        server = [str(find_binary()), "--port", "6380", "--protected-mode", "no", "--save", ""]
        redis = subprocess.Popen(net.inside("setpriv", "--pdeathsig", "KILL", *server), stdout=subprocess.DEVNULL)
        try:
            head, worker = (
                Computer(net.machine(name, number), folder / name / "home", folder)
                for number, name in enumerate(("one", "two"), 1)
            )
            for computer in (head, worker):  # by it Ray finds which address is its own
                computer.machine.run("ip", "route", "add", "default", "via", net.address)
            for _ in range(2):  # `ray up` gives them again whenever it is called
                for command in start:
                    done = head.run(command)
                    assert done.returncode in (0, 1), done.stderr
                for command in said["worker_start_ray_commands"]:
                    done = worker.run(command)
                    assert done.returncode == 0, done.stdout + done.stderr
                hosts = within(120.0, lambda: _serving(head), every=1.0)
            assert _serving(head) == hosts, "the same processes"
            stays = head.run("pgrep -fc -- '[-]-stay'").stdout
            assert int(stays) <= 2, "one that stays, and its lock"
            log = (head.home / "kvtier" / "stay.log").read_text()
            assert "Traceback" not in log
        finally:
            redis.kill()
            redis.wait()


def _serving(head: Computer) -> dict[str, int] | None:
    token = f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={head.home}/kvtier/ray.token; "
    done = head.run(f"{token} ~/kvtier/venv/bin/kvtier status --json --config ~/kvtier/kvtier.toml")
    if done.returncode:
        return None
    hosts = {host["host"]: host["pid"] for host in json.loads(done.stdout)["hosts"] if host.get("serving")}
    return hosts if {*hosts} == {"one", "two"} else None
