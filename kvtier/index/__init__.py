"""Which host of the fleet holds which block.

The index is soft state. Each host's own table is the truth about that host; what the index says is a hint that a fetch
may find wrong, and what it does not say costs a miss. So nothing here waits for, or fails with, its server.

* A key is the bare 34-byte block address, without prefix: 34 is a length that no other key of kvtier has, a lookup
  builds no strings, and `MGET` takes the caller's list as it is. Fleets that share a server take a database each.
* A value is a version byte and 11 bytes a replica, at most 8 of them, without TTL. Key, value and their share of the
  hash table take 115 bytes of Redis memory a block with one replica and 140 with two (`benchmarks.index`).
* A lookup is one `MGET` (on a Cluster one write of `GET`s to each master, all before the first answer is read) and a
  dictionary access a key: equal values are decoded once. It ends in its time: the background has opened its
  connections before, and finds the masters (one server, Sentinels, a Cluster). Entries of hosts that are not in the
  node table under this incarnation, or have not been heard of for ten seconds, are dead.
* Updates go through a bounded set, where a key's last word wins, and a thread that tells them in batches. A single
  master gets a batch as one script: it checks that this incarnation is still the host's current one, merges the replica
  into each value, drops dead ones next to it, and is the heartbeat. On a Cluster each key has a script of its own. A
  batch may be repeated without harm.
* Every batch leaves its number in the host's record, and on a Cluster with each master's witness. A number that is
  gone, or lower than was confirmed, is how a flush, an empty or old restart and a lossy fail-over show:
  `needs_publish`.
* A host's number comes from its name's hash, so an emptied table gives the same numbers again; its incarnation is
  Redis's clock in seconds, or the last one plus one.
* Lookups that fail open a breaker: for a growing pause there is no answer at once, and the thread probes.
* `sweep`: one host at a time goes through all keys, slowly, and removes what only the dead told.

    address     where Redis is: one server, Sentinels, a Cluster; TLS, users
    find        who the masters are now
    lookups     values of many keys in time;  ready: the connections for that
    masters     the same servers as the background uses them;  shards: one of each for every master
    reader      lookups, the breaker, who is alive
    writer      what is told, in which order;  pending, tell: what waits, and one batch
    sweep       rounds through everything
    redis       RedisIndex: all of it for one host
    local       LocalIndex: the same in a dictionary
"""
