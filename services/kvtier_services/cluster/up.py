"""`kvtier up`: start a host, or find that it runs."""

from __future__ import annotations

import os
import secrets
import shutil
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace as changed

from kvtier.config import Config
from kvtier.errors import ConfigError, KVTierError
from kvtier.index.address import RedisAddress
from kvtier.peers.tls import Tls, TlsFiles
from kvtier_services import redis_server
from kvtier_services.actors.folders import make_folder
from kvtier_services.cluster import head, node, process, state
from kvtier_services.cluster.down import END_SECONDS, Say, at_work, clean, is_alive, processes
from kvtier_services.cluster.process import Process
from kvtier_services.cluster.state import Running
from kvtier_services.monitor.snapshot import faults
from kvtier_services.settings import Secret, Settings, host_name

READY_SECONDS = 120.0
"""Seconds that the actors of all hosts may take to start, opening a large store included."""


@dataclass(frozen=True, slots=True)
class Started:
    """What `up` did.

    Attributes:
        running: what runs now.
        hosts: their status; empty when it ran before.
        notes: what the user should know.
        seconds: it took.
        already: it ran before.
        page: url of the status page.
    """

    running: Running
    hosts: list[dict[str, Any]]
    notes: tuple[str, ...]
    seconds: float
    already: bool = False
    page: str = ""


def up(config: Config, *, source: str = "", say: Say = lambda _: None) -> Started:
    """Start Redis, Ray and the actors, or find that they run.

    Args:
        config: of the host.
        source: file that it was read from, for people.
        say: told of each step.

    Raises:
        ConfigError: it cannot work; what had been started was ended again.
    """
    began = time.monotonic()
    if config.fleet.ca and not config.ray.address:
        Tls(TlsFiles(Path(config.fleet.cert), Path(config.fleet.key), Path(config.fleet.ca)))  # else said late
    settings = Settings(config, fleet_secret=Secret(secrets.token_hex(32)), up_host=host_name())
    make_folder(settings.run_dir, "run_dir", config.group)
    with at_work(settings):
        notes: list[str] = []
        was = state.read(settings.state_file)
        if was is not None and is_alive(was) and not was.starting:
            notes += _repair(was, settings) + _unlike(was, source)
            return Started(was, [], tuple(notes), time.monotonic() - began, already=True)
        if was is not None and can_revive(was):
            return _revive(was, settings, say)
        if was is not None:
            say("cleaning up after a kvtier that ended without `kvtier down`")
            ended = clean(was, settings.run_dir, flush_seconds=0.0)
            notes += ["a kvtier that ended without `kvtier down` was cleaned up", *ended.problems]
        running, hosts, page = _start(settings, source, say)
        notes += [page["fault"]] * bool(page["fault"])
        notes += [note for host in hosts for note in host_notes(host)]
        if len(hosts) > 1 and running.redis and not config.ray.host:
            notes.append(
                "index.url is embedded: only this host reaches its Redis; set ray.host to this host's address for the "
                "others, or index.url to a Redis that all hosts reach"
            )
        return Started(running, hosts, tuple(notes), time.monotonic() - began, page=page["url"])


def host_notes(host: dict[str, Any]) -> list[str]:
    """What a person should know about a host that runs."""
    notes = [f"{hand['label']}: {note}" for hand in host.get("hands", []) for note in hand["notes"]]
    return list(dict.fromkeys([*faults(host), *notes]))


def _start(settings: Settings, source: str, say: Say) -> tuple[Running, list[dict[str, Any]], dict[str, str]]:
    notebook = _Notebook(settings, begun(settings, source))
    try:
        settings = _start_index(settings, notebook, say)
        _start_ray(settings, notebook, say)
        hosts, page = _start_actors(settings, notebook.running, say)
        return notebook.write(starting=False), hosts, page
    except BaseException:
        say("ending what was started")
        clean(notebook.running, settings.run_dir, flush_seconds=0.0)
        raise


def begun(settings: Settings, source: str) -> Running:
    """What is written down before anything is started."""
    me = Process.of(os.getpid())
    if me is None:
        raise ConfigError("this process cannot be found in /proc; is it mounted?")
    return Running(
        version=state.VERSION,
        run=secrets.token_hex(8),
        started=time.time(),
        starting=True,
        up=me,
        config=source,
        socket=str(settings.socket),
        arena_dir=str(settings.arena_dir),
        ray_storage=settings.ray_storage,
        namespace=settings.namespace,
        host=settings.config.ray.host,
        written=_written(source),
    )


class _Notebook:
    """Writes down what was started, as it is started."""

    def __init__(self, settings: Settings, running: Running) -> None:
        self._file = settings.state_file
        self.running = state.write(self._file, running)

    def write(self, **changes: Any) -> Running:
        self.running = state.write(self._file, changed(self.running, **changes))
        return self.running


def _start_index(settings: Settings, notebook: _Notebook, say: Say) -> Settings:
    index = settings.config.index
    if index.url != "embedded":
        return with_index(settings)
    say("starting Redis")
    notebook.write(redis=True)
    host = settings.config.ray.host
    server = redis_server.start(settings.run_dir, listen=(host, index.port) if host else None)
    notebook.write(redis_url=server.url)
    return replace(
        settings, redis_url=server.url, redis_password=Secret(Path(server.password_file).read_text(encoding="utf-8"))
    )


def with_index(settings: Settings) -> Settings:
    """Settings with an index that is there already."""
    index = settings.config.index
    spoken = "" if index.password_file or index.url == "local" else RedisAddress(index.url).credentials()[-1]
    return replace(settings, redis_url=index.url, redis_password=Secret(spoken))


def _start_ray(settings: Settings, notebook: _Notebook, say: Say) -> None:
    ray = settings.config.ray
    if ray.address:
        notebook.write(address=ray.address)
        return
    say("starting Ray")
    head.make_token(settings.ray_token)
    notebook.write(ray_token=str(settings.ray_token))
    shutil.rmtree(settings.run_dir / "ray.gcs", ignore_errors=True)
    started = head.start(
        notebook.running.run,
        settings.ray_token,
        settings.ray_log,
        port=ray.port,
        host=ray.host,
        storage=settings.ray_storage,
        started=lambda began, temp: notebook.write(head=began, ray_temp=temp),
    )
    notebook.write(address=started.address)


def _start_actors(settings: Settings, running: Running, say: Say) -> tuple[list[dict[str, Any]], dict[str, str]]:
    say("starting the tiers")
    enter(running)
    from kvtier_services.cluster import actors

    with actors.connected(running.address, running.namespace, running.host):
        controller = actors.start_controller(settings)
        try:
            hosts: list[dict[str, Any]] = controller("ready", READY_SECONDS, timeout=READY_SECONDS + 30.0)
            page: dict[str, str] = controller("page", timeout=30.0)
        except (OSError, KVTierError) as exc:
            raise ConfigError(f"the controller does not start: {exc}") from exc
    faults = [f"{host['host']}: {host['fault']}" for host in hosts if host.get("fault")]
    if faults or not hosts:
        labels = settings.config.ray.labels
        wanted = f"node with the labels {labels}; see ray.labels" if labels else "host"
        raise ConfigError("; ".join(faults) or f"the Ray cluster at {running.address} has no live {wanted}")
    return hosts, page


def can_revive(was: Running) -> bool:
    """Whether its Ray head is gone, and what that knew was kept; after a reboot of its host, too."""
    there = was.ray_storage.startswith("redis://") or Path(was.ray_storage, "session_name").exists()
    return bool(was.own_ray and not was.joined and not was.starting and was.address and there)


def _revive(was: Running, settings: Settings, say: Say) -> Started:
    """Start the head again under the actors of the other hosts, with all that it knew."""
    began = time.monotonic()
    say("ending what is left of the Ray head")
    process.end(lambda: processes(was), END_SECONDS)
    node.sweep(was.ray_temp)
    notes = ["its Ray head was gone and was started again; other hosts kept what they had", *_repair(was, settings)]
    notebook = _Notebook(settings, was)
    _start_again(was, settings, notebook, say)
    say("starting the tiers")
    enter(was)
    from kvtier_services.cluster import actors

    with actors.connected(was.address, was.namespace, was.host):
        hosts = ready(actors.ActorCall(actors.CONTROLLER, was.namespace), host_name())
    notes += [note for host in hosts for note in host_notes(host)]
    return Started(notebook.running, hosts, tuple(notes), time.monotonic() - began)


def _start_again(was: Running, settings: Settings, notebook: _Notebook, say: Say) -> None:
    """Start a head as it was before; more than once, because Ray gives a node 30 s, and a host that boots is busy."""
    deadline = time.monotonic() + READY_SECONDS / 2
    while True:
        say("starting Ray")
        try:
            head.start(
                was.run,
                Path(was.ray_token),
                settings.ray_log,
                port=int(was.address.rpartition(":")[2]),
                host=was.host,
                storage=was.ray_storage,
                started=lambda began, temp: notebook.write(head=began, ray_temp=temp),
            )
        except ConfigError as exc:
            process.end(lambda: processes(notebook.running), END_SECONDS)
            node.sweep(notebook.running.ray_temp)
            if time.monotonic() > deadline:
                raise ConfigError(f"{exc}; if it never does, `kvtier down` gives up what it knew") from exc
        else:
            return


def ready(controller: Callable[..., Any], host: str) -> list[dict[str, Any]]:
    """Wait for one host's actors, and for the controller too, which may be on its way.

    Raises:
        ConfigError: they do not come up.
    """
    deadline = time.monotonic() + READY_SECONDS
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            hosts: list[dict[str, Any]] = controller("ready", left, host, timeout=left + 30.0)
        except (OSError, KVTierError) as exc:
            if time.monotonic() > deadline:
                raise ConfigError(f"the controller does not answer: {exc}") from exc
            time.sleep(0.2)
            continue
        if faults := [f"{one['host']}: {one['fault']}" for one in hosts if one.get("fault")]:
            raise ConfigError("; ".join(faults))
        return hosts


def enter(running: Running) -> None:
    """Prepare this process's environment for its Ray cluster; before Ray is imported."""
    if running.own_ray:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(node.auth_environment(Path(running.ray_token)))


def _repair(running: Running, settings: Settings) -> list[str]:
    """Start again what a running kvtier lost and nobody else restarts."""
    if running.redis and redis_server.running(settings.run_dir) is None:
        place = urlsplit(running.redis_url)
        listen = (place.hostname, place.port or 0) if place.scheme == "redis" and place.hostname else None
        redis_server.start(settings.run_dir, listen=listen)
        return ["its Redis server was gone and was started again"]
    return []


def _written(source: str) -> dict[str, str]:
    """What a configuration file says, by section.name."""
    said: dict[str, Any] = tomllib.loads(Path(source).read_text(encoding="utf-8")) if source else {}
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in said.items()}
    return {
        f"{section}.{name}".rstrip("."): str(value)
        for section, fields in sections.items()
        for name, value in fields.items()
    }


def _unlike(running: Running, source: str) -> list[str]:
    """What the file says now and did not say when this kvtier was started."""
    now, then = _written(source), running.written
    changed_names = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if not changed_names:
        return []
    changes = ", ".join(f"{name} ({then.get(name, 'unset')} -> {now.get(name, 'unset')})" for name in changed_names)
    return [f"the configuration has changed since it was started: {changes}; `kvtier down` and `kvtier up` apply it"]
