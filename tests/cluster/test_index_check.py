"""`kvtier index check` on a real kvtier whose index was tampered with."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing

from kvtier.client.door import DoorSession
from kvtier.index.sweep import KEY_NBYTES
from kvtier.testing.payloads import key_of
from kvtier.testing.session import save
from kvtier_services import redis_server
from tests.cluster.kit import environment, within


def check(cluster, *args):
    """Exit code, and what it said."""
    command = [*cluster.command("index")[:-2], "check", "--config", str(cluster.config), *args]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr[-3000:]
    return done.returncode, done.stdout


def test_what_index_and_host_do_not_agree_on_is_found_and_mended(running):
    with closing(DoorSession(running.socket)) as session:
        assert save(session, 0, 8) == 8
        redis = redis_server.running(running.run_dir).address.client(5.0)
        within(10.0, lambda: redis.exists(key_of(7)))
        within(10.0, lambda: check(running)[0] == 0)
        told = redis.get(key_of(0))
        redis.delete(key_of(0), key_of(1))
        redis.set(b"\1" * KEY_NBYTES, told)
        rc, said = check(running)
        assert rc == 1
        assert "8 blocks" in said
        assert "2 missing, 0 wrong, 1 stale" in said
        assert key_of(0).hex() in said
        rc, said = check(running, "--repair", "--json")
        assert rc == 0
        assert json.loads(said)["hosts"][0]["mended"] == 3
        assert check(running)[0] == 0
        assert redis.get(key_of(0)) == told
        redis.close()


def test_where_kvtier_does_not_run_it_says_so(cluster):
    rc, _ = check(cluster)
    assert rc == 1
