"""Clients of other hosts: what they can do, what they cannot, and what becomes of the host when they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

from kvtier.block import slot_nbytes
from kvtier.client.connect import connect
from kvtier.client.credentials import Credentials
from kvtier.client.door import DoorSession, ask_status
from kvtier.client.local import LocalSession
from kvtier.errors import ConfigError, OverQuota, SessionError, SessionUnavailable, Unauthenticated
from kvtier.hierarchy.answers import GrantState
from kvtier.memory.arena import Arena
from kvtier.rpc.bulk import Ask
from kvtier.spec import KVSpec
from kvtier.testing.payloads import payload_of
from kvtier.testing.session import (
    CAPACITY,
    NBYTES,
    PATIENCE,
    chain,
    eventually,
    fill,
    found,
    holds,
    host_over,
    reserve,
    save,
    states,
)
from kvtier.tiers.base import TierNumber
from kvtier_services.gateway import tokens
from kvtier_services.gateway.remote import Listen
from kvtier_services.gateway.tls import Certificate
from kvtier_services.gateway.tokens import Quota
from tests.cluster.network import network, why_not
from tests.door_fixture import ROOT, door_in_thread, folders
from tests.remote_fixture import Authority, remote_door

SIZE = slot_nbytes(NBYTES)
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
def opened():
    """Closes what a test opens."""
    things = []

    def opened(thing):
        things.append(thing)
        return thing

    yield opened
    for thing in things:
        thing.close()


@pytest.fixture
def cache_of(remote, opened):
    return lambda token: opened(connect(remote.url, token=token))


def space_of(cache, **parts):
    return cache.keyspace(SPEC, model="m", revision="1", **parts)


def make_kv(seed=0):
    return torch.randn(2, 2, len(TOKENS), 2, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()


def load(space, token_ids=TOKENS):
    """How many tokens were loaded, and what."""
    with space.match(token_ids, wait=1.0) as hit:
        out = torch.zeros(2, 2, len(token_ids), 2, 16, dtype=torch.bfloat16)
        return hit.load(out), out


class TestLoadsAndSaves:
    def test_what_one_remote_client_saves_another_loads_bit_by_bit(self, cache_of, remote):
        token = remote.add("alice")
        kv = make_kv()
        one, two = cache_of(token), cache_of(token)
        assert space_of(one).save(TOKENS, kv).result(PATIENCE).blocks == 5
        good, out = load(space_of(two))
        assert good == len(TOKENS)
        assert torch.equal(out, kv)
        assert two.counters == {}

    def test_a_block_that_another_tier_has_is_loaded_as_it_comes(self, cache_of, remote, host):
        token = remote.add("alice")
        kv = make_kv()
        cache = cache_of(token)
        space = space_of(cache)
        space.save(TOKENS, kv).result(PATIENCE)
        host.hierarchy.move(space.chain(TOKENS).addresses, TierNumber.NVME).result(PATIENCE)
        good, out = load(space)
        assert good == len(TOKENS)
        assert torch.equal(out, kv)

    def test_what_the_engine_has_does_not_come(self, cache_of, remote):
        space = space_of(cache_of(remote.add("alice")))
        kv = make_kv()
        space.save(TOKENS, kv).result(PATIENCE)
        with space.match(TOKENS) as hit:
            out = torch.zeros(2, 2, len(TOKENS) - 48, 2, 16, dtype=torch.bfloat16)
            assert hit.load(out, origin=48) == len(TOKENS)
            assert torch.equal(out, kv[:, :, 48:])
            came = [bool(space.session.readable()[offset : offset + 64].any()) for offset in hit._slots["offset"]]
            assert came == [False] * 3 + [True] * 2

    def test_memory_comes_and_goes_with_leases(self, remote, opened):
        session = opened(remote.session(remote.add("kit", admin=True)))
        save(session, 0, 50)
        for _ in range(3):
            matched = session.match(chain(0, 50), 0.0)
            assert holds(session, matched, 0)
            assert session.readable().any()
            session.release(matched.lease)
            assert not session.readable().any()
        assert not session.writable().any()
        assert session.fetch(matched.lease, 0, 50) == 0

    def test_bytes_that_were_changed_on_the_way_are_no_hit(self, cache_of, remote, host, monkeypatch):
        token = remote.add("alice")
        cache = cache_of(token)
        space = space_of(cache)
        space.save(TOKENS, make_kv()).result(PATIENCE)
        with space.match(TOKENS[:48]) as hit:
            offset = int(hit._slots["offset"][1])
            host.hierarchy.arena.memory[offset + 3000] ^= 1
        assert load(space)[0] == 16

    def test_a_host_that_comes_back_is_found_again(self, host, tmp_path, opened):
        with remote_door(host.hierarchy, tmp_path) as first:
            token, port = first.add("kit", admin=True), first.door.port
            session = opened(first.session(token))
            save(session, 0, 3)
            epoch = session.epoch
        with pytest.raises(SessionError):
            found(session, 0, 3)

        def again():
            try:
                return found(session, 0, 3) == 3
            except SessionError:
                return False

        with remote_door(host.hierarchy, tmp_path, Listen("127.0.0.1", port)):
            assert eventually(again)
            assert session.epoch != epoch
            matched = session.match(chain(0, 3), 0.0)
            assert holds(session, matched, 0)

    def test_local_and_remote_clients_of_one_salt_share(self, host, tmp_path, opened):
        with folders() as place:
            arena = Arena.own(place[1], CAPACITY)
            with (
                host_over(arena) as host,
                door_in_thread(host.hierarchy, place[0]),
                remote_door(host.hierarchy, tmp_path) as remote,
            ):
                local, far = DoorSession(place[0]), remote.session(remote.add("kit", admin=True))
                assert local.salt == ""
                save(local, 0, 3)
                matched = far.match(chain(0, 3), 0.0)
                assert holds(far, matched, 0)
                save(far, 10, 2)
                assert found(local, 10, 2) == 2
                far.close()
                local.close()
            arena.close()


class TestWhoComesIn:
    def test_nobody_without_a_token(self, remote):
        remote.add("alice")
        for token in ("kvt_wrong", "x" * 500):
            with pytest.raises(Unauthenticated, match="not known here"):
                remote.session(token)
        with pytest.raises(ConfigError, match="KVTIER_TOKEN"):
            Credentials.of("", tls=False)
        with pytest.raises(ConfigError, match="KVTIER_TOKEN"):
            Credentials.of("two lines\nX-Other: 1", tls=False)
        assert remote.door._calls.guests == {}

    def test_a_revoked_token_ends_its_sessions_and_no_others(self, remote, opened):
        gone, stays = (opened(remote.session(remote.add(name, admin=True))) for name in ("alice", "bob"))
        save(gone, 0, 2)
        tokens.revoke(remote.tokens, "alice")
        assert eventually(lambda: len(remote.door._calls.guests) == 1)
        with pytest.raises(SessionError):
            found(gone, 0, 2)
        with pytest.raises(Unauthenticated):
            gone._line._attach(time.monotonic() + 5.0)
        assert found(stays, 0, 2) == 2

    def test_a_session_is_its_tokens_alone(self, remote, opened):
        one, two = (opened(remote.session(remote.add(name, admin=True))) for name in ("alice", "bob"))
        save(one, 0, 2)
        matched = one.match(chain(0, 2), 0.0)
        two._line._at.session = one._line._at.session
        with pytest.raises(SessionUnavailable, match="not attached here"):
            found(two, 0, 2)
        carrier = two._line.mapping._carrier
        with pytest.raises(SessionError, match="not attached here"):
            list(carrier.get(Ask(one._line._at.session, matched.lease, [0]), NBYTES))

    def test_plain_text_goes_to_loopback_only(self, remote, tmp_path):
        with pytest.raises(ConfigError, match="insecure=True"):
            connect("grpc://10.1.2.3:7070", token="kvt_x")
        with pytest.raises(ConfigError, match="insecure = true"):
            Listen("0.0.0.0", 7070)
        with pytest.raises(ConfigError, match="grpcs://"):
            connect("http://10.1.2.3:7070", token="kvt_x")


class TestTls:
    def test_hosts_and_clients_that_nobody_vouches_for_are_refused(self, host, tmp_path, opened):
        authority, stranger = Authority(tmp_path), Authority(tmp_path / "stranger")
        cert, key = authority.issue("host")
        with remote_door(
            host.hierarchy, tmp_path, Listen("127.0.0.1", 0, 0, Certificate(cert, key, authority.cert))
        ) as r:
            token = r.add("kit", admin=True)
            mine = dict(zip(("cert", "key"), authority.issue("client"), strict=True))
            session = opened(DoorSession(r.way(token, **mine)))
            save(session, 0, 2)
            assert holds(session, session.match(chain(0, 2), 0.0), 0)
            theirs = dict(zip(("cert", "key"), stranger.issue("client"), strict=True))
            for proof in ({"ca": r.ca}, {"ca": r.ca, **theirs}, {"ca": stranger.cert, **mine}):
                with pytest.raises(SessionUnavailable):
                    connect(r.url, token=token, **proof)

    def test_a_renewed_certificate_is_shown_without_a_restart(self, host, tmp_path, opened):
        import ssl

        old, new = Authority(tmp_path), Authority(tmp_path / "new")
        cert, key = old.issue("host")
        with remote_door(host.hierarchy, tmp_path, Listen("127.0.0.1", 0, 0, Certificate(cert, key))) as r:
            token = r.add("kit", admin=True)
            before = opened(r.session(token))
            save(before, 0, 3)
            ports = r.door.port, r.door.bulk_port

            def shown():
                return {ssl.get_server_certificate(("127.0.0.1", port), timeout=5.0) for port in ports}

            first = shown()
            assert first == {ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(cert.read_text()))}
            for ours, theirs in zip((key, cert), reversed(new.issue("host")), strict=True):
                theirs.replace(ours)
            assert eventually(lambda: _or_empty(shown) == {_pem(cert)})
            after = opened(DoorSession(_way(r, token, new.cert)))
            assert holds(after, after.match(chain(0, 3), 0.0), 0)
            assert found(before, 0, 3) == 3, "who is in stays in"
            assert holds_after_a_while(before)


def holds_after_a_while(session):
    """A client that was in before loads again, over a new connection if it must: with the old authority that fails."""
    matched = session.match(chain(0, 3), 0.0)
    return session.fetch(matched.lease, 0, 3) in (0, 3)


def _or_empty(look):
    try:
        return look()
    except OSError:
        return set()


def _pem(path):
    import ssl

    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(path.read_text()))


def _way(remote, token, ca):
    from kvtier.client.remote import RemoteWay

    return RemoteWay(remote.url, Credentials.of(token, ca=ca))


@pytest.fixture
def engine(remote):
    """A client in a process of its own that holds 3 leased blocks and 4 reserved slots."""
    token = remote.add("engine", admin=True)
    with child("client", remote.url, token, "10") as process:
        yield process


@contextmanager
def child(*args, within=lambda *command: list(command)):
    """A process that runs `tests.remote_child`, in a network of its own if need be."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")])}
    command = within(sys.executable, "-m", "tests.remote_child", *map(str, args))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, cwd=ROOT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10.0)
        process.stdout.close()


class TestDeath:
    @pytest.mark.parametrize(("how", "within"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 10.0)])
    def test_what_a_dead_client_held_is_free_within_seconds(self, host, remote, request, how, within):
        local = LocalSession(host.hierarchy)
        save(local, 0, 3)
        engine = request.getfixturevalue("engine")
        said = json.loads(engine.stdout.readline())
        assert said == {"whole": True, "granted": [GrantState.GRANTED] * 4}
        assert local.status()["leases"] == 1
        assert states(reserve(local, 10, 4)) == [GrantState.BUSY] * 4
        engine.send_signal(how)
        began = time.monotonic()
        while local.status()["leases"] or local.status()["sessions"] > 1:
            assert time.monotonic() - began < within
            time.sleep(0.05)
        assert eventually(lambda: host.hierarchy.state.cpu.pool.used == 3 * SIZE)
        assert remote.door.register.tenants["engine"].sessions == set()

    @pytest.mark.slow
    def test_a_client_whose_network_swallows_everything_is_gone_within_ten_seconds(self, tmp_path):
        if why := why_not():
            pytest.skip(why)
        with folders() as (socket, arena), network() as net:
            far = net.machine("far", 1)
            with child("host", socket, arena, tmp_path, net.address, within=net.inside) as host:
                said = json.loads(host.stdout.readline())
                url = f"grpc://{net.address}:{said['port']}"
                with child("client", url, said["token"], 10, within=far.inside) as engine:
                    assert json.loads(engine.stdout.readline())["whole"]
                    assert ask_status(socket)["leases"] == 1
                    net.unplug(1)
                    began = time.monotonic()
                    while (status := ask_status(socket))["leases"] or status["sessions"]:
                        assert time.monotonic() - began < 10.0
                        time.sleep(0.1)
                    assert status["tiers"][0]["used"] == 3 * SIZE

    def test_a_client_that_stops_reading_holds_no_slot_for_long(self, remote, host, opened):
        """Its session ends, and with it the connection that its bytes wait for."""
        session = opened(remote.session(remote.add("kit", admin=True)))
        save(session, 0, 100)
        matched = session.match(chain(0, 100), 0.0)
        # More than the sockets between them hold.
        ask = Ask(session._line._at.session, matched.lease, [*range(100)] * 50)
        stream = session._line.mapping._carrier.get(ask, 1 << 30)
        next(stream)
        session._line._at.lose()
        assert eventually(lambda: not remote.door._calls.guests)
        assert eventually(lambda: int(host.hierarchy.state.cpu.pool._refs.max()) == 1)
        with suppress(SessionError):
            assert len(list(stream)) < 4000, "the rest does not come"

    def test_slots_into_which_bytes_are_put_stay_quarantined_until_they_are_there(self, remote, host, opened):
        session = opened(remote.session(remote.add("kit", admin=True)))
        reserved = reserve(session, 0, 3)
        number = session._line._at.session
        with remote.door._desk.writing(number):
            session._line._at.lose()
            assert eventually(lambda: not remote.door._calls.guests)
            assert eventually(
                lambda: host.hierarchy.state.cpu.quarantined == {number: reserved.grants["offset"].tolist()}
            )
            host.hierarchy._absolve()
            assert host.hierarchy.state.cpu.quarantined
        assert eventually(lambda: host.hierarchy.state.cpu.pool.used == 0)


class TestWrites:
    """A remote client is not trusted with bytes."""

    @pytest.fixture
    def session(self, remote, opened):
        return opened(remote.session(remote.add("kit", admin=True)))

    def put(self, session, call, payloads):
        arrays = [(position, np.frombuffer(payload, np.uint8)) for position, payload in payloads]
        return session._line.mapping._carrier.put(Ask(session._line._at.session, call), arrays)

    def test_only_whole_payloads_of_what_was_reserved_arrive(self, session, host):
        reserved = reserve(session, 0, 4)
        right, broken = payload_of(0, NBYTES), bytearray(payload_of(1, NBYTES))
        broken[-1] ^= 1
        sent = [(0, right), (1, broken), (2, payload_of(7, NBYTES)), (3, payload_of(3, NBYTES - 64)), (9, right)]
        before = host.hierarchy.arena.memory.copy()
        assert self.put(session, reserved.ticket, sent) == [0]
        changed = np.flatnonzero(before != host.hierarchy.arena.memory)
        offset = int(reserved.grants["offset"][0])
        assert offset <= changed.min() <= changed.max() < offset + NBYTES
        fill(session, reserved, 0)
        assert self.put(session, reserved.ticket, [(0, right)]) == [], "what has arrived is not written again"
        assert session._line.ask(
            session._line.stub.Commit,
            _commit(session, reserved.ticket, [0, 1, 2, 3]),
            time.monotonic() + 5.0,
            _at(session),
        ).visible == bytes([1, 0, 0, 0])
        assert found(session, 0, 4) == 1

    def test_what_was_committed_or_never_reserved_takes_no_bytes(self, session):
        reserved = reserve(session, 0, 1)
        session.commit(reserved.ticket, fill(session, reserved, 0))
        for call in (reserved.ticket, 12_345):
            with pytest.raises(SessionError, match="no reservation"):
                self.put(session, call, [(0, payload_of(0, NBYTES))])

    def test_a_lease_that_was_given_back_gives_no_bytes(self, session):
        save(session, 0, 2)
        matched = session.match(chain(0, 2), 0.0)
        number, carrier = session._line._at.session, session._line.mapping._carrier
        assert len(list(carrier.get(Ask(number, matched.lease, [0, 1]), NBYTES))) == 2
        assert list(carrier.get(Ask(number, matched.lease, [2]), NBYTES)) == []
        session.release(matched.lease)
        assert found(session, 0, 2) == 2, "the host has heard it"
        with pytest.raises(SessionError, match="no lease"):
            list(carrier.get(Ask(number, matched.lease, [0]), NBYTES))


def _at(session):
    return session._line._at


def _commit(session, ticket, written):
    from kvtier.rpc import kvtier_pb2 as pb
    from kvtier.rpc.conversions import pack_numbers

    return pb.CommitRequest(session=_at(session).session, call=ticket, written=pack_numbers(written))


class TestTenants:
    def test_no_tenant_finds_names_or_probes_anothers_blocks(self, cache_of, remote):
        red, blue = cache_of(remote.add("red")), cache_of(remote.add("blue"))
        kv = make_kv()
        mine = space_of(red)
        mine.save(TOKENS, kv).result(PATIENCE)
        assert load(mine)[0] == len(TOKENS)
        assert load(space_of(blue))[0] == 0
        assert set(mine.chain(TOKENS).addresses).isdisjoint(space_of(blue).chain(TOKENS).addresses)
        # With red's very keys, which blue cannot know.
        stolen = mine.chain(TOKENS).addresses
        assert found_keys(blue.session, stolen) == 0
        assert blue.session.inspect(stolen) == [None] * 5
        assert blue.session.pin(stolen, 60.0) == 0
        assert blue.session.prefetch(stolen, TierNumber.CPU).result(PATIENCE) == 0
        assert blue.session.where(stolen) == blue.session.where([])
        with pytest.raises(Unauthenticated):
            blue.session.reserve(stolen, [NBYTES] * 5, 0)
        blue.session._line.claim(mine.keyspace.canonical())
        assert eventually(lambda: blue.session._line._at.lost), "who claims what is not his is sent away"
        assert remote.door.register.tenants["blue"].spaces.keys().isdisjoint([mine.keyspace.root[:16]])

    def test_blocks_of_this_hosts_engines_are_nobodys_of_the_remote_tenants(self, cache_of, remote, host):
        cache = cache_of(remote.add("red"))
        save(LocalSession(host.hierarchy), 0, 3)
        assert found(cache.session, 0, 3) == 0
        assert cache.session.inspect(chain(0, 3)) == [None] * 3

    def test_a_tenant_saves_only_into_its_own_keyspaces(self, cache_of, remote):
        cache = cache_of(remote.add("red"))
        reserved = reserve(cache.session, 0, 2)
        written = fill(cache.session, reserved, 0)
        assert cache.session.commit(reserved.ticket, written) == [False, False]
        assert remote.door._desk.counters["foreign"] == 2

    def test_what_touches_others_needs_an_admin_token_and_is_written_down(self, cache_of, remote, opened):
        cache, admin = cache_of(remote.add("red")), opened(remote.session(remote.add("root", admin=True)))
        space = space_of(cache)
        space.save(TOKENS, make_kv()).result(PATIENCE)
        keys = space.chain(TOKENS).addresses
        for forbidden in (
            lambda: cache.session.evict(keys),
            lambda: cache.session.clear(keys[0][:16]),
            lambda: cache.session.move(keys, TierNumber.NVME, 1.0),
        ):
            with pytest.raises(Unauthenticated, match="needs an admin token"):
                forbidden()
        assert "leases" not in cache.session.status()
        assert cache.session.status()["nbytes"]["cpu"] > 0
        assert admin.evict(keys) == 5
        assert admin.unpin(keys) == 0
        lines = [json.loads(line) for line in remote.audit.read_text().splitlines()]
        assert [(line["who"], line["what"], line["result"][:8]) for line in lines] == [
            ("red", "Drop", "refused:"),
            ("red", "Drop", "refused:"),
            ("red", "Move", "refused:"),
            ("root", "Drop", "ok: {'bl"),
            ("root", "Pin", "ok: {}"),
        ]
        assert lines[3]["keys"] == 5
        assert lines[3]["first"] == keys[0][:8].hex()
        assert lines[0]["peer"].startswith("ipv4:127.0.0.1:")
        assert remote.audit.stat().st_mode & 0o777 == 0o600

    def test_a_salt_stays_with_a_tenant_and_keys_with_it(self, cache_of, remote):
        first, second = cache_of(remote.add("a", tenant="red")), cache_of(remote.add("b", tenant="red"))
        assert first.session.salt == second.session.salt == remote.door.register.tenants["red"].salt.hex()
        assert space_of(first).keyspace.root == space_of(second).keyspace.root
        assert space_of(first, tenant="x").keyspace.root != space_of(first).keyspace.root
        assert first.session.salt not in repr(space_of(first).keyspace) + repr(first.status())


def found_keys(session, keys):
    matched = session.match(keys, 0.0)
    session.release(matched.lease)
    return len(matched.slots)


class TestQuotas:
    def test_a_tenant_takes_no_more_of_the_cpu_tier_than_it_may(self, cache_of, remote, host):
        size = slot_nbytes(space_block(cache_of(remote.add("probe"))))
        cache = cache_of(remote.add("red", quota=Quota(cpu=3 * size)))
        other = cache_of(remote.add("blue"))
        space, kv = space_of(cache), make_kv()
        saved = space.save(TOKENS, kv).result(PATIENCE)
        assert (saved.blocks, saved.refused) == (3, "quota")
        assert cache.session.status()["nbytes"]["cpu"] == 3 * size
        assert cache.session.status()["refused"]["cpu"] > 0
        assert space_of(other).save(TOKENS, kv).result(PATIENCE).blocks == 5

    def test_old_blocks_of_the_tenant_itself_make_room(self, cache_of, remote):
        size = slot_nbytes(space_block(cache_of(remote.add("probe"))))
        cache = cache_of(remote.add("red", quota=Quota(cpu=6 * size)))
        space, kv = space_of(cache), make_kv()
        for turn in range(4):
            assert space.save(TOKENS + 1000 * turn, kv).result(PATIENCE).refused == ""
            assert cache.session.status()["nbytes"]["cpu"] <= 6 * size
            assert load(space, TOKENS + 1000 * turn)[0] == len(TOKENS)

    def test_a_tenant_takes_no_more_of_nvme_than_it_may(self, cache_of, remote, host):
        size = slot_nbytes(space_block(cache_of(remote.add("probe"))))
        red, blue = cache_of(remote.add("red", quota=Quota(nvme=3 * size))), cache_of(remote.add("blue"))
        for cache, there in ((red, 3), (blue, 5)):
            space = space_of(cache)
            space.save(TOKENS, make_kv()).result(PATIENCE)
            keys = list(space.chain(TOKENS).addresses)
            assert host.hierarchy.move(keys, TierNumber.NVME).result(PATIENCE) == there
            assert cache.session.status()["nbytes"]["nvme"] == there * size
            assert load(space)[0] == len(TOKENS), "what was not written stays where it was"
        assert host.hierarchy.status()["refused"]["nvme_quota"] == 2

    def test_pins_and_requests(self, cache_of, remote):
        size = slot_nbytes(space_block(cache_of(remote.add("probe"))))
        cache = cache_of(remote.add("red", quota=Quota(pinned=2 * size)))
        space = space_of(cache)
        space.save(TOKENS, make_kv()).result(PATIENCE)
        assert space.pin(TOKENS, ttl=60.0) == 2
        assert space.pin(TOKENS, ttl=60.0) == 2, "pinned already"
        assert cache.session.status()["pinned_nbytes"] == 2 * size
        busy = cache_of(remote.add("blue", quota=Quota(requests=5.0)))
        with pytest.raises(OverQuota, match="5 requests a second"):
            [busy.session.status() for _ in range(50)]
        assert load(space_of(busy)) is not None, "a refusal is a miss"
        assert remote.door.register.tenants["blue"].refused["requests"] > 0

    def test_quotas_are_known_to_the_status(self, remote, opened):
        admin = opened(remote.session(remote.add("root", admin=True, quota=Quota(cpu=1 << 30))))
        (tenant,) = remote.door.status()["tenants"]
        assert tenant["quota"] == {"cpu": 1 << 30, "pinned": 0, "requests": 0.0, "nvme": 0}
        assert tenant["sessions"] == 1
        assert admin.status()["sessions"] == 1

    def test_sessions_of_a_tenant_are_bounded(self, remote, opened, monkeypatch):
        monkeypatch.setattr("kvtier_services.gateway.callers.SESSIONS_AT_MOST", 2)
        token = remote.add("red")
        for _ in range(2):
            opened(remote.session(token))
        with pytest.raises(OverQuota, match="2 sessions"):
            remote.session(token)


def space_block(cache):
    return space_of(cache)._scope.headers.payload_nbytes(0)
