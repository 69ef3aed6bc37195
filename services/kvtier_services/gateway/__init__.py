"""Where engines come in.

    control     the door: a grpc.aio server on a Unix socket, in the loop of whoever owns the arena
    calls       what each call does, whichever door it came by
    guests      one session as the host sees it
    gates       who is let in by which door
    remote      the door for clients of other hosts; `doors`: both together
    bulk        their KV, by Arrow Flight, on threads of its own; `connections` cuts what it would keep,
                `arrow` bounds its memory
    callers     tenants: what they have, may see and may take; `tokens`, the file, and `register`, what it says now
    tls         the host's certificate; `audit`, what was done with the right to touch others

Nothing here blocks the loop. What only takes the hierarchy's lock is called directly: the lock is held for arithmetic.
What waits (staging, moves) is a future of the hierarchy that is awaited with a deadline; what may do I/O (the status of
other tiers) runs on a thread.

A session is its stream. However that ends, its leases are released and what it was writing into is quarantined; see
`kvtier.rpc` for what client and host owe each other.
"""
