"""How much memory, and which plan? Answers before any is bought.

    models      shapes of the KV of well-known models
    footprint   bytes of a sequence's KV, under a plan, pruning and pages
    strategies  what plans and pruning were measured to cost a language model
    recommend   those that fit and are accurate enough, ranked, with reasons
    advice      all of that for one question
    page        for people
    pictures    as pictures

And for a load of one's own:

    trace       request traces
    tiers       tiers that keep books and no bytes
    replay      a trace through a host without memory: what it would have found where
    sweep       the same with more and less memory, and under other plans
    report      for people and for machines
    plot        as a picture
    answer      from a question to its answer

A replay decides with the code of a host: its block table, eviction policy, admission, prefix order, watermarks, size
classes, staging, and the NVMe tier's region log with its one writer. Not there are the bytes: slots that nobody maps,
an arena without memory, a file without content. Nor is time: a request is over before the next one begins, NVMe keeps
up, and nobody holds a lease meanwhile; so what races and back-pressure cost in a real host is not in the figures.
"""
