"""The whole of it, as a user has it: `kvtier up`, vLLM's API server as the documentation starts it, the example."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit import SHARED, Cluster
from tests.engines_vllm.conftest import Alone
from tests.engines_vllm.engine import ENVIRONMENT, PAGE
from tests.engines_vllm.host import ROOT, eventually
from tests.engines_vllm.prompts import LENGTH, A, B, loadable

HOST_PYTHON = ROOT / ".venv/bin/python"
"""Of kvtier's own processes: they need Ray, which engines do not."""


class Service(Cluster):
    """`kvtier up` in an environment of its own."""

    def command(self, command: str, *args: str) -> list[str]:
        return [str(HOST_PYTHON), *super().command(command, *args)[1:]]

    @property
    def stored(self) -> int:
        return self.host()["hierarchy"]["stored"]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    folder, arena = Path(tempfile.mkdtemp(prefix="kvt")), Path(tempfile.mkdtemp(prefix="kvt-arena-", dir=SHARED))
    made = Service(folder, arena)
    try:
        made.cli("up")
        yield made
    finally:
        try:
            made.cli("down", "--flush", "0")
        finally:
            shutil.rmtree(folder)
            shutil.rmtree(arena)


def environment(service: Service) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "KVTIER_CONFIG": str(service.config)}


def documented() -> list[str]:
    """The arguments of the command that docs/vllm.md starts a server with, behind the model's name."""
    text = (ROOT / "docs/vllm.md").read_text()
    [command] = re.findall(r"^vllm serve MODEL (.*(?:\n {4}.*)*)$", text, re.MULTILINE)
    return shlex.split(command)


class Server:
    """vLLM's API server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, data: Any = None) -> str:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def complete(self, prompt: list[int]) -> tuple[int, list[int]]:
        """Cached tokens, as users see them, and the answer's."""
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        asked["return_token_ids"] = True
        answer = json.loads(self.get("/v1/completions", asked))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(service: Service, model: Path, log: Path) -> Iterator[Server]:
    port = free_port()
    options = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--block-size", str(PAGE)]
    options += ["--port", str(port), "--served-model-name", "tiny", "--enable-prompt-tokens-details"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    environ = environment(service) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *documented(), *options], env=environ, stdout=out, stderr=out, start_new_session=True
        )
    try:
        server = Server(port)
        eventually(lambda: server.healthy() or process.poll() is not None, True, 180.0)
        assert process.poll() is None, log.read_text(errors="replace")[-6000:]
        yield server
        process.send_signal(signal.SIGTERM)
        process.wait(60.0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)


def test_the_api_server_reports_what_was_loaded(service: Service, alone: Alone, llama: Path, tmp_path: Path) -> None:
    wanted = alone(llama, A, B)
    log = tmp_path / "server.log"
    with serving(service, llama, log) as server:
        eventually(lambda: "kvtier: the weights are" in log.read_text(errors="replace"), True)
        assert server.complete(A) == (0, wanted[0])
        assert server.complete(B) == (640, wanted[1])
        eventually(lambda: service.stored, 15 + 3)
        for prompt, tokens in zip((A, B), wanted, strict=True):
            server.get("/reset_prefix_cache", {})
            assert server.complete(prompt) == (loadable(prompt), tokens)
        assert server.metric("vllm:external_prefix_cache_hits_total") == loadable(A) + loadable(B)
        assert server.metric("vllm:kvtier_loaded_tokens_total") == loadable(A) + loadable(B)
        assert server.metric("vllm:kvtier_saved_blocks_total") == 18
    hits = service.host()["hierarchy"]["hits"]
    assert sum(hits.values()) >= 15 + 13


def test_the_example_loads_what_it_computed_before(service: Service, llama: Path) -> None:
    told = []
    for _ in range(2):
        before = service.stored
        done = subprocess.run(
            [sys.executable, "examples/vllm_offline.py", str(llama), "examples/vllm_offline.py"],
            env=environment(service) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        told.append(int(re.search(r"loaded from kvtier: ([\d,]+) tokens", done.stdout)[1].replace(",", "")))
        if not told[1:]:
            assert service.stored > before
    assert told[0] == 0
    assert told[1] >= 1024
