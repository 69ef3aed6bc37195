"""Fewer bytes for the same payload, on its way to NVMe or to another host.

    method   what there is to choose from
    planes   16-bit elements to two planes of bytes and back: kernels
    frame    a payload to a frame that is smaller, or to nothing; a frame back to the payload
    choice   which method a path is worth, from a sample and measured speeds

The elements of 16-bit KV are nearly random in their mantissas, not in their exponents. LZ4 finds nothing in the two
mixed. So the bytes are sorted first: high bytes into one plane, low bytes into another. The high plane is compressed,
alone. The low plane is kept as it is: in the KV of real models it gains in one place only, V of the first layer, which
depends on nothing but the token. bfloat16 KV shrinks 1.2 times with LZ4 and 1.46 times with zstd at level 1; higher
levels are slower and no better.

Only payloads that keep whole elements of 2 bytes gain (float16 1.16 times, and with zstd alone). Quantised codes hold
little more than their entropy: zstd takes 1.0 to 1.2 from them, for the same time. `frame.suits` looks at the plan;
what does not shrink for other reasons is given up after its first megabyte.

A frame is never larger than the payload, because there is none then: what does not shrink travels as it is, and begins
with a block header in place of a frame's. A frame carries no checksum of its own: the payload in it has one over
everything, and whoever unpacks calls `kvtier.block.verify_payload` anyway. What the decoders are given is not trusted:
they stay inside the memory that they are given, and that is all that is promised of altered frames.
"""
