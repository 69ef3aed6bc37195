"""Models, hosts, engines and what vLLM answers by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines_vllm import models
from tests.engines_vllm.engine import Engine
from tests.engines_vllm.host import Host, running
from tests.engines_vllm.prompts import LENGTH

Start = Callable[..., Engine]
Alone = Callable[..., list[list[int]]]
Make = Callable[..., Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes models, each once."""
    root, there = tmp_path_factory.mktemp("models"), {}

    def make(name: str, kind: str = "Llama", dtype: str = "float32", **changes: object) -> Path:
        if name not in there:
            there[name] = models.make(root / name, kind, dtype, **changes)
        return there[name]

    return make


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compiled before any engine wants them: who waits for them computes meanwhile, and counts would not be exact."""
    subprocess.run([sys.executable, "-m", "kvtier.codecs.warm"], check=True, timeout=300)


@pytest.fixture(scope="session")
def llama(made: Callable[..., Path]) -> Path:
    return made("llama")


@pytest.fixture
def host() -> Iterator[Host]:
    with running() as host:
        yield host


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines and waits until they are ready; those that still run at the end of the test are killed."""
    with ExitStack() as ending:
        numbers = iter(range(100))

        def start(model: Path, *, ready: bool = True, **options: object) -> Engine:
            engine = Engine(model, tmp_path / f"engine{next(numbers)}.log", **options)
            ending.callback(engine.kill)
            return engine.ready() if ready else engine

        yield start


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """What vLLM without a connector answers, each prompt by itself and computed whole: the tokens."""
    folder = tmp_path_factory.mktemp("alone")
    known: dict[tuple[object, ...], list[int]] = {}
    with ExitStack() as ending:
        engines: dict[str, Engine] = {}

        def alone(model: Path, *prompts: Sequence[int], max_tokens: int = LENGTH, **options: object) -> list[list[int]]:
            name = f"{model.name} {options}"
            for prompt in prompts:
                asked = (model, name, tuple(prompt), max_tokens)
                if asked not in known:
                    if name not in engines:
                        log = folder / f"{len(engines)}.log"
                        engines[name] = Engine(model, log, **{"enable_prefix_caching": False, **options})
                        ending.callback(engines[name].kill)
                        engines[name].ready()
                    [answer] = engines[name].generate(prompt, max_tokens=max_tokens)
                    assert answer.cached == 0
                    known[asked] = answer.tokens
            return [known[model, name, tuple(prompt), max_tokens] for prompt in prompts]

        yield alone


@pytest.fixture
def small() -> Iterator[Host]:
    with running(16 << 20) as host:
        yield host
