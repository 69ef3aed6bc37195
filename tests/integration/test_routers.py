"""`kvtier where` and `kvtier events` against a host that runs."""

from __future__ import annotations

import json
import sys
from contextlib import closing

import pytest
from typer.testing import CliRunner

from kvtier.client.description import Description
from kvtier.client.local import LocalSession
from kvtier.events.publisher import Publisher
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, chain, host_over, save
from kvtier_services import cli
from tests.door_fixture import door_in_thread, folders


@pytest.fixture
def place():
    with folders() as place:
        yield place


@pytest.fixture
def host(place):
    arena = Arena.own(place[1], CAPACITY)
    with host_over(arena) as host, door_in_thread(host.hierarchy, place[0]):
        yield host
    arena.close()


@pytest.fixture
def session(host):
    with closing(LocalSession(host.hierarchy)) as session:
        yield session


@pytest.fixture
def kvtier(place, tmp_path, monkeypatch, capsys):
    """Exit code and lines, of a command against that host."""
    (tmp_path / "kvtier.toml").write_text(f'run_dir = "{place[0].parent}"\n')
    monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "kvtier.toml"))

    def run(*args: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["kvtier", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return run


@pytest.fixture
def keyspace(tmp_path, monkeypatch):
    """A file that describes a keyspace whose blocks are the kit's: block n has the token n."""
    monkeypatch.setattr(Description, "addresses", lambda _, tokens: [chain(token, 1)[0] for token in tokens])
    Description("m", "1", "raw", "", 0, 1, "00" * 32).write(tmp_path / "k.json")
    return str(tmp_path / "k.json")


def test_where_a_prompt_is(kvtier, host, session, keyspace):
    save(session, 0, 3)
    code, lines = kvtier("where", "0,1,2,3", "--keyspace", keyspace)
    assert code == 0
    assert lines[0].endswith("3 of 4 tokens  blocks: 3 cpu  (this host)")
    code, (answer,) = kvtier("where", "0 1 2 3", "--keyspace", keyspace, "--json")
    (place,) = json.loads(answer)["places"]
    assert (place["tokens"], place["here"], place["tiers"]) == (3, True, {"cpu": 3})
    assert json.loads(answer)["complete"] is True
    assert kvtier("where", "7", "--keyspace", keyspace) == (0, ["no host has anything of it"])


def test_where_without_a_host_is_one_line(kvtier, keyspace):
    code, (line,) = kvtier("where", "1", "--keyspace", keyspace)
    assert code == 1
    assert "kvtier up" in line


def test_events_are_printed(kvtier, host, session):
    save(session, 0, 3)
    with closing(Publisher(host.hierarchy.state, "tcp://127.0.0.1:0", node="box")) as publisher:
        code, lines = kvtier("events", "--dump")
        assert code == 0
        assert "+3 from" in lines[1]
        assert "box  cpu" in lines[1]
        code, lines = kvtier("events", "--dump", "--json")
        head, *told = map(json.loads, lines)
        assert head["fresh"] is True
        assert [hash_ for one in told for hash_ in one["block_hashes"]] == [key.hex() for key in chain(0, 3)]
        assert {one["node"] for one in told} == {"box"}
        assert head["seq"] == publisher.status()["last"]


def test_events_where_nobody_publishes_is_one_line(kvtier, host):
    code, (line,) = kvtier("events")
    assert code == 1
    assert "set events.endpoint" in line
    assert CliRunner().invoke(cli.app, ["events", "--since", "x"]).exit_code == 2


def test_events_where_nobody_answers_is_one_line(kvtier, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_services.routers.PATIENCE", 0.2)
    with (tmp_path / "kvtier.toml").open("a") as file:
        file.write('[events]\nendpoint = "tcp://127.0.0.1:1"\n')
    for args in ((), ("--dump",), ("--since", "5")):
        code, (line,) = kvtier("events", *args)
        assert code == 1
        assert "nobody answers at tcp://127.0.0.1:2" in line
