"""The Python of pages that need no model, as it stands, against a host in another process."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.client.save import Saved
from kvtier.events.publisher import Publisher
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, host_over
from kvtier_services.gateway.remote import Listen
from kvtier_services.gateway.tls import Certificate
from tests.examples_fixture import blocks, found_host, run_page
from tests.remote_fixture import Authority, remote_door

HERE = {"README.md", "docs/client.md", "docs/events.md", "docs/advisor.md", "docs/remote.md"}
WITH_A_MODEL = {
    "docs/quickstart.md",
    "docs/transformers.md",
    "docs/flow.md",
    "docs/pages.md",
    "docs/pruning.md",
    "docs/tutorial/layers.md",
    "docs/tutorial/pruning.md",
    "docs/tutorial/sharing.md",
}
"""Run by tests/engines/test_examples.py."""


def test_every_page_with_python_is_run():
    assert {block.page for block in blocks("python")} == HERE | WITH_A_MODEL


@pytest.fixture
def host(monkeypatch, tmp_path):
    """What `kvtier.connect()` finds."""
    with found_host(tmp_path) as config:
        monkeypatch.setenv("KVTIER_CONFIG", str(config))
        yield


def test_the_readme_loads_in_its_second_run(host, capsys):
    for loaded, saved in ((0, Saved(4, 0)), (256, Saved(0, 0))):
        names = run_page("README.md", {})
        names["cache"].close()
        assert capsys.readouterr().out == f"{loaded} {saved}\n"


def test_the_client_keeps_pins_and_drops(host):
    names = run_page("docs/client.md", {})
    assert names["n"] == 0
    assert names["done"].result() == Saved(blocks=4, present=0)
    with names["space"].match(names["token_ids"]) as hit:
        assert hit.tokens == 0, "the last line clears the keyspace"
    assert not names["cache"].counters
    names["cache"].close()


def test_a_router_follows_a_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompt = list(range(100, 300))
    spec = kvtier.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="float32")
    with kvtier.open({"cpu": {"capacity": "4MiB"}}) as cache:
        space = cache.keyspace(spec, model="m", revision="1")
        assert space.save(prompt, torch.zeros(1, 2, 200, 1, 8)).result(10.0) == Saved(3, 0)
        space.describe().write("K.json")
        endpoint = f"ipc://{tmp_path}/events"
        with closing(Publisher(cache.session._hierarchy.state, endpoint, node="box1")):
            names = run_page(
                "docs/events.md",
                {"prompt": prompt},
                address=f"tcp://box1:5557 -> {endpoint}",
                # A router goes on for ever.
                once="# blocks of it that box1 has -> \n        break",
            )
    assert names["view"].prefix(names["keyspace"].addresses(prompt)) == 3


def test_a_client_comes_in_from_another_host(tmp_path):
    authority = Authority(tmp_path)
    listen = Listen("127.0.0.1", 0, certificate=Certificate(*authority.issue("host")))
    with host_over(Arena.private(CAPACITY)) as host, remote_door(host.hierarchy, tmp_path, listen) as remote:
        names = run_page(
            "docs/remote.md",
            {"kvtier": kvtier},
            address=f"grpcs://cache-1:7070 -> {remote.url}",
            token=f"token=... -> token={remote.add('team-a')!r}",
            ca=f"/etc/kvtier/ca.pem -> {remote.ca}",
        )
        said = names["cache"].status()
        assert "error" not in said
        assert said["tenant"] == "team-a"
        names["cache"].close()


def test_advice_says_what_the_page_says():
    names = run_page("docs/advisor.md", {})
    first = names["advice"].ranked[0]
    assert first.candidate.strategy.name == "layers(0-1/2:int4;1/2-1:k8v4)"
    assert first.reason.startswith("loses least of what fits and needs no caution: KL up to 0.0036")


def test_advise_prints_what_the_page_shows(monkeypatch):
    [block] = [block for block in blocks("console", page="docs/advisor.md") if block.text.startswith("$ kvtier advise")]
    command, _, shown = block.text.partition("\n")
    monkeypatch.setenv("COLUMNS", "130")
    done = subprocess.run(
        [Path(sys.executable).with_name("kvtier"), *command.split()[2:]], capture_output=True, text=True, check=True
    )
    assert [line.rstrip() for line in done.stdout.splitlines()] == [line.rstrip() for line in shown.splitlines()]
