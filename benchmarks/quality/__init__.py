"""What does it cost a language model to hold less KV: less precise, fewer tokens, or both?

    texts       prose, code, documentation and dialogue, committed with their sources and licences
    model       the language model that a wheel carries, or a user's own
    presets     pruning policies by text, and layer by layer
    strategies  what is measured: a plan, a pruning, or both
    passage     one text: its context's exact KV, what pruning looks at, and what the model says next
    stored      KV as a cache gives it back, and the bits that it took
    pruned      KV that lost tokens
    loss        what the model says next when it reads that, against the exact KV
    interval    a mean over texts and how sure it is
    measure     every text, every strategy
    speed       how fast the plans' codecs are on blocks of the model's shape
    frontier    what is best for how few bytes
    report      table and figures
    plot        pictures
    pages       tables of a page of the docs
    save        the file that `kvtier advise` reads
    unusable    why nothing can be measured

The setting is a store's: the whole context was encoded once from exact bfloat16 KV, block by block through the codec
that the cache uses, and the next tokens are scored, teacher-forced, by a model that attends to what was decoded. The
loss is the Kullback-Leibler divergence of its predictions from those over the exact KV, in nats a token. Bits a value
are all bytes of the encoded bodies over the elements of the context's KV: scales, zero points, padding and exact tokens
included. The model itself computes in float32, so that nothing else is measured.

What is pruned loses its tokens once, after the context, by the attention among the context's own tokens: what is scored
had no say. What a KV head has left is then encoded as a sequence of its own; tokens that fill no block stay in 16 bits.
"""
