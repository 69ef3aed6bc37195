"""Every session passes the kit."""

from __future__ import annotations

import pytest

from kvtier.client.door import DoorSession
from kvtier.client.local import LocalSession
from kvtier.memory.arena import Arena
from kvtier.testing.device import DeviceKit, gpu_host
from kvtier.testing.retention import RetentionKit
from kvtier.testing.session import CAPACITY, SessionKit, host_over
from kvtier_services.gateway.control import writer_gone
from kvtier_services.gateway.remote import Listen
from kvtier_services.gateway.tls import Certificate
from tests.door_fixture import door_in_thread, folders
from tests.remote_fixture import Authority, remote_door


class TestLocalSession(SessionKit, RetentionKit):
    @pytest.fixture
    def host(self):
        with host_over(Arena.private(CAPACITY)) as host:
            yield host

    @pytest.fixture
    def open_session(self, host):
        opened = []

        def open_session():
            opened.append(LocalSession(host.hierarchy))
            return opened[-1]

        yield open_session
        for session in opened:
            session.close()


class TestDoorSession(SessionKit, RetentionKit):
    @pytest.fixture
    def place(self):
        with folders() as place:
            yield place

    @pytest.fixture
    def host(self, place):
        arena = Arena.own(place[1], CAPACITY)
        with host_over(arena, writer_gone(place[1])) as host:
            yield host
        arena.close()

    @pytest.fixture
    def open_session(self, host, place):
        opened = []

        def open_session():
            opened.append(DoorSession(place[0]))
            return opened[-1]

        with door_in_thread(host.hierarchy, place[0]):
            yield open_session
            for session in opened:
                session.close()


class TestRemoteSession(SessionKit, RetentionKit):
    """With an admin token: the kit moves and evicts, and its blocks are of as many keyspaces."""

    @pytest.fixture(params=["plain", "tls"])
    def remote(self, host, tmp_path, request):
        listen = None
        if request.param == "tls":
            listen = Listen("127.0.0.1", 0, certificate=Certificate(*Authority(tmp_path).issue("host")))
        with remote_door(host.hierarchy, tmp_path, listen) as remote:
            yield remote

    @pytest.fixture
    def host(self):
        with host_over(Arena.private(CAPACITY)) as host:
            yield host

    @pytest.fixture
    def open_session(self, remote):
        opened, token = [], remote.add("kit", admin=True)

        def open_session():
            opened.append(remote.session(token, call_timeout=5.0))
            return opened[-1]

        yield open_session
        for session in opened:
            session.close()


class TestLocalSessionWithGpu(DeviceKit):
    @pytest.fixture
    def host(self):
        with gpu_host(Arena.private(CAPACITY)) as host:
            yield host

    open_session = TestLocalSession.open_session


class TestDoorSessionWithGpu(DeviceKit):
    place = TestDoorSession.place

    @pytest.fixture
    def host(self, place):
        arena = Arena.own(place[1], CAPACITY)
        with gpu_host(arena) as host:
            yield host
        arena.close()

    open_session = TestDoorSession.open_session
