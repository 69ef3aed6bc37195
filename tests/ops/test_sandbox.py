"""Pods that run without Kubernetes leave no process behind, however their test ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier_services.cluster.process import Process
from tests.cluster.kit import environment, within
from tests.cluster.network import why_not
from tests.ops.manifests import ROOT

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no pods of their own: {why_not()}")
HOLDER = """
import sys, time
from pathlib import Path
from tests.cluster.network import network
from tests.ops.manifests import Pod
from tests.ops.sandbox import Sandbox
folder, how = Path(sys.argv[1]), sys.argv[2]
context = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
sleeps = ["sh", "-c", "setsid sleep 1000 & sleep 1000"]
with network() as net:
    sandbox = Sandbox(net, folder, {}, [])
    for number, shares in enumerate((True, False), 1):
        container = {"name": "one", "command": sleeps}
        spec = {"containers": [container], "securityContext": context, "shareProcessNamespace": shares}
        pod = sandbox.pod(Pod("p", "n", {}, spec), number)
        pod.start(container)
        pod.begun("one")
    print("here", flush=True)
    sys.stdin.readline()
    if how == "fails":
        raise SystemExit(3)
    sandbox.end()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvs"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def in_pods(folder: Path) -> set[Process]:
    """Processes whose output goes into a pod's log: `sh`, and what it started."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "fd/1").startswith(f"{folder}/pod-"):
                found.add(Process.of(int(entry.name)))
    return {process for process in found if process is not None}


@pytest.mark.parametrize("how", ["ends", "fails", "killed"])
def test_however_it_ends_no_process_is_left(folder, how):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), how],
        cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"here\n"
        # In each of two pods a shell and its two sleeps, as user 1000, one of them in a session of its own.
        lives = within(10.0, lambda: found if len(found := containers(folder)) == 6 else None)
        everything = in_pods(folder)
        assert everything >= lives
        if how == "killed":
            os.kill(holder.pid, signal.SIGKILL)
        else:
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        holder.wait(30.0)
        within(10.0, lambda: not any(process.alive() for process in everything))
        assert in_pods(folder) == set()
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def containers(folder: Path) -> set[Process]:
    """Those of them that run as a container's user."""
    return {one for one in in_pods(folder) if os.stat(f"/proc/{one.pid}").st_uid == 1000}
