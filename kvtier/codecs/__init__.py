"""How the KV of a block becomes bytes, and back.

    scheme       how one part (K or V) of a layer is stored: precision, and what shares a scale
      plan       schemes by layer, part and age; names for people, one canonical text for keys and headers
        layout   where everything of a body lies: a table that tells every kernel, on any device, what a plan means
    reference    what bodies mean, in slow numpy (`formats`: rounding and packing); kernels must equal it, bit for bit
    view         what a caller has, as addresses and strides, paged or not
    cpu          the codec of every plan in numba
    gpu          the same in Triton; bodies are the same bytes
    registry     the codec of a plan and a spec, and of a block header

A `Codec` writes the body of a block straight into a slot and reads it straight into the caller's arrays: one fused
pass each way, no copy in between, no allocation that grows with the KV, the GIL released. Every rounding is to nearest
even and written out, so that the bits are the same on every CPU, and on the GPU. Nothing is quantised twice: codecs
are given exact values, and a payload never changes after commit.

A new precision is a line in `scheme`, a kind in `layout`, its meaning in `reference`, and its unit of 32 codes in
`cpu.units` and in `gpu`; `kvtier.testing.codec.CodecKit` says what a codec must keep to.
"""
