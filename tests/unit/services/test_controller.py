"""The controller, with functions in place of Ray."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.config import Config
from kvtier_services import controller as module
from kvtier_services.controller import Controller, Host
from kvtier_services.settings import Settings

A, B = Host("a", "n1", "10.0.0.1"), Host("b", "n2", "10.0.0.2", gpus=1)


class Actors:
    def __init__(self, name: str) -> None:
        self.name = name
        self.trouble: Exception | None = None
        self.stopped = False

    def ready(self, timeout):
        return self.status(timeout)

    def status(self, timeout):
        if self.trouble:
            raise self.trouble
        return {"serving": True, "fault": ""}

    def stop(self, flush_seconds, timeout):
        self.stopped = True
        return {"written": 1, "lost": 0}


class Fleet:
    def __init__(self, *hosts: Host) -> None:
        self.live = list(hosts)
        self.started: list[Host] = []
        self.actors: dict[str, Actors] = {}

    def hosts(self):
        return self.live

    def start(self, settings, host):
        self.started.append(host)
        self.actors[host.name] = Actors(host.name)
        return self.actors[host.name]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "LOOK", 0.01)


def make(fleet: Fleet) -> Controller:
    return Controller(Settings(Config()), fleet.hosts, fleet.start)


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


async def test_a_ray_that_fails_once_is_asked_again(caplog):
    fleet = Fleet(A)
    hosts, failures = fleet.hosts, [ConnectionError("GCS away")]

    def unsure():
        if failures:
            raise failures.pop()
        return hosts()

    controller = Controller(Settings(Config()), unsure, fleet.start)
    await until(lambda: fleet.started == [A])
    assert "GCS away" in caplog.text
    await controller.stop(0.0, 1.0)
