"""Following a host: nothing is missed unnoticed, whoever is slow, restarted or killed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import time
from contextlib import ExitStack, closing, contextmanager

import msgspec
import pytest
import zmq

from kvtier.block import BlockHeader
from kvtier.client.local import LocalSession
from kvtier.config import EventsConfig
from kvtier.errors import ConfigError, ProtocolMismatch
from kvtier.events import Subscriber, View
from kvtier.events.asking import END, numbered
from kvtier.events.publisher import Publisher, next_to
from kvtier.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, decode
from kvtier.testing.payloads import payload_of
from kvtier.testing.session import eventually
from kvtier.tiers.base import TierNumber
from kvtier_services.settings import host_name
from tests.events_child import Publishing
from tests.hierarchy_fixture import NBYTES, Host, keys, save
from tests.unit.services.host import FakeDoor, make_actor, settings_in

ANYWHERE = "tcp://127.0.0.1:0"


@contextmanager
def publisher_of(host: Host, **options):
    with closing(Publisher(host.state, ANYWHERE, node="box", **options)) as publisher:
        assert not publisher.fault
        yield publisher


def follow(publisher: Publisher, **options) -> Subscriber:
    where = publisher.status()
    return Subscriber(where["endpoint"], where["replay_endpoint"], **{"check": 0.1, "patience": 1.0, **options})


def drain(subscriber: Subscriber, view: View, until) -> list:
    """Apply batches until something holds; all of them."""
    batches, deadline = [], time.monotonic() + 10.0
    while not until():
        assert time.monotonic() < deadline, f"it never came; {subscriber.fault or batches[-3:]}"
        batch = subscriber.receive(0.1)
        if batch is not None:
            batches.append(batch)
            view.apply(batch)
    return batches


def has(view: View, seeds) -> bool:
    return {seed for seed in range(100) if view.tiers(keys([seed])[0])} == set(seeds)


@pytest.fixture
def host():
    with Host() as host:
        yield host


def test_a_view_is_what_the_host_has(host):
    session = host.session()
    save(session, range(3))
    with publisher_of(host) as publisher, follow(publisher) as subscriber:
        view = View()
        batches = drain(subscriber, view, lambda: has(view, range(3)))
        assert batches[0].fresh
        save(session, range(5))
        drain(subscriber, view, lambda: has(view, range(5)))
        host.hierarchy.move(keys(range(5)), TierNumber.NVME).result(5.0)
        drain(subscriber, view, lambda: view.tiers(keys([4])[0]) == ("nvme",))
        session.evict(keys([3, 4]))
        drain(subscriber, view, lambda: has(view, range(3)))
        assert subscriber.whole


def test_events_name_the_node_the_tier_and_the_parent(host):
    with publisher_of(host) as publisher, follow(publisher, dump=False) as subscriber:
        session, events = host.session(), []
        assert subscriber.receive(0.2) is None
        save(session, range(2))
        save(session, range(3))
        while len(events) < 2:
            events += subscriber.receive(5.0).events
        first, second = events
        assert isinstance(first, BlockStored)
        assert (first.node, first.tier, first.medium) == ("box", "cpu", "CPU")
        assert (first.block_hashes, first.parent_block_hash) == (keys(range(2)), None)
        assert (second.block_hashes, second.parent_block_hash) == (keys([2]), keys([1])[0])


def test_clearing_a_keyspace_removes_its_blocks_one_by_one(host):
    session = host.session()
    save(session, range(3))
    with publisher_of(host) as publisher, follow(publisher) as subscriber:
        view = View()
        drain(subscriber, view, lambda: has(view, range(3)))
        assert session.clear(BlockHeader.unpack(payload_of(2, NBYTES)).space) == 1
        events = [event for batch in drain(subscriber, view, lambda: has(view, (0, 1))) for event in batch.events]
        assert events == [BlockRemoved(keys([2]), "CPU", "LOCAL", "box", "cpu")]


def test_who_was_away_gets_what_he_missed(host):
    session, view = host.session(), View()
    with publisher_of(host) as publisher:
        with follow(publisher) as subscriber:
            drain(subscriber, view, lambda: subscriber.whole)
        last = publisher.status()["last"]
        for seed in range(4):
            save(session, range(seed + 1))
            assert eventually(lambda n=seed: publisher.status()["last"] == last + n + 1)
        with follow(publisher, since=last + 1) as subscriber:
            batches = drain(subscriber, view, lambda: has(view, range(4)))
            assert [batch.seq for batch in batches] == list(range(last + 1, last + 5))
            assert not any(batch.fresh or batch.missed for batch in batches)


def test_who_missed_more_than_one_answer_holds_asks_again(host, monkeypatch):
    monkeypatch.setattr("kvtier.events.publisher.REPLAY", 2)
    monkeypatch.setattr("kvtier.events.subscriber.MANY", 2)
    session, view = host.session(), View()
    with publisher_of(host) as publisher:
        last = publisher.status()["last"]
        for seed in range(5):
            save(session, range(seed + 1))
            assert eventually(lambda n=seed: publisher.status()["last"] > last + n)
        with follow(publisher, since=last + 1, check=60.0) as subscriber:
            batches = drain(subscriber, view, lambda: has(view, range(5)))
            assert [batch.seq for batch in batches] == list(range(last + 1, last + 6))
            assert not any(batch.fresh or batch.missed for batch in batches)


def test_who_was_away_too_long_gets_a_dump(host):
    session, view = host.session(), View()
    with publisher_of(host, buffer=2) as publisher:
        last = publisher.status()["last"]
        for seed in range(5):
            save(session, range(seed + 1))
            assert eventually(lambda n=seed: publisher.status()["last"] > last + n)
        with follow(publisher, since=last + 1) as subscriber:
            batches = drain(subscriber, view, lambda: has(view, range(5)))
            assert batches[0].fresh
        with follow(publisher, since=last + 1, dump=False) as subscriber:
            batch = subscriber.receive(5.0)
            assert batch.missed == batch.seq - last - 1 > 0


def test_a_slow_subscriber_is_told_and_becomes_right_again(host):
    """It stops reading until both its queue and the ring are long past; what it sees then is no wrong view."""
    session, view = host.session(), View()
    save(session, range(10))
    with publisher_of(host, buffer=4) as publisher, follow(publisher) as subscriber:
        drain(subscriber, view, lambda: has(view, range(10)))
        subscriber._in.close(linger=0)  # as if all of its queue had been dropped
        subscriber._in = subscriber._context.socket(zmq.SUB)
        for _ in range(8):
            session.evict(keys([9]))
            save(session, range(10))
            time.sleep(0.06)
        session.evict(keys([8, 9]))
        subscriber._in.subscribe("")
        subscriber._in.connect(publisher.status()["endpoint"])
        batches = drain(subscriber, view, lambda: has(view, range(8)))
        assert any(batch.fresh for batch in batches)
        assert publisher.status()["dumps"] == 2


def test_more_changes_than_may_wait_are_a_gap_and_a_dump(host):
    session, view = host.session(), View()
    with publisher_of(host) as publisher, follow(publisher) as subscriber:
        drain(subscriber, view, lambda: subscriber.whole)
        publisher._news._most = 3
        save(session, range(9))
        batches = drain(subscriber, view, lambda: has(view, range(9)))
        assert any(batch.fresh for batch in batches)
        assert publisher.status()["lost"] == 1


def test_the_last_batch_is_not_lost_when_nothing_follows_it(host):
    session, view = host.session(), View()
    with publisher_of(host) as publisher, follow(publisher) as subscriber:
        drain(subscriber, view, lambda: subscriber.whole)
        subscriber._in.unsubscribe("")
        time.sleep(0.2)
        save(session, range(2))
        drain(subscriber, view, lambda: has(view, range(2)))


def test_a_dump_is_right_while_the_host_goes_on(host):
    """Parts are taken one by one; meanwhile blocks come and go in those that were taken and in those that were not."""
    session, view = host.session(), View()
    save(session, range(20))
    with publisher_of(host) as publisher:
        from kvtier.events import publisher as module

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PART", 4)
            with follow(publisher) as subscriber:
                for _ in range(3):
                    view.apply(subscriber.receive(5.0))
                session.evict(keys(range(15, 20)))
                session.evict(keys([2]))
                save(session, range(30, 36))
                drain(subscriber, view, lambda: has(view, {*range(15), *range(30, 36)} - {2}))


def test_an_orderly_end_says_that_nothing_is_there(host):
    view = View()
    save(host.session(), range(2))
    with ExitStack() as stack:
        with publisher_of(host) as publisher:
            subscriber = stack.enter_context(follow(publisher))
            drain(subscriber, view, lambda: has(view, range(2)))
        batch = subscriber.receive(5.0)
        assert batch.events == (AllBlocksCleared("box"),)
        assert host.state.news is None
        save(host.session(), range(3))
        assert subscriber.receive(0.3) is None
        assert "nobody answers" in subscriber.fault


def test_a_host_that_was_killed_is_followed_again_from_a_dump():
    with ExitStack() as stack:
        child = stack.enter_context(closing(Publishing(first=0, count=3)))
        view, subscriber = View(), Subscriber(child.endpoint, child.replay_endpoint, check=0.1, patience=0.5)
        stack.callback(subscriber.close)
        drain(subscriber, view, lambda: has(view, range(3)))
        os.kill(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        while not subscriber.fault:
            assert time.monotonic() < deadline
            subscriber.receive(0.1)
        assert has(view, range(3)), "what was known stays until something else is"
        again = stack.enter_context(closing(Publishing(first=50, count=2, at=child.endpoint)))
        assert again.endpoint == child.endpoint
        batches = drain(subscriber, view, lambda: has(view, (50, 51)))
        assert batches[0].fresh
        assert subscriber.fault == ""


def test_a_clock_that_was_set_back_does_not_hide_a_restart(host):
    session, view = host.session(), View()
    save(session, range(2))
    with ExitStack() as stack:
        with publisher_of(host) as publisher:
            where = publisher.status()
            subscriber = stack.enter_context(follow(publisher))
            drain(subscriber, view, lambda: has(view, range(2)))
            save(session, range(3))
            drain(subscriber, view, lambda: has(view, range(3)))
        earlier = Publisher(
            host.state, where["endpoint"], replay_endpoint=where["replay_endpoint"], clock=lambda: time.time() - 3600
        )
        stack.callback(earlier.close)
        session.evict(keys([2]))
        session.evict(keys([1]))
        save(session, [60])
        drain(subscriber, view, lambda: has(view, (0, 60)))


def test_a_subscriber_as_vllms_own_reads_stream_and_replay(host):
    """Frames as that publisher has them: topic, number, payload; and of the replay, behind an empty one."""
    with publisher_of(host, topic="kv@box") as publisher, zmq.Context() as context:
        where = publisher.status()
        with context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as replay:
            live.subscribe("kv@")
            live.connect(where["endpoint"])
            replay.connect(where["replay_endpoint"])
            session = host.session()
            assert eventually(lambda: save(session, [98]) == 0 and live.poll(50))
            topic, number, payload = live.recv_multipart()
            if decode(payload).events == [AllBlocksCleared("box")]:  # it had subscribed by the publisher's start
                assert live.poll(5000)
                topic, number, payload = live.recv_multipart()
            assert (topic, len(number)) == (b"kv@box", 8)
            assert decode(payload).events[0].block_hashes == keys([98])
            replay.send_multipart((b"", numbered(where["last"])))
            answers = []
            while not answers or answers[-1][2] != END:
                assert replay.poll(5000)
                answers.append(replay.recv_multipart())
            assert all(len(answer) == 4 and answer[0] == b"" for answer in answers)
            assert answers[-2][1:] == [topic, number, payload]
            assert answers[-1] == [b"", b"", END, b""]


def test_junk_for_the_replay_socket_disturbs_nobody(host):
    with publisher_of(host) as publisher, zmq.Context() as context:
        where = publisher.status()["replay_endpoint"]
        for frames in ([b""], [b"", b""], [b"", b"dump" + b"\xff" * 16], [b"", b"dumpx"], [b"x", b"y", b"z"] * 9):
            with context.socket(zmq.DEALER) as one:
                one.linger = 100
                one.connect(where)
                one.send_multipart(frames)
        with context.socket(zmq.DEALER) as large:
            large.linger = 100
            large.connect(where)
            large.send_multipart((b"", b"x" * (1 << 20)))
        with socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2]))) as raw:
            raw.sendall(os.urandom(4096))
        save(host.session(), range(3))
        with follow(publisher) as subscriber:
            view = View()
            drain(subscriber, view, lambda: has(view, range(3)))
        assert publisher.status()["errors"] == 0


def test_what_publishes_something_else_is_said():
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with Subscriber(f"tcp://127.0.0.1:{port}", since=1, patience=0.05) as subscriber:

            def hear() -> bool:
                other.send(b"weather: fine")
                return subscriber.receive(0.01) is not None

            with pytest.raises(ProtocolMismatch):
                eventually(hear)


def test_a_port_that_is_taken_costs_the_events_only(host):
    with publisher_of(host) as one:
        taken = one.status()["endpoint"]
        two = Publisher(host.state, taken)
        assert "Address already in use" in two.fault
        assert taken in two.status()["fault"]
        two.close()
        save(host.session(), range(2))
        assert eventually(lambda: one.status()["blocks"] == 2)


@pytest.mark.parametrize(
    ("endpoint", "following"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://*:5557", "tcp://*:5558"),
        ("tcp://[::]:5557", "tcp://[::]:5558"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0"),
        ("ipc:///run/kv", "ipc:///run/kv.replay"),
    ],
)
def test_the_replay_socket_is_next_to_the_other(endpoint, following):
    assert next_to(endpoint) == following


@pytest.mark.parametrize("endpoint", ["", "localhost", "tcp://host", "tcp://:1", "udp://h:1", "ipc://", "tcp://h:x"])
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigError, match="no endpoint"):
        next_to(endpoint)


async def test_a_host_publishes_when_it_shall_and_says_so(tmp_path):
    settings = settings_in(tmp_path)
    endpoint = f"ipc://{tmp_path}/events"
    events = EventsConfig(endpoint=endpoint, topic="kv@{host}")
    actor = make_actor(
        dataclasses.replace(settings, config=msgspec.structs.replace(settings.config, events=events)), FakeDoor()
    )
    status = (await actor.ready(10.0))["hierarchy"]["events"]
    assert (status["endpoint"], status["replay_endpoint"]) == (endpoint, f"{endpoint}.replay")
    assert (status["fault"], status["topic"]) == ("", f"kv@{host_name()}")
    session = LocalSession(actor._hierarchy)
    with Subscriber(endpoint, check=0.1) as subscriber:
        view = View()
        save(session, range(2))
        await asyncio.to_thread(drain, subscriber, view, lambda: has(view, range(2)))
        session.close()
        await actor.stop(0.1)
        await asyncio.to_thread(drain, subscriber, view, lambda: len(view) == 0)


async def test_hosts_of_one_machine_have_an_endpoint_each(tmp_path, monkeypatch):
    events = EventsConfig(endpoint=f"ipc://{tmp_path}/ev-{{host}}")
    for name in ("alpha", "beta"):
        monkeypatch.setenv("KVTIER_HOST", name)
        settings = settings_in(tmp_path / name)
        config = msgspec.structs.replace(settings.config, events=events)
        actor = make_actor(dataclasses.replace(settings, config=config), FakeDoor())
        assert (await actor.ready(10.0))["hierarchy"]["events"]["endpoint"] == f"ipc://{tmp_path}/ev-{name}"
        await actor.stop(0.1)


def test_an_endpoint_of_somebody_else_is_not_taken_away_from_him(tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    one, other = Host(), Host()
    with (
        closing(Publisher(one.state, endpoint, node="one")) as first,
        closing(Publisher(other.state, endpoint, node="other")) as second,
    ):
        assert "set events.endpoint to a free one" in second.fault
        assert first.fault == ""
        with Subscriber(endpoint, check=0.1) as subscriber:
            batch = subscriber.receive(5.0)
            assert batch is not None
            assert subscriber.fault == ""


async def test_a_host_without_an_endpoint_collects_nothing(tmp_path):
    actor = make_actor(settings_in(tmp_path), FakeDoor())
    assert (await actor.ready(10.0))["hierarchy"]["events"] is None
    assert actor._hierarchy.state.news is None
    await actor.stop(0.1)
