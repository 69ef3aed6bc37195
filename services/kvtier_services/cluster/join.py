"""`kvtier join`: make this host one of a fleet."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier_services.actors.folders import make_folder, write_secret
from kvtier_services.cluster import node, state
from kvtier_services.cluster.down import Say, at_work, clean, is_alive
from kvtier_services.cluster.process import Process
from kvtier_services.cluster.state import Running
from kvtier_services.cluster.up import Started, enter, host_notes, ready
from kvtier_services.settings import Settings, host_name

NODE_SECONDS = 60.0
NAMESAKE_SECONDS = 20.0
"""Until then a former life of this host is dead for Ray, too."""
STRANGER = "InvalidAuthToken"
"""What a node prints that the head does not let in."""
KNOCK = 5.0


def join(config: Config, head: str, *, token: Path | None = None, host: str = "", say: Say = lambda _: None) -> Started:
    """Start a Ray node here that belongs to the head of another host; the controller there starts the tiers here.

    Folders and sizes are those that the fleet's first host was started with; of this configuration only `run_dir`
    counts, for what `kvtier down` and `status` must know here.

    Args:
        config: of this host.
        head: host:port of the fleet's Ray head, as `kvtier status` shows it there.
        token: file of its token, if it is not in run_dir already.
        host: this machine's address for other hosts; empty for the one that it reaches the head from.
        say: told of each step.

    Raises:
        ConfigError: it cannot work; what had been started was ended again.
    """
    began = time.monotonic()
    settings = Settings(config)
    make_folder(settings.run_dir, "run_dir", config.group)
    with at_work(settings):
        was = state.read(settings.state_file)
        if was is not None and is_alive(was) and not was.starting:
            return Started(was, [], (), time.monotonic() - began, already=True)
        secret = _secret(token or settings.ray_token)
        host = host or _address_towards(head)
        if was is not None:
            clean(was, settings.run_dir, flush_seconds=0.0)
        write_secret(settings.ray_token, secret)
        return _start(settings, head, host, say, began)


def _start(settings: Settings, head: str, host: str, say: Say, began: float) -> Started:
    me = Process.of(os.getpid())
    if me is None:
        raise ConfigError("this process cannot be found in /proc; is it mounted?")
    temp = tempfile.mkdtemp(prefix=node.TEMP_PREFIX)
    running = Running(
        version=state.VERSION,
        run=secrets.token_hex(8),
        started=time.time(),
        starting=True,
        up=me,
        config="",
        socket=str(settings.socket),
        arena_dir=str(settings.arena_dir),
        address=head,
        ray_temp=temp,
        ray_token=str(settings.ray_token),
        host=host,
        joined=True,
    )
    state.write(settings.state_file, running)
    try:
        say("starting a Ray node")
        command = [sys.executable, "-m", "kvtier_services.cluster.member", head, host, running.run]
        command += [str(settings.ray_token), temp, str(settings.ray_log)]
        settings.ray_log.unlink(missing_ok=True)
        environment = node.environment(os.environ, running.run, settings.ray_token)
        child = node.spawn(command, settings.ray_log, environment)
        running = state.write(settings.state_file, changed(running, head=Process.of(child.pid)))
        _wait(Path(temp), settings.ray_log, head)
        child.returncode = 0  # it lives on without us
        say("waiting for the tiers")
        enter(running)
        running, hosts = _tiers(settings, running)
    except BaseException:
        say("ending what was started")
        clean(running, settings.run_dir, flush_seconds=0.0)
        raise
    if running.socket != str(settings.socket):  # where engines and the command line look for it
        settings.socket.unlink(missing_ok=True)
        settings.socket.symlink_to(running.socket)
    running = state.write(settings.state_file, changed(running, starting=False))
    return Started(running, hosts, _notes(hosts, settings), time.monotonic() - began)


def _tiers(settings: Settings, running: Running) -> tuple[Running, list[dict[str, Any]]]:
    """Wait until the controller has started this host's actors."""
    from kvtier_services.cluster import actors

    with actors.connected(running.address, "", running.host):
        if len(there := actors.controllers()) != 1:
            raise ConfigError(
                f"the Ray cluster at {running.address} runs {len(there) or 'no'} kvtier{'s' * (len(there) > 1)}; name "
                "the head of one that `kvtier up` started"
            )
        if namesake := actors.namesake(host_name(), running.ray_temp, NAMESAKE_SECONDS):
            raise ConfigError(
                f"the fleet has a host named {host_name()!r} already, at {namesake}; give this one another name: set "
                "KVTIER_HOST in the environment of `kvtier join`"
            )
        running = state.write(settings.state_file, changed(running, namespace=there[0]))
        hosts = ready(actors.ActorCall(actors.CONTROLLER, there[0]), host_name())
    door, arena = hosts[0]["socket"], hosts[0]["arena_dir"]
    return state.write(settings.state_file, changed(running, socket=door, arena_dir=arena)), hosts


def _notes(hosts: list[dict[str, Any]], settings: Settings) -> tuple[str, ...]:
    notes = [note for host in hosts for note in host_notes(host)]
    if hosts and hosts[0]["socket"] != str(settings.socket):
        notes.append(
            f"the door is {hosts[0]['socket']}, as folders are those of the fleet's first host; {settings.socket} "
            "leads there"
        )
    return tuple(notes)


def _secret(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ConfigError(
            f"{file} cannot be read ({exc.strerror}); copy ray.token out of run_dir of the fleet's first host, and "
            "name the copy with --token"
        ) from exc
    if not text:
        raise ConfigError(f"{file} is empty; copy ray.token out of run_dir of the fleet's first host")
    return text


def _address_towards(head: str) -> str:
    """Address from which this machine reaches the head."""
    address, _, port = head.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), KNOCK) as made:
            return str(made.getsockname()[0])
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"no Ray head answers at {head!r} ({exc}); name host:port as `kvtier status` shows it on the fleet's first "
            "host, where ray.host must be set"
        ) from exc


def _wait(temp: Path, log: Path, head: str) -> None:
    deadline = time.monotonic() + NODE_SECONDS
    while not (temp / "ray_current_cluster").exists():
        if STRANGER in node.last_lines(log):
            raise ConfigError(
                f"the Ray head at {head} does not know this token; copy ray.token out of run_dir of the fleet's first "
                "host, as it is there now (each `kvtier up` makes a new one), and name the copy with --token"
            )
        if time.monotonic() > deadline:
            raise ConfigError(f"no Ray node comes up here in {NODE_SECONDS:g} s: {node.last_lines(log)}")
        time.sleep(0.05)
