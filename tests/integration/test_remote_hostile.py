"""What a client that means harm can do to the others of a host, and a host that does to a client."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvtier.block import slot_nbytes
from kvtier.client.bulk import Bulk
from kvtier.client.connect import connect
from kvtier.client.credentials import Credentials
from kvtier.client.staged import StagedMemory
from kvtier.errors import ProtocolMismatch, SessionError, SessionUnavailable, Unauthenticated, UsageError
from kvtier.hierarchy.answers import GRANT, SLOT, GrantState
from kvtier.memory.arena import Arena
from kvtier.rpc.bulk import Ask
from kvtier.rpc.kvtier_pb2 import ClientNote, Hello, Join, Refused, Welcome, WhereRequest
from kvtier.rpc.kvtier_pb2_grpc import DoorStub
from kvtier.rpc.protocol import PROTOCOL
from kvtier.spec import KVSpec
from kvtier.testing.session import CAPACITY, NBYTES, PATIENCE, chain, eventually, host_over, save
from kvtier.tiers.base import TierNumber
from kvtier_services.gateway import tokens
from kvtier_services.gateway.callers import Caller
from kvtier_services.gateway.guests import Guest
from kvtier_services.gateway.tokens import Quota
from tests.door_fixture import ROOT
from tests.remote_fixture import remote_door

SPEC = KVSpec(2, 2, 16, "bfloat16", block_tokens=16)
TOKENS = np.arange(16 * 5, dtype=np.uint32)


@pytest.fixture
def host():
    with host_over(Arena.private(CAPACITY)) as host:
        yield host


@pytest.fixture
def remote(host, tmp_path):
    with remote_door(host.hierarchy, tmp_path) as remote:
        yield remote


@pytest.fixture
def cache_of(remote):
    caches = []

    def cache_of(token):
        caches.append(connect(remote.url, token=token))
        return caches[-1]

    yield cache_of
    for cache in caches:
        cache.close()


def saved(cache):
    """Some blocks of a tenant, and their keys."""
    space = cache.keyspace(SPEC, model="m", revision="1")
    kv = torch.randn(2, 2, len(TOKENS), 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    space.save(TOKENS, kv).result(PATIENCE)
    return space.chain(TOKENS).addresses


def found_keys(session, keys):
    matched = session.match(keys, 0.0)
    session.release(matched.lease)
    return len(matched.slots)


class TestOthersBlocks:
    def test_a_report_of_wrong_bytes_drops_only_the_callers_blocks_that_are_wrong(self, cache_of, remote, host):
        red, blue = cache_of(remote.add("red")), cache_of(remote.add("blue"))
        keys = saved(red)
        blue.session.condemn(keys, "bad_checksum")
        red.session.condemn(keys[:1], "bad_checksum")
        time.sleep(0.3)
        assert found_keys(blue.session, keys) == 0
        assert found_keys(red.session, keys) == 5, "whole blocks stay, whatever is said of them"
        matched = red.session.match(keys, 0.0)
        offset, nbytes = int(matched.slots["offset"][0]), int(matched.slots["nbytes"][0])
        red.session.release(matched.lease)
        host.hierarchy.arena.memory[offset + nbytes - 1] ^= 1
        blue.session.condemn(keys[:1], "bad_checksum")
        time.sleep(0.3)
        assert found_keys(red.session, keys) == 5, "nobody reports blocks of others"
        red.session.condemn(keys[:1], "bad_checksum")
        assert eventually(lambda: found_keys(red.session, keys) == 0)

    def test_no_lease_gives_bytes_of_others(self, cache_of, remote, monkeypatch):
        red, blue = cache_of(remote.add("red")), cache_of(remote.add("blue"))
        keys = saved(red)
        monkeypatch.setattr(Caller, "own", lambda _self, _hierarchy, keys: keys)  # as if they came in just then
        matched = blue.session.match(keys, 0.0)
        carrier, number = blue.session._line.mapping._carrier, blue.session._line._at.session
        assert list(carrier.get(Ask(number, matched.lease, [0]), NBYTES)) == []
        assert remote.door._desk.counters["foreign"] == 1

    @pytest.mark.parametrize("how", ["prefetch", "pin"])
    def test_what_comes_from_another_host_is_found_to_be_anothers(self, cache_of, remote, host, monkeypatch, how):
        red, blue = cache_of(remote.add("red")), cache_of(remote.add("blue"))
        space = red.keyspace(SPEC, model="m", revision="1")
        keys, fetch = space.chain(TOKENS).addresses, host.hierarchy.mover._fetch

        def bring(*args):
            saved(red)  # as if another host had had them
            return fetch(*args)

        monkeypatch.setattr(host.hierarchy.mover, "_fetch", bring)
        if how == "prefetch":
            assert blue.session.prefetch(keys, TierNumber.CPU).result(PATIENCE) == 0
        else:
            assert blue.session.pin(keys, 60.0) == 0
        assert found_keys(red.session, keys) == 5
        assert red.session.status()["pinned_nbytes"] == 0

    def test_what_a_client_says_of_its_speed_changes_nobodys_mind(self, cache_of, remote, host, monkeypatch):
        monkeypatch.setattr("kvtier.hierarchy.pace.LEAST_NBYTES", 1)
        cache = cache_of(remote.add("red"))
        session, keys = cache.session, saved(cache)
        for _ in range(4):
            session.release(session.match(keys, 0.0).lease, 1e6)
        assert found_keys(session, keys) == 5
        assert host.hierarchy.state.pace.slowness(TierNumber.CPU, host.hierarchy.state.clock()) == 0.0


class TestQuotas:
    @pytest.mark.parametrize("how", ["match", "prefetch", "pin"])
    def test_what_comes_up_from_other_tiers_counts(self, cache_of, remote, host, how):
        keys = saved(cache_of(remote.add("red")))
        nbytes = host.hierarchy.inspect(keys[:1])[0]["nbytes"]
        assert host.hierarchy.move(keys, TierNumber.NVME).result(PATIENCE) == 5
        limited = remote.add("limited", tenant="red", quota=Quota(cpu=3 * slot_nbytes(nbytes)))
        session = cache_of(limited).session
        if how == "match":
            matched = session.match(keys, PATIENCE)
            there = len(matched.slots)
            session.release(matched.lease)
        elif how == "prefetch":
            there = session.prefetch(keys, TierNumber.CPU).result(PATIENCE)
        else:
            there = session.pin(keys, 60.0)
        assert there == 3
        assert session.status()["nbytes"]["cpu"] == 3 * slot_nbytes(nbytes)
        assert session.status()["refused"]["cpu"] > 0


class TestTheHost:
    def test_a_payload_that_swells_takes_no_memory(self):
        child = [sys.executable, "-m", "tests.remote_bomb"]
        said = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, timeout=120.0, check=True)
        answer = json.loads(said.stdout.splitlines()[-1])
        assert answer["said"].startswith("refused: payloads cannot be read"), answer
        assert answer["grown_nbytes"] < 256 << 20, answer
        assert answer["saved"] == 1

    def test_a_tenant_cannot_turn_the_audit_log_over(self, cache_of, remote):
        red, blue = cache_of(remote.add("red")), cache_of(remote.add("blue"))
        for cache, often in ((red, 60), (blue, 1)):
            for _ in range(often):
                with pytest.raises(Unauthenticated):
                    cache.session.evict(chain(0, 1))
        assert eventually(lambda: '"blue"' in remote.audit.read_text())
        lines = [json.loads(line)["who"] for line in remote.audit.read_text().splitlines()]
        assert (lines.count("red"), lines.count("blue")) == (20, 1)

    def test_tokens_that_are_revoked_end_whatever_else_fails(self, cache_of, remote, monkeypatch):
        cache_of(remote.add("red"))

        def fail(*_):
            raise RuntimeError("whatever")

        monkeypatch.setattr(remote.door._desk, "thin_out", fail)
        time.sleep(1.2)
        tokens.revoke(remote.tokens, "red")
        assert eventually(lambda: not remote.door._calls.guests)

    def test_and_however_busy_the_host_is_with_calls(self, cache_of, remote, host, monkeypatch):
        busy = cache_of(remote.add("busy")).session
        cache_of(remote.add("red"))
        go = threading.Event()
        monkeypatch.setattr(host.hierarchy, "where", lambda _: go.wait(PATIENCE))
        request = WhereRequest(session=busy._line._at.session)
        asked = [busy._line.begin(busy._line.stub.Where, request, 60.0) for _ in range(60)]
        time.sleep(0.2)
        tokens.revoke(remote.tokens, "red")
        try:
            assert eventually(lambda: len(remote.door._calls.guests) == 1)
            assert not go.is_set()
        finally:
            go.set()
            for call in asked:
                call.cancel()

    def test_of_a_session_that_has_ended_nothing_can_be_begun(self, host):
        guest = Guest(host.hierarchy, 5, "kit")
        guest.ticket(1, 7)
        guest.lease(2, 8)
        guest.leave()
        with pytest.raises(UsageError), guest.receiving(1):
            pass
        assert guest.lease_of(2) == 0

    def test_nobody_learns_which_sessions_there_are(self, remote, host):
        host.hierarchy.attach(4711, "an engine of this host")
        way = remote.way(remote.add("red"))
        with way.open() as channel:
            notes = [ClientNote(hello=Hello(protocol=PROTOCOL)), ClientNote(join=Join(session=4711))]
            said = list(DoorStub(channel).Attach(iter(notes), metadata=way.metadata, timeout=PATIENCE))
        assert said[1].joined.session not in (0, 4711)

    def test_what_was_done_is_answered_though_it_cannot_be_written_down(self, cache_of, remote, caplog):
        remote.audit.mkdir()
        session = cache_of(remote.add("root", admin=True)).session
        save(session, 0, 2)
        assert session.evict(chain(0, 2)) == 2
        assert eventually(lambda: "'what': 'Drop'" in caplog.text)

    def test_nobody_writes_into_an_admins_terminal(self, cache_of, remote, host, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["\x1b[2J\nall is well"])
        cache_of(remote.add("red"))
        owners = [holdings.owner for holdings in host.hierarchy.state.ledger.sessions.values()]
        assert all(owner.isprintable() for owner in owners)
        assert "red: ?[2J?all is well" in owners[-1]

    def test_a_remote_clients_word_on_device_memory_is_nobodys(self, cache_of, remote, host, caplog):
        cache = cache_of(remote.add("red"))
        cache.session._line.note(ClientNote(refused=Refused(why="x")))
        assert cache.session.status()["sessions"] == 1, "it was heard before the status was made"
        assert not host.hierarchy.status()["faults"].get("device_refused")
        assert "device memory" not in caplog.text
        assert not cache.session._line._at.lost


class TestTheTokensFile:
    def test_what_is_revoked_does_not_come_back_with_what_is_added(self, tmp_path, monkeypatch):
        path, read = tmp_path / "tokens.json", tokens.read
        tokens.add(path, "old")
        reading, revoked = threading.Event(), threading.Event()

        def slow(path):
            known = read(path)
            if threading.current_thread().name.startswith("adds"):
                reading.set()
                revoked.wait(0.5)
            return known

        monkeypatch.setattr(tokens, "read", slow)
        with ThreadPoolExecutor(1, "adds") as adds:
            adding: Future[str] = adds.submit(tokens.add, path, "new")
            reading.wait(PATIENCE)
            tokens.revoke(path, "old")
            revoked.set()
            adding.result(PATIENCE)
        assert [entry.name for entry in read(path).tokens] == ["new"]


class TestAHostThatLies:
    @pytest.fixture
    def memory(self):
        memory = StagedMemory(Welcome(capacity=1 << 20), _Nothing())
        yield memory
        memory.close()

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(1 << 20, 64), ((1 << 20) - 4096, 8192), ((1 << 64) - 4096, 4096), (64, 64), (0, 2**32 - 1)],
    )
    def test_slots_outside_the_arena_are_refused(self, memory, offset, nbytes):
        with pytest.raises(ProtocolMismatch):
            memory.leased(1, [bytes(34)], np.array([(offset, 1, nbytes)], SLOT))
        with pytest.raises(ProtocolMismatch):
            memory.reserved(1, [nbytes], np.array([(offset, 1, GrantState.GRANTED)], GRANT))
        memory.released(1)
        memory.ended(1)

    def test_a_port_that_cannot_be_is_an_error_of_the_session(self):
        with pytest.raises(SessionUnavailable):
            Bulk("127.0.0.1", 99_999, Credentials.of("t", tls=False))

    def test_more_slots_than_keys_are_refused(self, cache_of, remote, monkeypatch, host):
        session = cache_of(remote.add("root", admin=True)).session
        save(session, 0, 3)
        ask = session._line.ask

        def more(method, request, until, at):
            reply = ask(method, request, until, at)
            for name in {"slots", "tiers", "grants"} & {field.name for field, _ in reply.ListFields()}:
                setattr(reply, name, 2 * getattr(reply, name))
            return reply

        monkeypatch.setattr(session._line, "ask", more)
        with pytest.raises(SessionError):
            session.match(chain(0, 3), 0.0)
        with pytest.raises(SessionError):
            session.reserve(chain(50, 2), [NBYTES] * 2, 0)
        sessions = host.hierarchy.state.ledger.sessions.values()
        assert eventually(lambda: not any(one.leased_nbytes + one.reserved_nbytes for one in sessions))


class _Nothing:
    def get(self, ask, nbytes):
        yield from ()

    def put(self, ask, payloads):
        return []

    def close(self):
        pass
