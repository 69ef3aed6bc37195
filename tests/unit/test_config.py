"""A kvtier.toml is checked where it is read, and says itself what it can say."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

import pytest

from kvtier.config import Config, Duration, Size, explain, find, load
from kvtier.config.load import parse
from kvtier.errors import ConfigError


@pytest.fixture(autouse=True)
def no_configuration_of_the_machine(monkeypatch, tmp_path):
    for name in ("KVTIER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def parsed(text: str) -> Config:
    return parse(tomllib.loads(text), text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("32GiB", 32 << 30),
        ("1.5 MiB", 3 << 19),
        ("4kB", 4000),
        ("2TB", 2 * 10**12),
        ("512", 512),
        (512, 512),
        (0, 0),
    ],
)
def test_sizes(text, nbytes):
    assert Size.parse(text) == nbytes


@pytest.mark.parametrize("text", ["3Gib", "GiB", "-1", "1 000MiB", True, -5, 1.5, None, "1e9", ""])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size: write"):
        Size.parse(text)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 3 << 20, 257 << 20, 5 << 30, (5 << 30) + 1])
def test_a_size_reads_back_what_it_writes(nbytes):
    assert Size.parse(str(Size(nbytes))) == nbytes


@pytest.mark.parametrize(("text", "seconds"), [("250ms", 0.25), ("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0)])
def test_durations(text, seconds):
    assert Duration.parse(text) == pytest.approx(seconds)
    assert Duration.parse(str(Duration.parse(text))) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["30", 30, 1.5, "s", "1 year", None, True])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is no duration: write"):
        Duration.parse(text)


def test_no_file_gives_the_defaults():
    assert find() is None
    assert load() == Config()


def test_the_argument_goes_before_the_environment_before_the_folder(monkeypatch, tmp_path):
    for name in ("argument", "environment", "kvtier"):
        Path(tmp_path, f"{name}.toml").write_text(f'[index]\npassword_file = "{name}"\n')
    assert load().index.password_file == "kvtier"
    monkeypatch.setenv("KVTIER_CONFIG", "environment.toml")
    assert load().index.password_file == "environment"
    assert load("argument.toml").index.password_file == "argument"


def test_a_named_file_must_be_there(monkeypatch):
    with pytest.raises(ConfigError, match=r"there is no file gone\.toml"):
        load("gone.toml")
    monkeypatch.setenv("KVTIER_CONFIG", "gone.toml")
    with pytest.raises(ConfigError, match=r"gone\.toml \(\$KVTIER_CONFIG\)"):
        load()


def test_what_is_no_toml_says_where():
    Path("bad.toml").write_text("[cpu\n")
    with pytest.raises(ConfigError, match=r"bad\.toml cannot be read: .*line 1"):
        load("bad.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('\nrun_dirr = "x"', "kvtier.toml, line 2: unknown name run_dirr at the top; did you mean run_dir?"),
        ("[cpu]\n\ncapcity = 3", "kvtier.toml, line 3: unknown name capcity in [cpu]; did you mean capacity?"),
        ("[nvme]\ncapacity=1\n[cpu]\nx = 1", "line 4: unknown name x in [cpu]; there are capacity, high, low"),
        ("[cpuu]\nhigh = 1", "line 1: unknown name cpuu at the top; did you mean cpu?"),
        ('[nvme]\ncapacity = "8"\n[cpu]\ncapacity = "8Gib"', "line 4: cpu.capacity: '8Gib' is no size"),
        ("[metrics]\nport = 70000", "line 2: metrics.port: Expected `int` <= 65535"),
        ("[status]\nhost = '0.0.0.0'", "status.host is '0.0.0.0', which others reach: set status.token_file"),
        ("[client]\ncall_timeout = 3", "line 2: client.call_timeout: 3 is no duration"),
        ("[client]\ncall_timeout = '0s'", "client.call_timeout is 0; set a time"),
        ("cpu = 3", "line 1: cpu: Expected `object`"),
        ("[cpu]\ncapacity = 4096", "cpu.capacity is 4KiB; set at least 1MiB"),
        ("[cpu]\nlow = 0.95", "cpu.low is 0.95; set it to at most cpu.high (0.9)"),
        ("[nvme]\nlossless = 'gzip'", 'nvme.lossless is \'gzip\'; set it to "off", "auto"'),
        ("[nvme]\npath = []", "nvme.path is an empty list; name a folder"),
        ("[nvme]\npath = ['/a', '/b', '/c/../a/']", "nvme.path names one folder twice: /a, /a; name one folder on"),
        ("[nvme]\npath = ['/a/b', '/ab', '/a']", "nvme.path has a folder inside another: /a/b, /a; name one folder on"),
        ("[nvme]\npath = ['/a', 3]", "nvme.path[1]: Expected `str`, got `int`"),
        ("[gpu]\ndevice = 'tpu'", "gpu.device is 'tpu'; set it to \"auto\""),
        ("[index]\nurl = 'http://x'", "index.url is 'http://x'; set it to \"embedded\""),
    ],
)
def test_an_error_says_what_is_wrong_where_and_what_to_set(text, said):
    with pytest.raises(ConfigError) as error:
        parsed(text)
    assert said in str(error.value)
    assert str(error.value).startswith("kvtier.toml")


@pytest.mark.parametrize("url", ["redis://:hunter2@host", "rediss://u:hunter2@host/0", "unix:///s?password=hunter2"])
def test_a_password_in_the_url_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match=r"index\.url carries a password") as error:
        parsed(f"[index]\nurl = '{url}'")
    assert "hunter2" not in str(error.value)


def test_a_socket_path_that_no_socket_can_have_is_refused():
    with pytest.raises(ConfigError, match=r"run_dir .* is too long"):
        parsed(f"run_dir = '/{'x' * 120}'")


def test_the_nvme_tier_may_be_on_several_devices(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parsed("[nvme]\npath = '~/x'").nvme.folders == (Path("/home/me/x"),)
    assert parsed("[nvme]\npath = ['/mnt/a', '~/x']").nvme.folders == (Path("/mnt/a"), Path("/home/me/x"))


def test_explain_is_a_file_that_means_the_same():
    config = parsed(
        'group = "engines"\n[nvme]\npath = ["/a", "~/b"]\n[cpu]\ncapacity = "3MiB"\n[client]\ncall_timeout = "250ms"'
    )
    assert parsed(explain(config)) == config


def test_every_field_has_a_description():
    said = explain()
    fields = [line for line in said.splitlines() if " = " in line and not line.startswith("#")]
    comments = [line for line in said.splitlines() if line.startswith("# ")]
    sections = [line for line in said.splitlines() if line.startswith("[")]
    assert len(comments) == len(fields) + len(sections)
    assert "None" not in said


def test_a_configuration_travels_between_processes():
    config = Config()
    assert pickle.loads(pickle.dumps(config)) == config


def test_only_a_group_that_is_named_gets_in():
    assert (Config().mode, Config(group="engines").mode) == (0o600, 0o660)


def test_defaults_follow_the_machine(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    config = Config()
    assert config.run_dir == "/run/user/7/kvtier"
    assert config.nvme.path == "/cache/kvtier/nvme"
    assert str(config.socket) == "/run/user/7/kvtier/door.sock"
    assert 1 << 20 <= config.cpu.capacity <= 4 << 30


@pytest.mark.parametrize("endpoint", ["localhost", "tcp://host", "tcp://host:http", "udp://h:1", "tcp://h:5557/x"])
def test_an_endpoint_that_cannot_be_is_refused(endpoint):
    for name in ("endpoint", "replay_endpoint"):
        with pytest.raises(ConfigError, match=rf"events\.{name} is .*tcp://ADDRESS:PORT"):
            parse({"events": {name: endpoint}})
    for good in ("tcp://*:5557", "tcp://[::1]:0", "ipc:///run/kvtier/events", ""):
        assert parse({"events": {"endpoint": good}}).events.endpoint == good


def test_tls_between_hosts_takes_all_its_files():
    with pytest.raises(ConfigError, match=r"fleet\.cert is set; .* fleet\.key and fleet\.ca"):
        parse({"fleet": {"cert": "c.pem"}})
    assert parse({"fleet": {"cert": "c.pem", "key": "k.pem", "ca": "ca.pem"}}).fleet.ca == "ca.pem"


def test_the_address_of_a_host_is_one():
    """Names are not looked up: that has no deadline."""
    for wrong in ("host-1", "10.0.0.1:7071", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match=r"fleet\.address is .*IP address"):
            parse({"fleet": {"address": wrong}})
    assert parse({"fleet": {"address": "fd00::2"}}).fleet.address == "fd00::2"
