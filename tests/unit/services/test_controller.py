"""The controller, with functions in place of Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier_services import controller as module
from kvtier_services.controller import Controller
from kvtier_services.hosts import Host
from kvtier_services.settings import Settings

A, B = Host("a", "n1", "10.0.0.1"), Host("b", "n2", "10.0.0.2", gpus=1)


class Actors:
    def __init__(self, name: str) -> None:
        self.name = name
        self.trouble: Exception | None = None
        self.stopped = False
        self.drained = 0.0

    def ready(self, timeout):
        return self.status(timeout)

    def status(self, timeout):
        if self.trouble:
            raise self.trouble
        return {"serving": True, "fault": ""}

    def check_index(self, seconds, how):
        if self.trouble:
            raise self.trouble
        return {"seconds": seconds, "how": how}

    def drain(self, seconds, timeout):
        assert not self.stopped
        self.drained = seconds
        return {"offered": 3, "taken": 2, "handed": 2}

    def stop(self, flush_seconds, timeout):
        self.stopped = True
        return {"written": 1, "lost": 0}


class Page:
    def __init__(self) -> None:
        self.page = b""

    def read(self):
        return self.page

    def write(self, page):
        self.page = page


class Fleet:
    def __init__(self, *hosts: Host) -> None:
        self.live = list(hosts)
        self.started: list[Host] = []
        self.actors: dict[str, Actors] = {}
        self.swept: list[list[Host]] = []

    def hosts(self):
        return list(self.live)

    def sweep(self, live):
        self.swept.append(list(live))
        return 0

    def start(self, settings, host):
        self.started.append(host)
        self.actors[host.name] = Actors(host.name)
        return self.actors[host.name]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "LOOK", 0.01)


def make(fleet: Fleet, page: Page | None = None) -> Controller:
    return Controller(Settings(Config()), fleet, page or Page())


async def until(check) -> None:
    for _ in range(500):
        if check():
            return
        await asyncio.sleep(0.005)
    pytest.fail("not in time")


async def test_each_host_gets_its_actors_once():
    fleet = Fleet(A, B)
    controller = make(fleet)
    ready = await controller.ready(5.0)
    assert [(host["host"], host["node"], host["serving"]) for host in ready] == [("a", "n1", True), ("b", "n2", True)]
    await asyncio.sleep(0.1)
    assert fleet.started == [A, B]
    assert await controller.hosts() == ["a", "b"]
    await controller.stop(0.0, 1.0)


async def test_hosts_come_and_go():
    fleet = Fleet(A)
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.live.append(B)
    await until(lambda: fleet.started == [A, B])
    fleet.live.remove(A)
    for _ in range(500):
        if await controller.hosts() == ["b"]:
            break
        await asyncio.sleep(0.005)
    assert await controller.hosts() == ["b"]
    await controller.stop(0.0, 1.0)


async def test_a_host_that_came_back_as_another_node_gets_new_actors():
    fleet = Fleet(A)
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.live[:] = [Host("a", "n9", "10.0.0.1")]
    await until(lambda: len(fleet.started) == 2)
    await controller.stop(0.0, 1.0)


async def test_one_hosts_trouble_is_not_anothers():
    fleet = Fleet(A, B)
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.actors["a"].trouble = TimeoutError("no answer\nin 5 s")
    first, second = (await controller.status())["hosts"]
    assert first["fault"] == "the CPU tier's process does not answer: no answer in 5 s"
    assert second["serving"]
    await controller.stop(0.0, 1.0)


async def test_stopping_stops_all_and_starts_no_more():
    fleet = Fleet(A)
    controller = make(fleet)
    await controller.ready(5.0)
    (answer,) = await controller.stop(1.0, 1.0)
    assert (answer["host"], answer["written"]) == ("a", 1)
    fleet.live.append(B)
    await asyncio.sleep(0.05)
    assert fleet.started == [A]


async def test_a_host_that_died_is_listed_with_since_when_until_it_is_back():
    fleet = Fleet(A, B)
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.live.remove(B)
    await until(lambda: fleet.swept[-1] == [A])
    one, gone = (await controller.status())["hosts"]
    assert (one["host"], gone["host"], gone["address"], gone["serving"]) == ("a", "b", "10.0.0.2", False)
    assert gone["gone_since"] > 0
    fleet.live.append(Host("b", "n3", "10.0.0.2"))
    await until(lambda: len(fleet.started) == 3)
    assert all("gone_since" not in host for host in (await controller.status())["hosts"])
    await controller.stop(0.0, 1.0)


async def test_of_several_nodes_of_one_machine_one_has_the_actors_as_long_as_it_lives():
    fleet = Fleet(A)
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.live.insert(0, Host("a", "n0", "10.0.0.1"))
    seen = len(fleet.swept)
    await until(lambda: len(fleet.swept) > seen + 2)
    assert fleet.started == [A]
    fleet.live.remove(A)
    await until(lambda: len(fleet.started) == 2)
    assert fleet.swept[-1] == [Host("a", "n0", "10.0.0.1")]
    await controller.stop(0.0, 1.0)


async def test_a_drained_host_has_no_actors_until_undrained_whatever_restarts():
    fleet, page = Fleet(A, B), Page()
    controller = make(fleet, page)
    await controller.ready(5.0)
    answer = await controller.drain("b", 7.0, 1.0, 5.0)
    assert (answer["host"], answer["handed"], answer["written"]) == ("b", 2, 1)
    assert fleet.actors["b"].drained == 7.0
    assert fleet.actors["b"].stopped
    await controller.stop(0.0, 1.0)

    fleet.live[:] = [A, Host("b", "n9", "10.0.0.2")]
    again = make(fleet, page)
    await again.ready(5.0)
    assert await again.hosts() == ["a"]
    away = (await again.status())["hosts"][1]
    assert away["host"] == "b"
    assert away["drained_since"] > 0
    (answer,) = await again.ready(0.1, "b")
    assert answer["fault"] == "the host is drained"
    assert await again.undrain("b")
    assert await again.hosts() == ["a", "b"]
    assert not await again.undrain("b")
    await again.stop(0.0, 1.0)


async def test_who_is_to_be_drained_must_be_there():
    controller = make(Fleet(A, B))
    await controller.ready(5.0)
    with pytest.raises(ConfigError, match="no host 'c' in this fleet; name one of a, b"):
        await controller.drain("c", 1.0, 1.0, 5.0)
    await controller.stop(0.0, 1.0)


async def test_a_host_that_leaves_is_not_missed():
    fleet = Fleet(A, B)
    controller = make(fleet)
    await controller.ready(5.0)
    answer = await controller.leave("b", 1.0, 5.0)
    assert answer["written"] == 1
    seen = len(fleet.swept)
    await until(lambda: len(fleet.swept) > seen + 1)
    assert fleet.started == [A, B], "its node is about to end"
    fleet.live.remove(B)
    await until(lambda: fleet.swept[-1] == [A])
    assert [host["host"] for host in (await controller.status())["hosts"]] == ["a"]
    await controller.stop(0.0, 1.0)


async def test_a_node_that_is_told_to_end_hands_over_while_it_may():
    fleet = Fleet(A, B)
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.live[1] = replace(B, ends=time.time() + 30.0)
    await until(lambda: fleet.actors["b"].stopped)
    assert 10.0 < fleet.actors["b"].drained < 30.0
    seen = len(fleet.swept)
    await until(lambda: len(fleet.swept) > seen + 2)
    assert await controller.hosts() == ["a"], "its node lives for a while yet, and gets no actors"
    fleet.live.pop()
    await until(lambda: fleet.swept[-1] == [A])
    assert [host["host"] for host in (await controller.status())["hosts"]] == ["a"], "nobody misses it"
    await controller.stop(0.0, 1.0)


async def test_a_host_that_comes_later_is_waited_for():
    fleet = Fleet(A)
    controller = make(fleet)
    waiting = asyncio.create_task(controller.ready(5.0, "b"))
    await asyncio.sleep(0.05)
    fleet.live.append(B)
    (answer,) = await waiting
    assert (answer["host"], answer["serving"]) == ("b", True)
    await controller.stop(0.0, 1.0)


async def test_a_ray_that_hangs_holds_up_nobody_who_asks(monkeypatch, caplog):
    monkeypatch.setattr(module, "LOOK_TIMEOUT", 0.3)
    fleet = Fleet(A)
    controller = make(fleet)
    await controller.ready(5.0)
    hanging, hosts = threading.Event(), fleet.hosts
    monkeypatch.setattr(fleet, "hosts", lambda: hanging.wait(5.0) and hosts())
    await until(lambda: "Ray did not answer in 0.3 s" in caplog.text)
    assert (await controller.status())["hosts"][0]["serving"]
    hanging.set()
    fleet.live.append(B)
    await until(lambda: B in fleet.started)
    await controller.stop(0.0, 1.0)


async def test_a_ray_that_fails_once_is_asked_again(caplog, monkeypatch):
    fleet = Fleet(A)
    hosts, failures = fleet.hosts, [ConnectionError("GCS away")]

    def unsure():
        if failures:
            raise failures.pop()
        return hosts()

    monkeypatch.setattr(fleet, "hosts", unsure)
    controller = make(fleet)
    await until(lambda: fleet.started == [A])
    assert "GCS away" in caplog.text
    await controller.stop(0.0, 1.0)


async def test_hosts_compare_themselves_with_the_index_in_turn_and_share_the_time():
    fleet = Fleet(A, B)
    controller = make(fleet)
    await controller.ready(5.0)
    first, second = await controller.check_index(10.0, "repair")
    assert (first["host"], second["host"], second["how"]) == ("a", "b", "repair")
    assert 4.0 < first["seconds"] <= 5.0
    assert 9.0 < second["seconds"] <= 10.0
    fleet.actors["a"].trouble = TimeoutError("hangs")
    assert ["fault" in answer for answer in await controller.check_index(10.0, "check")] == [True, False]


async def test_hosts_that_do_not_answer_take_no_time_of_those_that_compare_themselves():
    fleet = Fleet(*(Host(name, f"n-{name}", "") for name in "abcd"))
    controller = make(fleet)
    await controller.ready(5.0)
    compared = []
    for name, actors in fleet.actors.items():
        actors.check_index = lambda seconds, how, name=name: compared.append((name, seconds)) or {"how": how}
    for name in "abc":
        fleet.actors[name].trouble = TimeoutError("hangs")
    answers = await controller.check_index(10.0, "check")
    assert [(answer["host"], "fault" in answer) for answer in answers] == [
        ("a", True), ("b", True), ("c", True), ("d", False),
    ]  # fmt: skip
    assert compared == [("d", pytest.approx(10.0, abs=0.5))]
    await controller.stop(0.0, 1.0)


async def test_hosts_whose_turn_comes_too_late_are_named_and_not_asked():
    fleet, gate = Fleet(A, B), threading.Event()
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.actors["a"].check_index = lambda seconds, how: {"late": not gate.wait(2 * seconds + 0.1)}
    first, second = await controller.check_index(0.1, "check")
    assert first["late"]
    assert second == {"host": "b", "fault": "the time was over before its turn: give it more --seconds"}
    await controller.stop(0.0, 1.0)


class Shown:
    def __init__(self, snapshot, fault: str) -> None:
        self.snapshot, self.fault, self.url, self.closed = snapshot, fault, "" if fault else "http://page", False

    def close(self):
        self.closed = True


async def test_the_page_gets_snapshots_and_is_opened_until_it_can_be():
    faults, opened = iter(["port taken", ""]), []

    def page(snapshot):
        opened.append(Shown(snapshot, next(faults)))
        return opened[-1]

    controller = Controller(Settings(Config()), Fleet(A), Page(), about=lambda: {"started": 7.0}, page=page)
    assert await controller.page() == {"url": "", "fault": "port taken"}
    await until(lambda: len(opened) == 2)
    assert await controller.page() == {"url": "http://page", "fault": ""}
    await controller.ready(5.0)
    seen = await asyncio.to_thread(opened[-1].snapshot)
    assert (seen["schema"], seen["started"], seen["page"]["url"]) == (1, 7.0, "http://page")
    assert [(host["host"], host["health"]) for host in seen["hosts"]] == [("a", "ok")]
    now = await controller.status()
    assert {name: value for name, value in now.items() if name != "taken"} == {
        name: value for name, value in seen.items() if name != "taken"
    }
    await controller.stop(0.0, 1.0)
    assert opened[-1].closed


async def test_a_page_that_waits_for_a_host_holds_up_no_end():
    """As a page does that is taking a snapshot: whoever closes it waits for that, and so for a host that hangs."""
    fleet, gate, opened = Fleet(A, B), threading.Event(), []

    def page(snapshot):
        opened.append(Shown(snapshot, ""))
        opened[-1].close = partial(gate.wait, 30.0)
        return opened[-1]

    controller = Controller(Settings(Config()), fleet, Page(), page=page)
    await controller.ready(5.0)
    await until(lambda: opened)
    ending = asyncio.create_task(controller.stop(0.0, 1.0))
    try:
        await until(lambda: all(actors.stopped for actors in fleet.actors.values()))
        assert not ending.done()
    finally:
        gate.set()
    assert [answer["written"] for answer in await ending] == [1, 1]


async def test_a_page_that_fails_to_open_holds_up_nothing():
    def page(_snapshot):
        raise RuntimeError("no such thing")

    fleet = Fleet(A)
    controller = Controller(Settings(Config()), fleet, Page(), page=page)
    assert await controller.page() == {"url": "", "fault": ""}
    await until(lambda: fleet.started == [A])
    await controller.stop(0.0, 1.0)


async def test_a_fault_of_the_page_is_logged_once(caplog):
    opened = []

    def page(snapshot):
        opened.append(Shown(snapshot, "port taken"))
        return opened[-1]

    controller = Controller(Settings(Config()), Fleet(A), Page(), page=page)
    await until(lambda: len(opened) > 3)
    await controller.stop(0.0, 1.0)
    assert [record.message for record in caplog.records].count("port taken") == 1


async def test_snapshots_that_are_not_answered_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(module, "STATUS_TIMEOUT", 0.02)
    gate, opened = threading.Event(), []

    def page(snapshot):
        opened.append(Shown(snapshot, ""))
        return opened[-1]

    controller = Controller(Settings(Config()), Fleet(A), Page(), about=lambda: {"held": gate.wait(20)}, page=page)
    await until(lambda: opened)
    before = len(asyncio.all_tasks())
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"did not answer in 0\.04 s"):
            await asyncio.to_thread(opened[0].snapshot)
    await until(lambda: len(asyncio.all_tasks()) <= before)
    gate.set()
    await controller.stop(0.0, 1.0)


async def test_hosts_that_do_not_answer_keep_nobody_waiting():
    """Neither those that are asked beside them, nor those who ask, however many there are of both."""
    fleet = Fleet(*(Host(f"h{i:03}", f"n{i}", "") for i in range(200)))
    controller = make(fleet)
    assert len(await controller.ready(20.0)) == 200
    well, gate, waiting, answered = "h007", threading.Event(), [], []

    def status(name, _timeout):
        (answered if name == well else waiting).append(name)
        if name != well and not gate.wait(30.0):
            raise TimeoutError("nothing came")
        return {"serving": True, "fault": ""}

    for name, actors in fleet.actors.items():
        actors.status = partial(status, name)
    try:
        asked = [asyncio.create_task(controller.status()) for _ in range(6)]
        await until(lambda: (len(waiting), len(answered)) == (6 * 199, 6))
        assert not any(one.done() for one in asked)
        assert [one["host"] for one in await asyncio.wait_for(controller.ready(5.0, well), 10.0)] == [well]
        assert len(await asyncio.wait_for(controller.stop(0.0, 1.0), 10.0)) == 200
        assert all(actors.stopped for actors in fleet.actors.values())
    finally:
        gate.set()  # else their threads outlive a test that fails, and the process waits for them
    for snapshot in await asyncio.gather(*asked):
        assert [host["host"] for host in snapshot["hosts"]] == sorted(fleet.actors)
    await until(lambda: not any(thread.name.startswith("kvtier-ask") for thread in threading.enumerate()))


async def test_a_snapshot_that_nobody_waits_for_leaves_no_thread():
    fleet, gate = Fleet(A, B), threading.Event()
    controller = make(fleet)
    await controller.ready(5.0)
    fleet.actors["a"].status = lambda _timeout: {"serving": gate.wait(30.0)}
    asked = asyncio.create_task(controller.status())

    def asking() -> bool:
        return any(thread.name.startswith("kvtier-ask") for thread in threading.enumerate())

    try:
        await until(asking)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert len(await controller.stop(0.0, 1.0)) == 2
    finally:
        gate.set()
    await until(lambda: not asking())
