"""The brain of one host: which block is where, who reads it, and what moves.

    answers     what it answers, in process and over the door
    table       one row a block: tiers, slot, generation, ages
    ledger      who holds which leases and reservations
    cache       Hierarchy: what sessions call
    loading     the hot path of loads: match
    saving      the hot path of saves: reserve, commit
    seeking     what other hosts have: looked up in the index
    lending     what other hosts are lent, and what they offer
    sharing     what others are offered: copies of what is hot, and all of it when this host goes
    publishing  the index is told anew when it lost something, and compared with the table all the time
    checking    the same for everything at once, when somebody asks
    retention   what stays longer than its turn and what goes before it: pins, expiry, dropping on request
    accounts    how much of each tier each keyspace takes
    streaming   slots of somebody who does not map the arena
    pace        how fast blocks come from each tier, and whether loading them is worth it
    limits      what one session may hold, the watermarks, and which rules choose
    report      what people are told: status, inspect
    placement   which host holds how much of a chain, for routers
    room        how the CPU tier gets room: what can be freed at once, what must be written down first
    staging     blocks on their way into the arena, one flight a key
    flight      blocks that are on their way together, and who waits for them
    promotion   blocks on their way into the GPU tier
    demotion    blocks on their way out of the CPU tier
    mover       the background, moves on request, and the queues of all this
    flush       writing down what would be lost with memory
    device      who reads blocks in the GPU tier's own memory, and what leaves it after them
    stock       what a tier has, and what it has not heard that it is to forget
    transfer    copies between the arena and the other tiers
    state       all that is known, and the few ways in which it changes
    stats       plain counters
    demand      notes of what is asked for and dropped, read later: the window, and regrets
    window      what was asked for during the last hour, and the most that could have been a hit
    sketch      how many different blocks those were
    hot         the most hit prefixes
    news        what changed in the tiers, for those who follow a host from outside

One lock guards table, pool, policies and ledger; it is held for arithmetic only, never for I/O. Whatever a background
thread copies it pins first (a slot reference), so nobody needs the lock while bytes move. The rules of eviction:

* a save never waits: it gets a slot that is free, or one whose block is also in another tier; otherwise it is refused,
  counted, and the mover is woken; while the mover is writing and cannot keep up, blocks that it would have written last
  leave unwritten, counted, instead;
* the mover keeps the CPU tier below its high watermark by writing the oldest blocks to NVMe, children first; where
  there is no NVMe tier the oldest are dropped when somebody needs their room, not before; NVMe admits by pressure
  (`kvtier.eviction.admission`), and what it does not admit leaves unwritten;
* a save never evicts the ancestors of what it saves;
* a block that leaves the last tier that held it is dropped, and the index is told;
* every queue is bounded: what comes when one is full is refused, counted.

A load takes blocks as they come: a session's stream of matches gets what is there at once, and each batch of the rest
as it lands, so that decoding overlaps reading.

What this host does not know is looked up in the index, away from the lock, and what other live hosts have of it becomes
rows of the tier PEER, staged like those of any other tier. Such a row is in no other tier; the index, inventories and
saves do not see it, and it goes when its block is here, could not be fetched, or was not wanted for some seconds.

Who has the GPU tier's memory attached is leased slots there, from what the table knows: that tier's process is asked
nothing. It frees a slot only when told to remove the key, and for keys that are leased it is told later.

A row keeps its block's parent, so that every tier can hold to prefix order; where it is not known (the inventory of a
tier), the next request for the chain tells. What is lost on restart is this package's
state only: the NVMe tier's inventory fills the table again.
"""
