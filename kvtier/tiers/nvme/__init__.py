"""The NVMe tier: a log over fixed regions of one preallocated file.

    regions     how the file is cut: superblock, regions
    frames      what lies in a region: begin, frames, removals
    table       what lies at its end: all that the frames say
    seal        checksums of these
    life        regions, and what is in them, in memory
    log         what is where: pure bookkeeping, no I/O
    record      a payload and its place; is what was read whole?
    packing     payloads in fewer bytes (`kvtier.lossless`), before they are written
    trial       whether that makes reads faster on this device
    transfer    batches of records between the file and slots, on several threads
    io          the operating system's calls, and whole reads and writes made of them
    recovery    from a folder to a log: create, set aside, open
    scan        what a file holds, as far as it can be trusted
    health      when a failing device is left alone, and when it is tried again
    state       what the calls of a tier share
    writer      appends, makes room, carries over
    store       NvmeTier, which joins them

Payloads are appended to one region at a time; when the log wraps, the oldest region is taken whole, so there is nothing
to compact, and the disk sees large sequential writes. Blocks of it that were read there are appended again before, in
their order, up to half a region: CacheLib calls that reinsertion. The design is that of its block cache and of foyer's
block engine. What keeps it honest:

* The bytes are written first, the key is visible after. Only one batch is written at a time, and a key is acknowledged
  when everything before it in its region is whole: so all that a crash can tear is the end of the newest region.
* A life of a region begins with a page of its own, written before the first record: from then on nothing of its former
  life counts. Each record begins with a frame that names the life, its own place, the frame before it and how far the
  region was whole. Recovery follows that chain; the end of the newest region, which may be torn, is verified then.
  Everything else is verified when it is read.
* A full region ends with a table of its records, and the newest gets one when the tier is closed, and now and then
  before. So opening reads a table a region, and frames only where there is none, or behind it. A table says what the
  chain said when it was written, and counts for that life only.
* Removing appends a record of the removed keys. Whatever it speaks of lies before it, and is overwritten before it.
* A region with readers is not taken until they are done.

Payloads that get smaller by it may lie in the file packed; others are read and written in place, by direct I/O between
slots and device. A file may hold both: what a record is, its frame says. Everybody above sees the payload.
`docs/format.md` has all of it byte by byte.

Kill -9 loses nothing that was acknowledged. Power loss may lose what the kernel or the device had not yet written; what
is torn by it fails verification and is a miss. Counters tell the write amplification: `device_nbytes` is all that was
written, `payload_nbytes` what was accepted.
"""

from kvtier.tiers.nvme.store import NvmeTier

__all__ = ["NvmeTier"]
