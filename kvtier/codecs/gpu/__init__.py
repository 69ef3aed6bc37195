"""The codec on a GPU, in Triton: the same bodies as on the CPU, byte for byte. The only place that imports triton.

    DeviceView.of, .paged(kv, spec)   what the caller has there, also in an engine's pages: a table of addresses
      GpuCodec                        encodes from it and decodes into it
        jobs, traits, tiles           parts of layers that are stored alike: one launch works through all of them
          decode                      a tile of tokens and channels a program
          encode_rows                 scales of a token's own; encode_shared: scales that tokens share, in two passes
          encode_halves, exact        16-bit codes; elements as they are
            places, codes, scales     where a program works; units of codes; scales and zero points
            sums, halves              ordered sums and rotation; float16 by integers

Kernels are compiled for what a part is stored as (`Stored`) and what the KV looks like (`Seen`). Where it lies, and
where everything in a body lies, they read from tables: another page table, or another layer, is not another kernel.

The bits are those of `reference` because nothing is left to the compiler: products and sums are never fused, division
and root are the rounded ones, a sum over a row has the order that is written, and scales are rounded by arithmetic on
bits. Elements move 16 bytes at a time where the caller's strides allow it, which `DeviceView` finds out.

Triton's interpreter (`TRITON_INTERPRET=1`, set before the import) runs all of it on the CPU, and so do the tests;
`tests/gpu/run.sh` runs the same tests on a device and times it.
"""

from kvtier.codecs.gpu.codec import GpuCodec
from kvtier.codecs.gpu.view import DeviceView

__all__ = ["DeviceView", "GpuCodec"]
