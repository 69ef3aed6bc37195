"""Where payloads lie in memory.

    arena       one region of shared memory that every process of the host maps
    filling     makes a region usable in steps, in the background
    limits      whether an arena fits: file system, machine, control groups
    pool        which byte ranges of a region are slots, and how often each is referred to
    sequences   SequencePool: memory of a process's own for sequences that grow, each in one piece
    lock        file locks that fall when their process dies
    pinning     page-locking for CUDA
    device      the GPU tier's memory, and its handle for engines on the same GPU
    cuda        allocations and handles of the CUDA driver

The arena is bytes only; the pool is arithmetic only. The hierarchy joins them: it is the only one that grants slots,
and so the only one that writes the arena's tables. A slot is a multiple of 4 KiB, begins on a 4 KiB page and is named
by its offset. Two tables hold one word for each page of the arena:

    generations   at a slot's first page: moves on each time the slot is granted again; a reader compares it after its
                  copy
    writers       number of the session that may be writing there, 0 for none; it is in the file, so that it outlives
                  the process that grants

An arena's file has its full size from the beginning, and its memory in steps: allocated, cleared, pinned, and only
then granted from. How much is allocated stands in the file, so a new owner goes on where the dead one was; how much is
ready is the owner's own, because pinning is. A pool that is smaller than the arena at first quarantines what a former
owner's sessions may still be writing into when it grows over it: nothing there was granted in this life before.

Several models share one arena without fragmenting it because the pool cuts segments, each for one size class, and takes
a segment back whole. Classes are exact sizes, not powers of two: a model's blocks all have one size, so nothing is lost
to rounding, and there are only as many classes as there are models and plans.
"""
