"""Hosts of their own on one machine: network, processes and name apart, files in common.

Everything lives in namespaces without names, so whatever happens to the test, the kernel takes all of it away with the
first process of each.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ALONE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--net", "--uts")
FIRST_PROCESS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
"""What the first process of a namespace has to do: nothing, but to bury the orphans."""
PREFIX = "10.77.0"


def why_not() -> str:
    """Why this machine cannot have such hosts; empty when it can."""
    missing = [tool for tool in ("setpriv", "unshare", "nsenter", "ip") if not shutil.which(tool)]
    if missing:
        return f"no {', '.join(missing)} here (util-linux, iproute2)"
    tried = subprocess.run(
        [*ALONE, "--pid", "--mount-proc", "ip", "link", "add", "plug0", "type", "veth", "peer", "name", "plug1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip() if tried.returncode else ""


class Machine:
    """A namespace, held by its first process."""

    def __init__(self, *, processes: bool) -> None:
        more = ("--pid", "--mount-proc") if processes else ()
        self._enter = ("-n", "-u", *(("-p", "-m") if processes else ()))
        self._holder = subprocess.Popen(
            [*ALONE, *more, sys.executable, "-S", "-c", FIRST_PROCESS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare grumbles when its child is killed
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"here\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        (self.pid,) = map(int, children.read_text().split())

    def inside(self, *command: str) -> list[str]:
        """A command, as it must be called to run in there."""
        return ["nsenter", "-t", str(self.pid), *self._enter, "--", *command]

    def run(self, *command: str) -> None:
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def end(self) -> None:
        """As when the power fails: every process in there is gone."""
        if self._holder.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(10.0)
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class Network:
    """A switch; whoever is plugged in reaches all others, until it is unplugged."""

    def __init__(self) -> None:
        self._switch = Machine(processes=False)
        self._machines: list[Machine] = [self._switch]
        self.address = f"{PREFIX}.254"
        self.inside = self._switch.inside
        run = self._switch.run
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "address", "add", f"{self.address}/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")

    def machine(self, name: str, number: int) -> Machine:
        """A new machine that is plugged in; a former one under this number was powered off."""
        machine = Machine(processes=True)
        self._machines.append(machine)
        plug, run = f"plug{number}", self._switch.run
        card = ("address", f"02:00:00:77:00:{number:02x}")  # of the machine: it stays when that is started anew
        run("ip", "link", "add", plug, "type", "veth", "peer", "name", "eth0", *card, "netns", str(machine.pid))
        run("ip", "link", "set", plug, "master", "br0", "up")
        machine.run("hostname", name)
        machine.run("ip", "link", "set", "lo", "up")
        machine.run("ip", "address", "add", f"{PREFIX}.{number}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")
        return machine

    def power_off(self, machine: Machine, number: int) -> None:
        """Without a word: sockets of dead processes say goodbye, and keep their network, if there still is a wire."""
        self._switch.run("ip", "link", "delete", f"plug{number}")
        machine.end()

    def unplug(self, number: int) -> None:
        """Cut the wire."""
        self._switch.run("ip", "link", "set", f"plug{number}", "down")

    def plug(self, number: int) -> None:
        self._switch.run("ip", "link", "set", f"plug{number}", "up")

    def end(self) -> None:
        for machine in reversed(self._machines):
            machine.end()


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        yield made
    finally:
        made.end()
