"""Save and load KV as an engine would, with tensors in place of a model.

    python examples/any_engine.py

With `kvtier up` running it uses this host's kvtier, and a second run finds what the first one saved; without, it uses a
cache in this process.
"""

import time

import torch

import kvtier
from kvtier.errors import SessionError


def host() -> kvtier.Cache:
    """This host's kvtier, or one in this process."""
    try:
        return kvtier.connect()
    except SessionError as exc:
        print(f"({exc}; going on without)")
        return kvtier.open({"cpu": {"capacity": "1GiB"}})


def main() -> None:
    """Load what is stored, compute the rest, save it; twice."""
    spec = kvtier.KVSpec(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")
    tokens = list(range(1000, 3048))
    with host() as cache:
        space = cache.keyspace(spec, model="example", revision="1", plan="int8")
        for turn in (1, 2):
            kv = torch.empty(spec.layers, 2, len(tokens), spec.kv_heads, spec.head_dim, dtype=torch.bfloat16)
            began = time.perf_counter()
            with space.match(tokens, wait=5.0) as hit:
                loaded = hit.load(kv)
                seconds = time.perf_counter() - began
                print(f"turn {turn}: loaded {loaded:,} tokens in {1000 * seconds:.1f} ms, from {hit.tiers}")
                kv[:, :, loaded:].normal_()  # what a model would compute
                done = space.save(tokens, kv, start=loaded, after=hit)
            print(f"turn {turn}: {done.result()}")


if __name__ == "__main__":
    main()
