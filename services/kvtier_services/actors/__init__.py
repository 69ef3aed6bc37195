"""The processes of one host, as plain classes: no Ray here.

    cpu_tier      CpuTierActor: owns the arena, the hierarchy and the door
    hands         the other tiers' processes, as it sees them: connected, looked after, several of a tier as one
    nvme_tier     NvmeTierActor   \
    gpu_worker    GpuWorkerActor  /  one tier each, for the hierarchy
    service       what these two have in common: a tier, served to one hierarchy
    remote        RemoteTier: such a tier, seen from the hierarchy; fence: how it is cut off
    wire          what travels between them: packed keys and slots, never payloads
    reconcile     the block table after a tier was away
    index         from the settings to an index

A Ray restart reruns `__init__` and nothing else, so everything that must be there again begins in it.

What must never happen is that a tier's process writes into a slot that was given to somebody else meanwhile. So:

* a hierarchy introduces itself (`hello`) before it uses a tier; the tier finishes what it was doing for the one before
  it, and from then on answers no other;
* while it serves, a tier's process holds a lock in the arena's folder, with its pid in it; a call that fails in any
  other way than by an answer ends that process, and fails only when the kernel has let go of the lock. Ray starts it
  again;
* the CPU tier does so with the tiers of a hierarchy that died, before it grants a slot.
"""
