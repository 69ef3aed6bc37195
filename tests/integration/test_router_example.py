"""The example of a router sends prompts where most of them is."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import kvtier
from kvtier.events.publisher import Publisher

ROOT = Path(__file__).parents[2]
SPEC = kvtier.KVSpec(1, 1, 8, "float32", block_tokens=4)


def test_prompts_go_where_most_of_them_is(tmp_path):
    import numpy as np

    prompts = {"one": range(100, 108), "two": range(200, 216)}
    with kvtier.open({"cpu": {"capacity": "4MiB"}}) as one, kvtier.open({"cpu": {"capacity": "4MiB"}}) as two:
        publishers = {}
        for name, cache in (("one", one), ("two", two)):
            space = cache.keyspace(SPEC, model="m", revision="1")
            kv = np.zeros((1, 2, len(prompts[name]), 1, 8), np.float32)
            assert space.save(prompts[name], kv).result(10.0).refused == ""
            state = cache.session._hierarchy.state
            publishers[name] = Publisher(state, f"ipc://{tmp_path}/{name}", node=name)
        space.describe().write(tmp_path / "k.json")
        with closing(publishers["one"]), closing(publishers["two"]):
            asked = [*prompts.values(), [*range(200, 208), 7, 7, 7, 7]]
            done = subprocess.run(
                [sys.executable, "examples/router.py", str(tmp_path / "k.json")]
                + [f"{name}=ipc://{tmp_path}/{name}" for name in prompts],
                input="".join(" ".join(map(str, prompt)) + "\n" for prompt in asked),
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
    assert done.stdout.splitlines() == [
        "one: 8 of 8 tokens are there",
        "two: 16 of 16 tokens are there",
        "two: 8 of 12 tokens are there",
    ]
