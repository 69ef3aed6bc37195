"""The brain of one host: which block is where, who reads it, and what moves.

    answers     what it answers, in process and over the door
    table       one row a block: tiers, slot, generation, ages
    ledger      who holds which leases and reservations
    cache       Hierarchy: what sessions call
    loading     the hot path of loads: match
    saving      the hot path of saves: reserve, commit
    limits      what one session may hold, and the watermarks
    report      what people are told: status, inspect
    room        how the CPU tier gets room: what can be freed at once, what must be written down first
    mover       the background: staging, promotion, demotion, moves on request
    transfer    copies between the arena and the other tiers
    stats       plain counters

One lock guards table, pool, policies and ledger; it is held for arithmetic only, never for I/O. Whatever a background
thread copies it pins first (a slot reference), so nobody needs the lock while bytes move. The rules of eviction:

* a save never waits: it gets a slot that is free, or one whose block is also in another tier; otherwise it is refused,
  counted, and the mover is woken;
* the mover keeps the CPU tier below its high watermark by writing the oldest blocks to NVMe, children first; where
  there is no NVMe tier the oldest are dropped when somebody needs their room, not before;
* a save never evicts the ancestors of what it saves;
* a block that leaves the last tier that held it is dropped, and the index is told.

A row keeps its block's parent, so that every tier can hold to prefix order; where it is not known (the inventory of a
tier), the next request for the chain tells. What is lost on restart is this package's
state only: the NVMe tier's inventory fills the table again.
"""
