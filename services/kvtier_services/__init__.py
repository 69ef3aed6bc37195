"""kvtier as a service: Ray actors, the door, the command line.

    cli              the `kvtier` command
    doctor           what kvtier needs of a machine
    demo             a language model over a long document, with its KV from each tier
    planning         what `kvtier advise` shows
    cluster          up, down and status; the only place that knows Ray
    controller       which hosts there are; starts their actors
    hosts            what a host and its actors are to it, and how all are asked at once
    members          who belongs to the fleet and does not serve
    gateway          the door: control for the engines of the host
    monitor          metrics and the status on a terminal
    actors           the CPU tier, NVMe tier and GPU worker of a host, as plain classes
    redis_server     the embedded Redis
    settings         what all of them are given

Actors are plain classes, tested as objects; `ray.remote` is applied in `cluster` only. The CPU tier's actor is handed
its door and its exporter by `cluster`, because gateway and monitor stand above the actors. The library `kvtier` never
imports this package.
"""
