"""A kvtier of the demo's own, and processes that use it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvtier.config import Config, Size
from kvtier.config.schema import CpuConfig, GpuConfig, MetricsConfig, NvmeConfig, StatusConfig
from kvtier.errors import KVTierError
from kvtier.memory.pinning import cuda_present
from kvtier_services.cluster.down import down

MiB = 1 << 20
CPU, GPU, NVME = 224 * MiB, 208 * MiB, 768 * MiB
HIGH, LOW = 0.6, 0.55
"""The first document is 116 MiB as raw KV, 30 MiB as int8 and 17 MiB as int4, the second 48 MiB: below `LOW` is room
for what is asked about, and above `HIGH` what was not asked about lately moves down. The GPU tier has room for the
first in all of them: hits are promoted in the background, and must not push out what is about to be asked for."""
SPARE = 64 * MiB
LIMIT = 900.0
"""Seconds after which an engine is taken to hang."""

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of the engines: threads that wait for one another sleep, so that on a busy machine they do not wait for long; nothing
asks the network for anything."""

Say = Callable[[str], None]


class EngineFailed(KVTierError):
    """A process of the demo ended without a result."""


class Stage:
    """Folders, configuration and processes of one demo.

    Attributes:
        folder: everything on disk.
        config: of its kvtier.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shared = Path(Config().arena_dir).parent
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > CPU + SPARE
        self.arena = shared / folder.name if roomy else folder / "arena"
        self.config = Config(
            run_dir=str(folder / "run"),
            arena_dir=str(self.arena),
            cpu=CpuConfig(capacity=Size(CPU), high=HIGH, low=LOW),
            gpu=GpuConfig(capacity=Size(GPU), device="auto" if cuda_present() else "cpu"),
            nvme=NvmeConfig(capacity=Size(NVME), path=str(folder / "nvme")),
            metrics=MetricsConfig(port=0),
            status=StatusConfig(port=0),
        )
        self._running: list[subprocess.Popen[str]] = []

    @property
    def model(self) -> Path:
        """Folder of the converted model."""
        return self.folder / "model"

    def start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a module of the demo as a process of its own; Ctrl-C reaches only this one, which then ends it."""
        log = (self.folder / "log").open("a", encoding="utf-8")
        with log:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", f"kvtier_services.demo.{module}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=ENVIRONMENT | os.environ,
            )
        self._running.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], say: Say = lambda _: None) -> dict[str, Any]:
        """Follow a process to its end; its result.

        Raises:
            EngineFailed: it ended without one.
        """
        result: dict[str, Any] = {}
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        try:
            for line in process.stdout or ():
                told = json.loads(line) if line.startswith("{") else {}
                if "step" in told:
                    say(told["step"])
                result = told.get("result", result)
            if process.wait():
                raise EngineFailed(f"a process of the demo failed (exit code {process.returncode}): {self._last()}")
        finally:
            watchdog.cancel()
        return result

    def clear(self) -> list[str]:
        """End everything and remove every file; what could not be."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        problems: Sequence[str] = ()
        try:
            problems = down(self.config, flush_seconds=0.0).problems
        except (KVTierError, OSError) as exc:
            problems = [str(exc)]
        for folder in (self.arena, self.folder):
            shutil.rmtree(folder, ignore_errors=True)
        return [*problems, *(f"{folder} is still there" for folder in (self.arena, self.folder) if folder.exists())]

    def _last(self) -> str:
        with suppress(OSError):
            lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return " | ".join(lines[-3:])
        return "it said nothing"


@contextmanager
def stage() -> Iterator[Stage]:
    """Have a stage, and have nothing of it afterwards, whatever happens, Ctrl-C and SIGTERM included.

    Raises:
        EngineFailed: something could not be removed.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if main else None
    made = Stage(Path(tempfile.mkdtemp(prefix="kvtier-demo-")))
    try:
        yield made
    finally:
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        problems = made.clear()
        if main:
            signal.signal(signal.SIGINT, ignored)
            signal.signal(signal.SIGTERM, before)
    if problems:
        raise EngineFailed("left behind: " + "; ".join(problems))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
