"""How full the tiers of a host are, and how they fare."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtier_services.monitor.metrics.described import Described, Status, Values

GAUGES_OF_TIERS = frozenset(("quarantined",))
"""What a tier tells among its counters and that goes down again."""
EVENTS = {
    "gpu": ("refused", "read_error", "write_error"),
    "nvme": (
        "corrupt",
        "read_error",
        "write_error",
        "removal_error",
        "table_error",
        "too_large",
        "evicted",
        "carried",
        "carried_nbytes",
        "read_nbytes",
        "written_nbytes",
        "payload_nbytes",
        "device_nbytes",
    ),
}
USAGE = (
    ("used_bytes", "Bytes that a {} holds, with all overhead.", lambda usage: usage["used"]),
    ("capacity_bytes", "Bytes that a {} may hold.", lambda usage: usage["capacity"]),
    ("blocks", "Blocks that a {} has.", lambda usage: usage["blocks"]),
    ("up", "Whether a {} works: 0 while it has a fault.", lambda usage: int(not usage["fault"])),
)


def _per_tier(read: Callable[[Status], float]) -> Callable[[Status], Values]:
    return lambda status: {(tier["tier"],): read(tier) for tier in status["tiers"]}


def _per_device(read: Callable[[Status], float]) -> Callable[[Status], Values]:
    return lambda status: {key: read(device) for key, device in _devices(status)}


def _devices(status: Status) -> Iterator[tuple[tuple[str, ...], Status]]:
    for tier in status["tiers"]:
        for device in tier.get("devices", ()):
            yield (tier["tier"], device["device"]), device


def _events(labels: tuple[str, ...], usage: Status) -> Iterator[tuple[tuple[str, ...], int]]:
    known = dict.fromkeys(EVENTS.get(labels[0], ()), 0)
    for event, count in (known | usage["counters"]).items():
        if event not in GAUGES_OF_TIERS:
            yield (*labels, event), count


OF_TIERS = (
    *(
        Described(f"kvtier_tier_{what}", "gauge", text.format("tier"), _per_tier(read), ("tier",))
        for what, text, read in USAGE
    ),
    *(
        Described(f"kvtier_device_{what}", "gauge", text.format("device"), _per_device(read), ("tier", "device"))
        for what, text, read in USAGE
    ),
    Described(
        "kvtier_tier_events",
        "counter",
        "What a tier counts itself, by event; begins anew with the tier's process.",
        lambda status: {key: count for tier in status["tiers"] for key, count in _events((tier["tier"],), tier)},
        ("tier", "event"),
    ),
    Described(
        "kvtier_device_events",
        "counter",
        "The same of each device of a tier that has several.",
        lambda status: {key: count for key, device in _devices(status) for key, count in _events(key, device)},
        ("tier", "device", "event"),
    ),
    Described(
        "kvtier_quarantined_blocks",
        "gauge",
        "Slots of memory that are kept from everybody until an engine that was cut off writes no more.",
        lambda status: {
            (): sum(tier["counters"].get("quarantined", 0) for tier in status["tiers"] if tier["tier"] == "cpu")
        },
    ),
)
