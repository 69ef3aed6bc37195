"""The demo shows what it says, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from kvtier.config import Config
from kvtier.errors import ConfigError

pytest.importorskip("transformers")

from kvtier_services.demo import model

pytestmark = pytest.mark.slow

try:
    model.require_packages()
except ConfigError as exc:
    pytest.skip(str(exc), allow_module_level=True)

COMMAND = [sys.executable, "-m", "kvtier_services.demo", "--json"]


def folders_of_demos() -> set[str]:
    """All that are there now, of whatever demo."""
    places = [Path(tempfile.gettempdir()), Path(Config().arena_dir).parent]
    return {str(path) for place in places for path in place.glob("kvtier-demo-*")}


@pytest.fixture(autouse=True)
def there_before() -> set[str]:
    """What other demos had left, or use, before this test began."""
    return folders_of_demos()


def left_behind(mark: str, before: set[str]) -> list[str]:
    """Folders that are new, and processes of a demo that had this mark in its environment."""
    found = sorted(folders_of_demos() - before)
    for process in psutil.process_iter():
        try:
            if process.environ().get("KVTIER_TEST") == mark:
                found.append(f"{process.pid} {process.cmdline()}")
        except (psutil.Error, OSError):
            continue
    return found


def environment(mark: str) -> dict[str, str]:
    return os.environ | {"KVTIER_TEST": mark}


def run(command, mark, *, timeout):
    return subprocess.run(
        command,
        env=environment(mark),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_the_demo_shows_what_it_says_and_leaves_nothing(capsys, there_before):
    done = run(COMMAND, "whole", timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = {line["figure"]: line for line in map(json.loads, done.stdout.splitlines())}
    with capsys.disabled():
        sys.stderr.write(f"\n{done.stdout}")
    assert lines["demo.tokens_equal.raw"]["value"] == 1
    assert lines["demo.tokens_equal.raw"]["questions"] == 6
    assert lines["demo.agreement.int8"]["positions"] == 6 * 32
    assert lines["demo.agreement.int8"]["value"] >= 0.98
    assert lines["demo.agreement.int8"]["logit_difference_max"] > 0
    assert lines["demo.stored.int8"]["against_raw"] < 0.3
    assert lines["demo.agreement.int4"]["value"] >= 0.9
    assert lines["demo.stored.int4"]["against_raw"] < 0.15
    for tier in ("gpu", "cpu", "nvme"):
        assert lines[f"demo.served.{tier}"]["value"] > 0
        assert lines[f"demo.speedup.{tier}"]["loaded"] >= 2500
        assert lines[f"demo.speedup.{tier}"]["all_from_this_tier"]
    assert "nvme" in lines["demo.speedup.found"]["tiers"]
    assert left_behind("whole", there_before) == []


def test_a_demo_that_is_interrupted_while_an_engine_works_leaves_nothing(there_before):
    interrupt("engine A starts", signal.SIGINT, there_before)


def test_a_demo_that_is_ended_while_kvtier_starts_leaves_nothing(there_before):
    interrupt("starting kvtier", signal.SIGTERM, there_before)


def interrupt(step, ending, before):
    mark = f"ended by {ending.name}"
    running = subprocess.Popen(
        COMMAND, env=environment(mark), stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, text=True
    )
    with running:
        assert any(step in line for line in iter(running.stderr.readline, ""))
        time.sleep(2.0)
        running.send_signal(ending)
        said = running.stderr.read()
        assert running.wait(60) == 130, said
        assert "interrupted" in said
    assert left_behind(mark, before) == []


def test_a_process_that_fails_is_told_of_and_nothing_is_left(there_before):
    script = (
        "import sys; from kvtier_services.demo import play, stage; start = stage.Stage.start; "
        "stage.Stage.start = lambda made, module, *rest: start(made, 'no_such_module', *rest); "
        "sys.exit(play.main(['--json']))"
    )
    done = run([sys.executable, "-c", script], "broken", timeout=120)
    assert done.returncode == 1
    assert "no_such_module" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind("broken", there_before) == []
