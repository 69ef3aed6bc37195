"""The NVMe tier: a log over fixed regions of one preallocated file.

    regions     what lies on disk: superblock, regions, frames
    log         what is where, in memory: pure bookkeeping, no I/O
    record      a payload and its place; is what was read whole?
    packing     payloads in fewer bytes (`kvtier.lossless`), before they are written
    trial       whether that makes reads faster on this device
    transfer    batches of records between the file and slots, on several threads
    io          the operating system's calls, and whole reads and writes made of them
    recovery    from a folder to a log: create, set aside, scan
    health      when a failing device is left alone, and when it is tried again
    store       NvmeTier, which joins them

Payloads are appended to one region at a time; when the log wraps, the oldest region is taken whole, so there is nothing
to compact, and the disk sees large sequential writes. The design is that of CacheLib's block cache and of foyer's block
engine. What keeps it honest:

* The bytes are written first, the key is visible after. Only one batch is written at a time, and a key is acknowledged
  when everything before it in its region is whole: so all that a crash can tear is the end of the newest region.
* Each record begins with a frame that names its region's life, its own place, the frame before it and how far the
  region was whole. Recovery follows that chain, so nothing of a region's former life can be found, wherever it lies;
  the end of the newest region, which may be torn, is verified then. Everything else is verified when it is read.
* A region with readers is not taken until they are done.

Payloads that get smaller by it may lie in the file packed; others are read and written in place, by direct I/O between
slots and device. A file may hold both: what a record is, its frame says. Everybody above sees the payload.

Kill -9 loses nothing that was acknowledged. Power loss may lose what the kernel or the device had not yet written; what
is torn by it fails verification and is a miss. Removing a key forgets it in memory only: it may be back after a
restart, with the right bytes.
"""

from kvtier.tiers.nvme.store import NvmeTier

__all__ = ["NvmeTier"]
