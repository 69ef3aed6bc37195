"""Control between processes: what is said, and how errors and bytes are read.

    kvtier.proto    the calls; `kvtier_pb2*` are made of it by `python -m kvtier.rpc.generate` and committed
    protocol        version, names and bounds that both sides know
    conversions     packed bytes to keys and arrays, and back
    channel         how a client's channel is set up, and what a failed call means

A session is one `Attach` stream. On it travel what needs no answer (leases given back, bad blocks reported); calls with
an answer are unary. The two are ordered by a count: a call says how many notes were sent before it, and the host hears
those first. So `release` costs nothing and the next `match` still finds the room.

The client names leases and reservations by the number of the call that asks for them. When a call's answer is lost or
late, the client gives back that number; otherwise what the host granted meanwhile would stay granted until the session
ends. A number of an ended session names nothing, so a late release can never hit somebody else's lease.
"""
