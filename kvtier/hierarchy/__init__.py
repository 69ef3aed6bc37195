"""The brain of one host: which block is where, who reads it, and what moves.

    answers     what it answers, in process and over the door
    table       one row a block: tiers, slot, generation, ages
    ledger      who holds which leases and reservations
    cache       the hot path: match, release, reserve, commit
    room        how the CPU tier gets room: what can be freed at once, what must be written down first
    mover       the background: staging, promotion, demotion, moves on request
    stats       plain counters, and the status made of them

One lock guards table, pool, policies and ledger; it is held for arithmetic only, never for I/O. Whatever a background
thread copies it pins first (a slot reference), so nobody needs the lock while bytes move. The rules of eviction:

* a save never waits: it gets a slot that is free, or one whose block is also in another tier; otherwise it is refused,
  counted, and the mover is woken;
* the mover keeps the CPU tier below its high watermark by writing the oldest blocks to NVMe, children first;
* a block that leaves the last tier that held it is dropped, and the index is told.

A row keeps its block's parent, so that every tier can hold to prefix order. What is lost on restart is this package's
state only: the NVMe tier's inventory fills the table again.
"""
