"""Where payloads are kept.

    base        the seam: what every tier can do
    gpu         slots of one preallocated tensor on a CUDA device, or in host memory to emulate one
    copying     how batches go there and back: neighbours in one copy, each way on a stream of its own
    shared      what a tier says of its memory to those who read it in place
    cpu         slots of the arena itself
    nvme        a log over fixed regions of one preallocated file

A tier stores payloads under their addresses and knows no codecs, no leases and no other tier: which block is where, and
when it moves, is the hierarchy's business. Bytes never travel through a call: a tier is given the arena when it is
made, and calls name slots. So the same tier object serves in one process or inside an actor.

The CPU tier is the arena: its blocks already lie where engines read them, so it copies nothing and is not a `Tier`. It
grants slots; the others copy from and to them.

Who evicts differs. The GPU tier refuses when it is full, and the hierarchy removes victims of its own choice first. The
NVMe tier makes room by itself, because a log can only let go of whole regions, and reports what went (`dropped`).

The GPU tier's memory can be opened by engines on its device (`kvtier.memory.device`), which then decode blocks where
they are. It knows nothing of them: a slot stays what it is until its key is removed, and its generation moves on before
it is granted again. Who reads what is known above, and above it is decided when a key is removed.

What is verified differs too. The NVMe tier verifies every payload that it reads. The GPU tier copies memory to memory
and verifies nothing: a checksum of each block would cost more than the copy.
"""
