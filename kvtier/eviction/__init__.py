"""Which blocks leave a tier first.

A policy orders blocks; it moves nothing. The hierarchy keeps one policy object a tier, tells it what comes, goes and is
used, and asks it for victims. The order within a chain is not the policy's to choose: a block is useless without its
ancestors, so a parent leaves after its children. With least-recently-used this costs nothing, because whoever uses a
block uses all its ancestors: a chain is stamped tail first, so that every parent is younger than its children.

    stamps of a chain of four after two uses, of which the second went two blocks deep

        head  8 - 7 - 2 - 1  tail        the tail leaves first

Where the stamps say otherwise (a leased child, a chain whose middle was saved anew), the children that a policy knows
of each block decide.
"""
