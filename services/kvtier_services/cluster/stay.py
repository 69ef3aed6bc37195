"""`kvtier up --stay`: look after the kvtier of a Ray cluster in the foreground, as a container of a pod.

python -m kvtier_services.cluster.stay PARENT ADDRESS CONFIG

The one who stays has no Ray in it, so that a signal ends it at once; what looks is a child, because a driver of a
cluster whose head is gone may hang, or be ended by Ray itself, and is then simply started again.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from msgspec.structs import replace as changed

from kvtier.config import Config, load
from kvtier.errors import ConfigError
from kvtier_services.actors.folders import make_folder, write_secret
from kvtier_services.cluster import state
from kvtier_services.cluster.down import Say, at_work, is_alive
from kvtier_services.cluster.up import begun, enter, with_index
from kvtier_services.settings import Secret, Settings, host_name

LOOK = 5.0
"""Seconds between looks at the controller."""
STUCK = 90
"""Seconds after which a look that has not ended is given up, and its process with it."""
PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds until a child that has ended is started again; twice as long each time that it ended young."""
YOUNG = 30.0
POLL = 0.2


def stay(config: Config, source: str) -> None:
    """Start what is not there, start again what is gone, and return at SIGTERM. The tiers, which are Ray's, live on.

    Args:
        config: of this kvtier, with the address of the cluster.
        source: file that it was read from; empty for the defaults.

    Raises:
        ConfigError: it is no configuration to stay with.
    """
    if not config.ray.address:
        raise ConfigError("--stay looks after the kvtier of a Ray cluster that runs already: name it with --address")
    if config.index.url == "embedded":
        raise ConfigError(
            "index.url is embedded, and that Redis would end with this process; set it to a Redis of yours, or to "
            '"local" for a single host'
        )
    ended = _Ended()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.said = True

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _again_and_again([str(os.getpid()), config.ray.address, source], ended)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended:
    """Whether a signal came. No `threading.Event`: a handler that comes while that is waited for may wait for ever."""

    said = False

    def wait(self, seconds: float) -> None:
        """Until it comes, and so long at most."""
        until = time.monotonic() + seconds
        while not self.said and (left := until - time.monotonic()) > 0:
            time.sleep(min(POLL, left))


def _again_and_again(arguments: list[str], ended: _Ended) -> None:
    pause = PAUSE
    while not ended.said:
        began = time.monotonic()
        child = subprocess.Popen([sys.executable, "-m", "kvtier_services.cluster.stay", *arguments])  # noqa: S603
        while child.poll() is None and not ended.said:
            ended.wait(POLL)
        if child.poll() is None:
            child.kill()  # at a SIGTERM Ray would show its stack
            child.wait()
            return
        pause = PAUSE if time.monotonic() - began > YOUNG else min(LONGEST_PAUSE, 2 * pause)
        ended.wait(pause)


def look_after(config: Config, source: str, *, wanted: Callable[[], bool], say: Say) -> None:
    """See to it that there is a controller, until nobody wants that any more or `kvtier down` has ended it.

    Args:
        config: with the address of the cluster.
        source: file that it was read from.
        wanted: asked before each look.
        say: told of what has changed.

    Raises:
        KVTierError: the cluster does not answer.
        OSError: the controller does not.
    """
    settings = with_index(Settings(config, up_host=host_name()))
    make_folder(settings.run_dir, "run_dir", config.group)
    with at_work(settings):
        was = state.read(settings.state_file)
        if was is not None and was.own_ray and is_alive(was):
            raise ConfigError(f"a kvtier with a Ray of its own runs in {settings.run_dir}; `kvtier down` ends it")
        settings = _with_secret(settings)
        running = changed(begun(settings, source), address=config.ray.address, starting=False)
        state.write(settings.state_file, running)
    enter(running)
    from kvtier_services.cluster import actors

    signal.alarm(STUCK)
    with actors.connected(running.address, running.namespace):
        controller = actors.ActorCall(actors.CONTROLLER, running.namespace)
        known: list[str] | None = None
        while wanted() and settings.state_file.exists():  # else `kvtier down` ended it, and the file may say otherwise
            signal.alarm(STUCK)
            if running.namespace not in actors.controllers():
                say(f"starting the controller in the Ray cluster at {running.address}")
                controller = actors.start_controller(settings)
            hosts = controller("hosts", timeout=STUCK / 2)
            if hosts != known:
                say(f"hosts with tiers: {', '.join(hosts) or 'none yet'}")
                known = hosts
            time.sleep(LOOK)
        signal.alarm(0)


def _with_secret(settings: Settings) -> Settings:
    """The secret of the fleet stays what it was: hosts that live on know each other by it."""
    file = settings.fleet_secret_file
    if not file.exists():
        write_secret(file, secrets.token_hex(32))
    return replace(settings, fleet_secret=Secret(file.read_text(encoding="utf-8")))


def main(parent: str, address: str, source: str = "") -> int:
    """Look after it as long as the parent lives."""
    config = load(source or None)
    config = changed(config, ray=changed(config.ray, address=address))

    def say(line: str) -> None:
        sys.stdout.write(f"kvtier: {line}\n")
        sys.stdout.flush()

    try:
        look_after(config, source, wanted=lambda: os.getppid() == int(parent), say=say)
    except Exception as exc:  # noqa: BLE001 - whatever it is that Ray does not do: the next child may fare better
        say(" ".join(str(exc).split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
