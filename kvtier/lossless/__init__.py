"""Fewer bytes for the same payload, on its way to NVMe or to another host.

    planes   16-bit elements to two planes of bytes and back: kernels
    frame    a payload to a frame that is smaller, or to nothing; a frame back to the payload
    choice   which method a path is worth, from a sample and measured speeds

The elements of 16-bit KV are nearly random in their mantissas, not in their exponents. LZ4 finds nothing in the two
mixed. So the bits are sorted first: exponents into one plane, sign and mantissa into another. The first is compressed,
the second is kept as it is: trying it costs time and gains 0 to 2 percent (V of a model's first layer, which depends on
nothing but the token). bfloat16 KV shrinks 1.19 times with LZ4, 1.44 times with zstd, which does it at level 1 better
and faster than above.

Only payloads of the plan "raw" with elements of 2 bytes gain. Quantised codes hold little more than their entropy:
zstd takes 1.0 to 1.2 from them, for the same time. `frame.suits` looks at the plan; wider elements, which a header
does not tell, show when their first megabyte does not shrink.

A frame is never larger than the payload, because there is none then: what does not shrink travels as it is, and begins
with a block header in place of a frame's. A frame carries no checksum of its own: the payload in it has one over
everything, and whoever unpacks calls `kvtier.block.verify_payload` anyway. What the decoders are given is not trusted:
they stay inside the memory that they are given, and that is all that is promised of altered frames.
"""
