"""What a host has and does now, and how long things take."""

from __future__ import annotations

from kvtier import __version__
from kvtier_services.monitor.metrics.described import TIERS, Described, alone, one, several

HELD = ("lease", "reservation")
QUEUES = ("flights", "moves", "promotions")

GAUGES = (
    Described("kvtier_build_info", "gauge", "Version of kvtier.", lambda _: {(__version__,): 1}, ("version",)),
    Described(
        "kvtier_start_time_seconds",
        "gauge",
        "When this life of the host began, since the epoch; all counters are 0 then.",
        one("started"),
    ),
    Described(
        "kvtier_arena_missing_bytes",
        "gauge",
        "Bytes of cpu.capacity that the arena does not have yet: it grows, or cannot.",
        one("arena_missing"),
    ),
    Described("kvtier_draining", "gauge", "Whether the host is being emptied, and takes no saves.", one("draining")),
    Described("kvtier_blocks", "gauge", "Blocks that some tier of this host has.", one("blocks")),
    Described(
        "kvtier_leased_bytes",
        "gauge",
        "Bytes of slots that are leased, once for each lease, by the tier whose memory they are in.",
        several("leased"),
        ("tier",),
    ),
    Described(
        "kvtier_pinned_bytes",
        "gauge",
        "Bytes of slots that are pinned.",
        lambda status: {("cpu",): status["pinned_nbytes"]},
        ("tier",),
    ),
    Described("kvtier_sessions", "gauge", "Engines that are attached.", one("sessions")),
    Described("kvtier_leases", "gauge", "Leases that are held.", one("leases")),
    Described("kvtier_reservations", "gauge", "Reservations that are open.", one("reservations")),
    Described("kvtier_pins", "gauge", "Blocks that are pinned.", one("pins")),
    Described("kvtier_staging_blocks", "gauge", "Blocks on their way into the CPU tier.", one("staging")),
    Described(
        "kvtier_stuck",
        "gauge",
        "Leases and reservations that are older than 10 seconds.",
        several("stuck"),
        ("kind",),
        alone(HELD),
    ),
    Described(
        "kvtier_oldest_seconds",
        "gauge",
        "Age of the oldest lease and reservation; 0 when there is none.",
        several("oldest"),
        ("kind",),
        alone(HELD),
    ),
    Described(
        "kvtier_queue",
        "gauge",
        "What waits for the background, or is under way there, by kind of work.",
        several("queues"),
        ("queue",),
        alone(QUEUES),
    ),
    Described(
        "kvtier_tier_read_bytes_per_second",
        "gauge",
        "How fast blocks come from a tier, from the CPU tier decoded: the median of the last transfers of 1 MiB and "
        "more within a minute; no series without three of them.",
        several("bandwidth"),
        ("tier",),
    ),
    Described(
        "kvtier_window_seconds",
        "gauge",
        "Span of the window of the next four: an hour, in steps of 5 minutes.",
        one("window", "seconds"),
    ),
    Described("kvtier_window_asked_blocks", "gauge", "Blocks asked for in the window.", one("window", "asked")),
    Described(
        "kvtier_window_distinct_blocks",
        "gauge",
        "Different blocks among them, estimated (standard error 0.8 %).",
        one("window", "distinct"),
    ),
    Described(
        "kvtier_window_hit_blocks",
        "gauge",
        "Blocks given in the window, by the tier that had them.",
        several("window", "hits"),
        ("tier",),
        alone(TIERS),
    ),
    Described(
        "kvtier_ceiling_hit_ratio",
        "gauge",
        "Hit ratio in the window of a cache that keeps everything: 1 - distinct / asked, and not below what was hit.",
        one("window", "ceiling"),
    ),
)
HISTOGRAMS = (
    Described(
        "kvtier_match_seconds",
        "histogram",
        "Time that a match takes here to look up, lease and count; what it waits for is not in it.",
        lambda status: {(): status["seconds"]["match"]},
    ),
    Described(
        "kvtier_load_seconds",
        "histogram",
        "Time of a client's load, as the client reports it.",
        lambda status: {(): status["seconds"]["load"]},
    ),
    Described(
        "kvtier_save_seconds",
        "histogram",
        "Time of a client's save of one window of at most 64 MiB, as the client reports it.",
        lambda status: {(): status["seconds"]["save"]},
    ),
    Described(
        "kvtier_transfer_seconds",
        "histogram",
        "Time of one batch of blocks from one tier to another: at most 256 blocks, and 64 MiB down or 16 MiB up.",
        several("transfers", apart=">"),
        ("source", "target"),
    ),
    Described(
        "kvtier_eviction_age_seconds",
        "histogram",
        "Seconds since their last use of blocks that left a tier to make room, by that tier.",
        several("evicted"),
        ("tier",),
    ),
)
