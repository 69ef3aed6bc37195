"""Plans carried out by the processor: fused numba kernels, compiled once and kept on disk (`jit` says where).

    codec             PlanCodec: one call each way, every bound checked by `batch`
      encode, decode  the kernels: blocks, layers, parts
        exact         elements as they are, in the longest runs that there are
        direct        the commonest codes straight into memory, past the cache
        channels      scales that tokens share: a pass for the extremes, a pass for the codes
        row_scales    scales of one token: both while its row is in the cache
        tokens, rows  one token's elements between a caller's memory, strided or paged, and a row of float32
        scales        scales and zero points of many groups at once
          packing     rows of float32 to codes and back, by kind of code
            units, sums, halves, lanes, intrinsics     vector code, 32 elements at a time

Nearly all work goes through rows of float32 that stay in the first-level cache: so what knows the KV's dtype and what
knows the codes add up, and do not multiply. A row is a few tokens, all heads. Kernels work on addresses, so each has
one signature whatever the strides, and a layout's table tells them all that differs between plans. A large call writes
past the cache (streaming stores): memory is not read before it is overwritten.
"""
