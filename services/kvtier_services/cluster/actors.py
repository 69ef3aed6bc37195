"""Actors in Ray: the only module that imports it. Every wait has a deadline."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers.base import TierNumber
from kvtier_services.actors.cpu_tier import CpuTierActor, Parts
from kvtier_services.actors.gpu_worker import GpuWorkerActor
from kvtier_services.actors.hands import Hand
from kvtier_services.actors.index import open_index
from kvtier_services.actors.nvme_tier import NvmeTierActor
from kvtier_services.cluster.parts import open_door, open_exporter, writer_gone
from kvtier_services.controller import Controller, Host
from kvtier_services.settings import Settings

CONTROLLER = "controller"
LIVES = {"num_cpus": 0, "lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}
KNOCK = 5.0
"""Seconds within which a Ray head must take a connection."""
TIER_CALLS = 8
"""Calls that a tier's process works on at a time."""
BRAIN_CALLS = 32


@contextmanager
def connected(address: str, namespace: str) -> Iterator[None]:
    """Be a driver of a cluster.

    Raises:
        ConfigError: it does not answer, or does not let this process in.
    """
    _knock(address)
    try:
        ray.init(
            address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as exc:
        raise ConfigError(
            f"the Ray cluster at {address} does not take this process in: {one_line(exc)}; see ray.address, and for a "
            "cluster with token authentication RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"
        ) from exc
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries for minutes, and says so in its own words."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), KNOCK):
            pass
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({exc}); set ray.address to the host:port of its head"
        ) from exc


@dataclass(slots=True)
class ActorCall:
    """Calls methods of a named actor; found when it is first called, and again after it was made anew.

    Attributes:
        name: of the actor.
        namespace: of the actor.
    """

    name: str
    namespace: str
    _handle: Any = field(default=None, repr=False)

    def __call__(self, method: str, *args: object, timeout: float) -> Any:
        """Call and wait.

        Raises:
            TimeoutError: no answer in time.
            ConnectionError: the actor is not there.
            KVTierError: what the method raised.
        """
        try:
            handle = self._handle = self._handle or ray.get_actor(self.name, self.namespace)
            return ray.get(getattr(handle, method).remote(*args), timeout=timeout)
        except RayTaskError as exc:
            # Its text is a traceback; what the method raised says what is wrong.
            raise (exc.cause or exc) from None
        except GetTimeoutError as exc:
            raise TimeoutError(f"{self.name} did not answer {method} in {timeout:g} s") from exc
        except (RayActorError, ValueError) as exc:
            self._handle = None
            raise ConnectionError(f"the process of {self.name} is not there: {one_line(exc)}") from exc

    def __reduce__(self) -> tuple[type[ActorCall], tuple[str, str]]:
        return ActorCall, (self.name, self.namespace)


@dataclass(frozen=True, slots=True)
class RayHostActors:
    """The actors of one host.

    Attributes:
        cpu: calls the CPU tier's actor.
        others: call the other tiers' actors.
    """

    cpu: ActorCall
    others: tuple[ActorCall, ...]

    def ready(self, timeout: float) -> dict[str, Any]:
        """See `HostActors`."""
        answer: dict[str, Any] = self.cpu("ready", timeout, timeout=timeout + 5)
        return answer

    def status(self, timeout: float) -> dict[str, Any]:
        """See `HostActors`."""
        answer: dict[str, Any] = self.cpu("status", timeout=timeout)
        return answer

    def stop(self, flush_seconds: float, timeout: float) -> dict[str, int]:
        """See `HostActors`."""
        try:
            answer: dict[str, int] = self.cpu("stop", flush_seconds, timeout=timeout)
            with ThreadPoolExecutor(len(self.others) or 1) as threads:
                list(threads.map(lambda other: _stop(other, timeout), self.others))
            return answer
        finally:
            for call in (self.cpu, *self.others):
                kill(call.name, call.namespace)


def _stop(actor: ActorCall, timeout: float) -> None:
    with suppress(KVTierError, OSError):
        actor("stop", timeout=timeout)


def live_hosts() -> Sequence[Host]:
    """One for each machine of the cluster, however many nodes it runs; this node's machine by this node."""
    mine = ray.get_runtime_context().get_node_id()
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeID"] != mine, n["NodeID"]))  # type: ignore[no-untyped-call]
    found: dict[str, Host] = {}
    for node in nodes:
        gpus = int(node["Resources"].get("GPU", 0))
        name = node["NodeManagerHostname"]
        found.setdefault(name, Host(name, node["NodeID"], node["NodeManagerAddress"], gpus))
    return list(found.values())


def start_host(settings: Settings, host: Host) -> RayHostActors:
    """Start the actors of a host; those that run are left as they are."""
    where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(host.node, soft=False)}

    def start(kind: type, name: str, calls: int, *args: object) -> ActorCall:
        call = ActorCall(f"{name}:{host.name}", settings.namespace)
        named = {"name": call.name, "namespace": call.namespace, "get_if_exists": True}
        ray.remote(kind).options(max_concurrency=calls, **named, **where, **LIVES).remote(*args)
        return call

    hands: dict[TierNumber, list[Hand]] = {}
    others = []
    device = settings.gpu_device(host.gpus)
    for name, folder in settings.nvme_dirs.items():
        others.append(start(NvmeTierActor, name, TIER_CALLS, settings, name))
        label = name if name == "nvme" else f"nvme {folder}"
        hands.setdefault(TierNumber.NVME, []).append(Hand(name, label, others[-1], str(folder)))
    if device:
        others.append(start(GpuWorkerActor, "gpu", TIER_CALLS, settings, device))
        hands[TierNumber.GPU] = [Hand("gpu", "gpu(host)" if device == "cpu" else "gpu", others[-1])]
    parts = Parts(hands, open_index, open_door, open_exporter, writer_gone)
    return RayHostActors(start(CpuTierActor, "cpu", BRAIN_CALLS, settings, parts), tuple(others))


def start_controller(settings: Settings) -> ActorCall:
    """Start the controller of a cluster that this process is connected to, on this process's node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    ray.remote(Controller).options(
        name=CONTROLLER, namespace=settings.namespace, scheduling_strategy=here, max_concurrency=BRAIN_CALLS, **LIVES
    ).remote(settings, live_hosts, start_host)
    return ActorCall(CONTROLLER, settings.namespace)


def kill(name: str, namespace: str) -> bool:
    """End an actor's process for good; False when there is none."""
    try:
        ray.kill(ray.get_actor(name, namespace), no_restart=True)
    except (ValueError, RayError):
        return False
    return True


def kill_all(namespace: str) -> int:
    """End all actors of a namespace for good; how many there were."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sum(kill(actor["name"], namespace) for actor in named if actor["namespace"] == namespace)


def one_line(exc: BaseException) -> str:
    """An exception as a few words: Ray's go over many lines."""
    return " ".join(str(exc).split())[:300] or type(exc).__name__
