"""The command line: clear lines, exit codes, and nothing heavy imported before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec
import pytest
from typer.testing import CliRunner

from kvtier import __version__
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier_services import cli, doctor
from kvtier_services.cluster import down as down_module
from kvtier_services.cluster import look
from kvtier_services.cluster import up as up_module
from kvtier_services.cluster.down import Ended
from kvtier_services.cluster.process import Process
from kvtier_services.cluster.state import Running
from kvtier_services.cluster.up import Started
from kvtier_services.doctor import Check


@pytest.fixture
def kvtier(monkeypatch, tmp_path, capsys):
    """Exit code, and what was said."""
    monkeypatch.chdir(tmp_path)
    for name in ("KVTIER_CONFIG", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "kvtier.toml").write_text(f'run_dir = "{tmp_path / "run"}"\n')

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def running() -> Running:
    me = Process.of(os.getpid())
    return Running(1, "r", time.time(), False, me, "", "/run/door.sock", "/arena", head=me, ray_token="/t")


def test_version(kvtier):
    assert kvtier("--version") == (0, f"kvtier {__version__}\n")


def test_without_a_command_it_shows_the_commands(kvtier):
    _, said = kvtier()
    assert all(command in said for command in ("up", "down", "status", "doctor", "demo", "config"))


@pytest.mark.parametrize("command", [("up",), ("down",), ("status",), ("doctor",), ("config", "explain")])
def test_a_configuration_that_cannot_work_is_one_line(kvtier, tmp_path, command):
    (tmp_path / "kvtier.toml").write_text("[cpu]\ncapcity = 3\n")
    code, said = kvtier(*command)
    assert code == 1
    assert said == "kvtier: kvtier.toml, line 2: unknown name capcity in [cpu]; did you mean capacity?\n"


def test_a_file_that_is_not_there(kvtier):
    assert kvtier("up", "--config", "gone.toml") == (
        1, "kvtier: there is no file gone.toml; name a kvtier.toml, or none for the defaults\n",
    )  # fmt: skip


def test_up_says_what_runs(kvtier, monkeypatch):
    tiers = [
        {"tier": "cpu", "label": "cpu", "capacity": 64 << 20},
        {"tier": "nvme", "label": "nvme", "capacity": 8 << 30},
    ]
    host = {"host": "box", "hierarchy": {"tiers": tiers}, "metrics": {"url": "http://m"}}
    host["arena"] = {"ready": 64 << 20, "capacity": 1 << 30, "fault": ""}
    started = Started(running(), [host], ("no memlock",), 12.34, page="http://p")
    seen = []
    monkeypatch.setattr(up_module, "up", lambda config, **_: seen.append(config) or started)
    code, said = kvtier("up", "--address", "ray:6379")
    assert code == 0
    assert said == (
        "note: no memlock\nkvtier is up after 12.3 s: /run/door.sock\nbox: cpu 1.0 GiB, nvme 8.0 GiB; metrics http://m\n"
        "status page: http://p\n"
    )
    assert seen[0].ray.address == "ray:6379"


def test_up_where_it_runs_already(kvtier, monkeypatch):
    monkeypatch.setattr(up_module, "up", lambda *_, **__: Started(running(), [], (), 0.0, already=True))
    code, said = kvtier("up")
    assert code == 0
    assert said == "kvtier already runs: /run/door.sock (`kvtier status`, `kvtier down`)\n"


def test_up_that_fails_is_one_line(kvtier, monkeypatch):
    def fail(*_, **__):
        raise ConfigError("ray.port 6379 is in use\non this machine")

    monkeypatch.setattr(up_module, "up", fail)
    assert kvtier("up") == (1, "kvtier: ray.port 6379 is in use on this machine\n")


def test_ctrl_c_is_no_traceback(kvtier, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(up_module, "up", interrupt)
    code, said = kvtier("up")
    assert code != 0
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (Ended(ran=False), 0, "kvtier does not run in {run}\n"),
        (Ended(ran=True, stale=True), 0, "kvtier had ended by itself; what it left was removed\n"),
        (Ended(ran=True, seconds=2.0), 0, "kvtier is down after 2.0 s\n"),
        (
            Ended(ran=True, written=5, lost=1, seconds=2.0), 0,
            "kvtier is down after 2.0 s, 5 blocks written down to NVMe, 1 blocks that only memory had are gone\n",
        ),
        (
            Ended(ran=True, seconds=2.0, problems=("process 7 does not end",)), 1,
            "kvtier is down after 2.0 s\nkvtier: process 7 does not end\n",
        ),
    ],
)  # fmt: skip
def test_down(kvtier, monkeypatch, tmp_path, ended, code, said):
    monkeypatch.setattr(down_module, "down", lambda *_, **__: ended)
    assert kvtier("down") == (code, said.format(run=tmp_path / "run"))


def test_down_and_status_where_nothing_runs(kvtier, tmp_path):
    assert kvtier("down") == (0, f"kvtier does not run in {tmp_path / 'run'}\n")
    assert kvtier("status") == (1, f"kvtier: kvtier does not run in {tmp_path / 'run'}; `kvtier up` starts it\n")


def test_a_host_that_had_joined_is_told_to_join_and_not_to_be_a_fleet_of_its_own(kvtier, monkeypatch):
    had = msgspec.structs.replace(running(), joined=True, address="10.0.0.1:6391")
    monkeypatch.setattr(look, "running", lambda _: (had, False))
    for command in (("status",), ("index", "check"), ("drain", "box")):
        code, said = kvtier(*command)
        assert code == 1
        assert "`kvtier join 10.0.0.1:6391` joins its fleet again" in said
        assert "kvtier up" not in said


def test_status_of_one_that_ended_by_itself(kvtier, monkeypatch):
    monkeypatch.setattr(look, "running", lambda _: (running(), False))
    code, said = kvtier("status", "--json")
    assert code == 1
    assert "it ended without `kvtier down`, which removes what it left" in said


def test_doctor_says_how_to_fix_and_fails(kvtier, monkeypatch):
    found = [Check("ok", "redis", "there"), Check("fail", "arena_dir", "too small [64M]", "set cpu.capacity")]
    monkeypatch.setattr(doctor, "checks", lambda _: iter(found))
    code, said = kvtier("doctor")
    assert code == 1
    assert "ok   redis: there\n" in said
    assert "fail arena_dir: too small [64M]; set cpu.capacity\n" in said
    assert said.endswith("kvtier: one check failed\n")


def test_config_explain_prints_what_holds(kvtier, tmp_path):
    (tmp_path / "kvtier.toml").write_text('[cpu]\ncapacity = "3MiB"\n')
    code, said = kvtier("config", "explain")
    assert code == 0
    assert 'capacity = "3MiB"' in said
    for section in ("cpu", "nvme", "index", "ray", "fleet"):
        assert f"\n[{section}]\n" in said


def test_help_names_every_option():
    said = CliRunner().invoke(cli.app, ["status", "--help"]).output
    assert all(option in said for option in ("--config", "--json", "--watch"))


@pytest.mark.parametrize("heavy", ["ray", "prometheus_client", "rich.live"])
def test_starting_it_imports_nothing_heavy(heavy):
    code = "import sys, kvtier_services.cli as c; sys.argv = ['kvtier', '--version']\ntry: c.main()\nfinally: "
    code += f"print({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_defaults_are_a_configuration():
    assert Config().ray.address == ""
