"""A real kvtier with a door for clients of other hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import kvtier
from kvtier.errors import SessionError, Unauthenticated
from tests.cluster.foreign import free_ports
from tests.cluster.kit import Cluster, cluster_in_temporary_folders, environment, within
from tests.remote_fixture import Authority

SPEC = kvtier.KVSpec(2, 2, 16, "bfloat16", block_tokens=16)
TOKENS = np.arange(80, dtype=np.uint32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Cluster, str, Path]]:
    """Running, with where its remote door is and who vouches for it."""
    port = free_ports(1)[0]
    with tempfile.TemporaryDirectory() as folder, cluster_in_temporary_folders() as made:
        authority = Authority(Path(folder))
        cert, key = authority.issue("host")
        remote = {"listen": f"127.0.0.1:{port}", "cert": str(cert), "key": str(key)}
        remote["tokens_file"] = str(Path(folder, "tokens.json"))
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in remote.items())
        made.config.write_text(f"{made.config.read_text()}[remote]\n{text}")
        made.cli("up")
        yield made, f"grpcs://127.0.0.1:{port}", authority.cert


def token(cluster, *args):
    command = [sys.executable, "-m", "kvtier_services.cli", "token", *args, "--config", str(cluster.config)]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True, timeout=60.0)
    return done.stdout.strip()


def test_what_a_remote_client_saves_is_there_for_its_tenant_and_for_nobody_else(cluster):
    made, url, ca = cluster
    red, blue = token(made, "add", "red", "--cpu", "32MiB"), token(made, "add", "blue")
    kv = torch.randn(2, 2, len(TOKENS), 2, 16).bfloat16()

    one, two, other = (within(10.0, lambda known=known: comes_in(url, known, ca)) for known in (red, red, blue))
    local = kvtier.connect(made.socket)
    with one, two, other, local:
        spaces = [cache.keyspace(SPEC, model="m", revision="1") for cache in (one, two, other, local)]
        assert spaces[0].save(TOKENS, kv).result(10.0).blocks == 5
        loaded = []
        for space in spaces:
            out = torch.zeros_like(kv)
            with space.match(TOKENS) as hit:
                loaded.append(hit.load(out))
            assert not loaded[-1] or torch.equal(out, kv)
        assert loaded == [80, 80, 0, 0]
        assert not any(cache.counters for cache in (one, two, other)), (
            "nobody tried the memory of a GPU of another host"
        )
        assert local.session.salt, "engines of the host are kept apart from the tenants too"
        tenants = {tenant["tenant"]: tenant for tenant in made.host()["remote"]["tenants"]}
        assert tenants["red"]["nbytes"]["cpu"] > 0 == tenants["blue"]["nbytes"]["cpu"]
        assert tenants["red"]["sessions"] == 2
        said = made.cli("status") + token(made, "list")
        assert "red: 2 sessions" in said
        assert not any(secret in said for secret in (red, blue, one.session.salt))


def test_a_revoked_token_is_good_for_nothing_within_seconds(cluster):
    made, url, ca = cluster
    known = token(made, "add", "gone")
    with within(10.0, lambda: comes_in(url, known, ca)) as cache:
        token(made, "revoke", "gone")
        within(10.0, lambda: "error" in cache.status())
        with pytest.raises(Unauthenticated):
            kvtier.connect(url, token=known, ca=ca)


def comes_in(url, known, ca):
    try:
        return kvtier.connect(url, token=known, ca=ca)
    except SessionError:
        return None
