"""Where there are other hosts, and where not."""

from __future__ import annotations

import pytest

from kvtier.config import Config, FleetConfig, RayConfig
from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena
from kvtier_services.actors import peers
from kvtier_services.actors.peers import open_peers
from kvtier_services.settings import Secret, Settings

FLEET = {"ray": RayConfig(host="10.0.0.1")}
REDIS, SECRET = "redis://10.0.0.1:6379", Secret("sixteen bytes or more")


@pytest.mark.parametrize(
    "settings",
    [
        Settings(Config(), REDIS, fleet_secret=SECRET),
        Settings(Config(**FLEET), "local", fleet_secret=SECRET),
        Settings(Config(**FLEET), REDIS),
        Settings(Config(**FLEET, fleet=FleetConfig(peers=False)), REDIS, fleet_secret=SECRET),
    ],
    ids=["a Ray of its own", "no index", "no secret", "not wanted"],
)
def test_a_host_that_is_alone_does_not_listen(settings, monkeypatch):
    monkeypatch.setattr(peers, "PeerServer", lambda *_, **__: pytest.fail("it listens"))
    assert open_peers(Arena.private(1 << 20), settings, "10.0.0.2") is None


def test_who_cannot_listen_fetches_all_the_same(monkeypatch):
    def taken(*_: object, **__: object) -> None:
        raise ConfigError("the port is taken")

    monkeypatch.setattr(peers, "PeerServer", taken)
    settings = Settings(Config(**FLEET), REDIS, fleet_secret=SECRET)
    found = peers.Peers(Arena.private(1 << 20), settings, "10.0.0.2", patience=-1.0)
    assert (found.door, found.status()["fault"]) == ("", "the port is taken")
    assert found.tier.contains([b"k" * 34]) == [False]
    found.close()
    found.tier.close()


def test_other_hosts_are_told_an_address_that_they_can_take_apart(monkeypatch):
    class Server:
        def __init__(self, _lender, _arena, listen, _secret, *, tls) -> None:
            self.address = (listen[0], 7071)

        def close(self) -> None:
            pass

    monkeypatch.setattr(peers, "PeerServer", Server)
    for config, address in ((FleetConfig(), "10.0.0.2"), (FleetConfig(address="fd00::2"), "[fd00::2]")):
        settings = Settings(Config(**FLEET, fleet=config), REDIS, fleet_secret=SECRET)
        found = open_peers(Arena.private(1 << 20), settings, "10.0.0.2")
        assert found.door == f"{address}:7071"
        found.tier.close()
