"""Which host of the fleet holds which block.

The index is soft state. Each host's own table is the truth about that host; what the index says is a hint that a fetch
may find wrong, and what it does not say costs a miss. So nothing here waits for, or fails with, its server.

* A key is the bare 34-byte block address, without prefix: 34 is a length that no other key of kvtier has, a lookup
  builds no strings, and `MGET` takes the caller's list as it is. Fleets that share a server take a database each.
* A value is a version byte and 11 bytes a replica, at most 8 of them, without TTL. Key, value and their share of the
  hash table take 115 bytes of Redis memory a block with one replica and 135 with two (`benchmarks.index`).
* A lookup is one `MGET` and a dictionary access a key: equal values (same host, same size) are decoded once. Entries of
  hosts that are not in the node table under this incarnation, or have not been heard of for ten seconds, are dead. The
  table is a cache that the background thread refreshes every second, and sooner when a value names an unknown life.
* Updates go through a bounded set, where a key's last word wins, and a thread that tells them in batches, each one
  script: it checks that this incarnation is still the host's current one, merges the replica into each value, drops
  dead ones next to it, and is the heartbeat. A batch may be repeated without harm.
* Every batch leaves its number in the host's record. A record that is gone, or has a lower number than Redis had
  confirmed, is how a flush, an empty or old restart and a lossy fail-over show: `needs_publish` turns true.
* A host's number comes from its name's hash, so an emptied table gives the same numbers again; its incarnation is
  Redis's clock in seconds, or the last one plus one.
* Lookups that fail open a breaker: for a growing pause they answer nowhere at once, and the thread probes.
"""
