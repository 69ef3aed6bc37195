"""The tier that is other hosts: payloads out of their arenas into slots of ours.

    base        what a host must do so that others can have its blocks: lend them, take them back, hear offers
    wire        frames, byte for byte; handshake, how hosts prove themselves. Pure functions
    link        one connection, plain or TLS, every wait with a deadline; tls; dial, how one is opened
    guest       a connection that has not proved itself yet; gate, one thread for all that are silent
    server      answers those that ask
    peer        one other host: links at rest, its pace, whether it is avoided; book, who and where all are
    choose      which host for which block; fetch, over one link; fetcher, until all are there; tier, the `Tier`

The requester pulls. One request names many blocks; the answer's payloads go out of the lender's arena by `sendmsg` and
come by `recv_into` into reserved slots, without a copy on either side, and each is verified right after it came, while
the next is on its way. A block is leased while it is sent, some 32 MiB of a request at a time. Who hangs, dies or lies
is a counted miss: other hosts that have the block are asked while there is time, and it is avoided for a while, longer
each time. When `read` returns, nothing writes into its slots any more: whatever carries them ends by deadlines of its
own.

Plain sockets, because of what `benchmarks.peer` measured on two cores, in one run, of a raw TCP socket's speed at 32
MiB of 2 MiB payloads, all verified: these sockets 0.91, Arrow Flight 0.32, 0.42 and 0.44 over 1, 2 and 4 streams, gRPC
0.33. Several sockets gain nothing over loopback, where both ends share the cores; large shares use some, because
networks limit what one may carry. TLS costs most of it (0.25): Python hands it over in records of 16 KiB.

Hosts prove that they know the fleet's secret, which never travels, and each frame is authenticated in its place, so
nobody can ask, replay or inject. Payloads have checksums, not MACs: against who can change packets, and for secrecy,
use TLS, mutual, with certificates of the fleet's own authority.
"""
