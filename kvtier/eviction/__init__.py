"""Which blocks leave a tier first, and which are worth writing to the next one.

A policy orders blocks; it moves nothing. The hierarchy keeps one policy object a tier, tells it what comes, goes and is
used, and asks it for victims. The order within a chain is not the policy's to choose: a block is useless without its
ancestors, so a parent leaves after its children.

    base        EvictionPolicy: what the hierarchy asks
    prefix      PrefixPolicy: any rule, held to prefix order
    lru         rule: used longest ago leaves first (default)
    fifo        rule: came longest ago leaves first
    s3fifo      rule: what was not used since it came leaves soon
    cost        rule: what is cheap to compute again leaves first
    order       blocks by rank: thousands are ranked in one step, and the lowest are found without sorting all
    uses        how often blocks were used
    registry    policies by name
    ghosts      blocks that are remembered without their bytes
    admission   what is written to NVMe, by pressure

A rule gives ranks, and prefix order is nearly free: whoever uses a block uses all its ancestors, so a chain is ranked
tail first and every parent is above its children.

    ranks (LRU) of a chain of four after two uses, of which the second went two blocks deep

        head  8 - 7 - 2 - 1  tail        the tail leaves first

Where ranks say otherwise (a leased child, a chain whose middle was saved anew), the children that the policy knows of
each block decide.
"""
