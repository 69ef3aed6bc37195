"""A router follows a host through the death of its process, with nothing but the command line's own kvtier."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from kvtier.client.door import DoorSession
from kvtier.events import Subscriber, View
from kvtier.testing.session import chain, save
from kvtier.tiers.base import TierNumber
from tests.cluster.kit import cluster_in_temporary_folders, within

pytestmark = pytest.mark.slow


def follow(subscriber: Subscriber, view: View, until, seconds: float = 60.0) -> list:
    batches, deadline = [], time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"it never came: {subscriber.fault}"
        batch = subscriber.receive(0.2)
        if batch is not None:
            batches.append(batch)
            view.apply(batch)
    return batches


def test_a_router_follows_a_host_through_the_death_of_its_process():
    with cluster_in_temporary_folders() as cluster:
        endpoint = f"ipc://{cluster.run_dir}/events"
        with cluster.config.open("a") as file:
            file.write(f'[events]\nendpoint = "{endpoint}"\n')
        cluster.cli("up")
        session, view = DoorSession(cluster.socket, call_timeout=5.0), View()
        with Subscriber(endpoint, check=0.2, patience=1.0) as subscriber:
            assert save(session, 0, 6) == 6
            assert session.move(chain(0, 4), TierNumber.NVME, 10.0) == 4
            follow(subscriber, view, lambda: view.prefix(chain(0, 6)) == 6)
            follow(subscriber, view, lambda: view.tiers(chain(0, 1)[0]) == ("nvme",))
            (place,) = session.where(chain(0, 8)).places
            assert (place.blocks, place.tiers) == (6, {"nvme": 4, "cpu": 2})

            os.kill(cluster.host()["pid"], signal.SIGKILL)
            batches = follow(subscriber, view, lambda: view.prefix(chain(0, 6)) == 4)
            assert any(batch.fresh for batch in batches), "what was in memory is gone, what is on NVMe was told anew"
            assert within(30.0, lambda: subscriber.receive(0.2) is None and not subscriber.fault)
        lines = [json.loads(line) for line in cluster.cli("events", "--dump", "--json").splitlines()]
        told = {block for line in lines[1:] for block in line["block_hashes"]}
        assert told == {key.hex() for key in chain(0, 4)}
        assert {(line["node"], line["tier"]) for line in lines[1:]} == {(place.host, "nvme")}
        assert cluster.host()["hierarchy"]["events"]["endpoint"] == endpoint
        session.close()
