"""What an engine talks to.

    cache      Cache: a host's kvtier, from `connect()` or `open()`
    space      Space: one keyspace of it: match, save, prefetch, move
    hit        Hit: a leased prefix; load
    rows       Rows: bytes under names that their owner gives them
    pools      Pools: a public pool and a session's own blocks: load, save
    reading    where slots are read, and into what they are decoded: CPU memory or a GPU's
    writing    what is encoded, in CPU memory or a GPU's, and its way into slots
    device     the GPU tier's memory, attached when KV is loaded on its device for the first time
    save       the background that encodes and commits
    description  what a router must know of a keyspace to name its blocks
    scope      what these share: keyspace, codec, session
    headers    proof that a slot holds the block that was asked for
    session    Session: what lies below: in process (local), or behind a door (door)
    way        how a door is reached, and where slots are read and written: the mapped arena (mapping), or memory
               that is filled from another host (remote, staged, bulk, credentials)

An engine's thread pays for one control call and one decode: `match` asks the host once and gets slots; `load` decodes
straight from the mapped arena into the caller's tensors; then generations are compared, which proves that no slot was
granted again while it was read. `save` returns at once: blocks are encoded into reserved slots on a thread of the
client, and become visible with `commit`.

Where the GPU tier's memory is attached, blocks that it has are leased and decoded there, those before and behind them
in the arena, in the same load. What cannot be attached costs only speed: everything then comes through the arena.

An engine with a prefix cache of its own loads and saves from an `origin` on: what it has is not fetched, not checked,
and its own to answer for. Its scheduler's lookup is the one that counts; its workers match `again`.

A session's own blocks are keyed by its secret and by the public block that they follow, so nobody else finds them and
the public pool never answers with what only one session may see.

Nothing here fails a request. A host that is gone, slow or restarted is a miss with a reason in `Cache.counters`; what
raises is the caller's own bug (`UsageError`) or KV that cannot be stored (`UnsupportedKV`, `KVMismatch`).
"""
