"""What a host counts: hits, misses, saves, moves, and what went wrong."""

from __future__ import annotations

from kvtier.codecs.plan import KINDS
from kvtier.hierarchy.state import EVICTED
from kvtier.hierarchy.stats import WAYS
from kvtier_services.monitor.metrics.described import TIERS, Described, alone, each, one, several

RESULTS = ("full", "partial", "miss")
MISSES = (
    "absent",
    "staging",
    "staging_refused",
    "seeking",
    "index_unavailable",
    "declined_recompute_cheaper",
    "quota",
)
REFUSED = ("pressure", "quota", "too_large", "draining", "gpu_quota", "nvme_quota", "pin_quota", "lent_quota")
REPORTED = ("bad_header", "bad_checksum", "client_report")
DROPPED = (*sorted(EVICTED), "gpu_lost", "nvme_lost", "evict", "clear", "expired", *REPORTED)
FAULTS = (
    *(f"{tier}_{what}" for tier in ("gpu", "nvme") for what in ("unavailable", "error", "refused", "lost")),
    *(f"peer_{what}" for what in ("unavailable", "error", "lost")),
    *REPORTED,
    "bad_commit",
    "device_refused",
    "staging_error",
    "staging_no_room",
    "seek_error",
    "seeks_refused",
    "moves_refused",
    "promotions_refused",
    "mover_error",
    "keeper_error",
    "publisher_error",
    "sharing_error",
)

COUNTERS = (
    Described(
        "kvtier_asked_blocks",
        "counter",
        "Blocks asked for: the sum of kvtier_hit_blocks_total and kvtier_miss_blocks_total.",
        lambda status: {(): sum(status["hits"].values()) + sum(status["misses"].values())},
    ),
    Described(
        "kvtier_hit_blocks",
        "counter",
        "Blocks asked for and given, by the tier that had them.",
        several("hits"),
        ("tier",),
        alone(TIERS),
    ),
    Described(
        "kvtier_miss_blocks",
        "counter",
        "Blocks asked for and not given, by reason.",
        several("misses"),
        ("reason",),
        alone(MISSES),
    ),
    Described(
        "kvtier_hit_tokens",
        "counter",
        "Tokens given, by the tier that had them.",
        several("tokens"),
        ("tier",),
        alone(TIERS),
    ),
    Described(
        "kvtier_lookups",
        "counter",
        "Prefixes asked for: all of it was given, some, or nothing.",
        several("lookups"),
        ("result",),
        alone(RESULTS),
    ),
    Described("kvtier_stored_blocks", "counter", "Blocks saved.", one("stored")),
    Described("kvtier_stored_bytes", "counter", "Bytes of payloads saved.", one("stored_nbytes")),
    Described(
        "kvtier_refused_blocks",
        "counter",
        "Blocks that a save, a pin or another host got no room for, by reason.",
        several("refused"),
        ("reason",),
        alone(REFUSED),
    ),
    Described(
        "kvtier_dropped_blocks",
        "counter",
        "Blocks that left the last tier of this host that had them, by reason.",
        several("dropped"),
        ("reason",),
        alone(DROPPED),
    ),
    Described("kvtier_faults", "counter", "What went wrong, by reason.", several("faults"), ("reason",), alone(FAULTS)),
    Described(
        "kvtier_moves",
        "counter",
        "Blocks copied from one tier to another.",
        several("moves", apart=">"),
        ("source", "target"),
        WAYS,
    ),
    Described(
        "kvtier_moved_bytes",
        "counter",
        "Bytes of their payloads.",
        several("moved_nbytes", apart=">"),
        ("source", "target"),
        WAYS,
    ),
    Described(
        "kvtier_admission_refused_blocks",
        "counter",
        "Blocks that left memory and were not written to NVMe, by reason.",
        several("admission", "refused"),
        ("reason",),
        alone(("first_sight", "endurance")),
    ),
    Described(
        "kvtier_asked_again_blocks",
        "counter",
        "Blocks that this host evicted, and that were asked for and missed afterwards; once for each eviction.",
        one("asked_again"),
    ),
    Described(
        "kvtier_saved_prefill_seconds",
        "counter",
        "Seconds that engines would have computed for the tokens given, by the rate that they say themselves.",
        one("saved_seconds"),
    ),
    Described(
        "kvtier_codec_stored_bytes",
        "counter",
        "Bytes of payloads saved, by the name of their plan; of blocks of which the client said how large the KV is.",
        each("stored_nbytes", "codecs"),
        ("codec",),
        alone(KINDS),
    ),
    Described(
        "kvtier_codec_raw_bytes",
        "counter",
        "Bytes of the KV of these blocks as the model has it.",
        each("raw_nbytes", "codecs"),
        ("codec",),
        alone(KINDS),
    ),
    Described(
        "kvtier_checksum_failures",
        "counter",
        "Payloads that were not what was stored: found by readers in memory (cpu), and when they came from a tier.",
        several("checksum_failures"),
        ("tier",),
        alone(TIERS),
    ),
)
