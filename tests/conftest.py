"""What every test has: hypothesis profiles, and markers by folder."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

HERE = Path(__file__).parent
# vLLM has an environment of its own: `make test-vllm`.
collect_ignore = [] if find_spec("vllm") else ["engines_vllm"]
if not all(map(find_spec, ("kubernetes_validate", "playwright", "promql_parser"))):  # `make install-ops`
    collect_ignore.append("ops")

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("cluster", "engines", "engines_vllm", "ops"):
            item.add_marker(folder.removesuffix("_vllm"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
