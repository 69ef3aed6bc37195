"""How the KV of a block becomes bytes, and back.

A `Codec` (see `base`) writes the body of a block straight into a slot and reads it straight into the caller's arrays:
one fused loop each way, no copy in between, no allocation that grows with the KV, the GIL released. `raw` keeps the
elements; `int8` keeps a byte each and a scale a token and KV head. `registry` finds codecs by plan text or by the
number in a block header; `plan` maps the names that people write to canonical plan texts without importing numba.

    KVView.of(kv, spec)          what the caller has: addresses and strides of every layer's K and V
      batch.arguments            every bound checked, once a call
        raw_kernel, int8_kernel  loops over blocks, layers and parts
          int8_rows              rows: one token of one head, one scale
            lanes, intrinsics    64 elements at a time; memcpy, streaming stores

Kernels work on addresses, so each has one signature whatever the strides, and read-only maps are no special case. They
are compiled at import and kept on disk (`jit` says where); a process that finds them there needs a third of a second.
Every rounding is to nearest even and written out, so that the bits are the same on every CPU, and on the GPU.

A large call writes past the cache (streaming stores), which on a memory-bound copy is worth more than anything else:
memory is not read before it is overwritten. `reference` says in slow numpy what the kernels must give, bit for bit. A
new codec is one file, one line in `registry` and one subclass of `kvtier.testing.codec.CodecKit`.
"""
