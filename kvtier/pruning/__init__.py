"""Pruning: tokens leave one sequence's KV, so that it stays small however long it grows.

    evidence    what is known of a layer when it is decided
    scorers     which tokens matter: recency, accumulated attention, attention of a window, key norm
    budgets     how many stay: a share, a number, a threshold; by layer; by KV head
    policy      scorer x budget, and what is never dropped; its text is a recipe
    presets     h2o, streaming_llm, snap_kv, pyramid_kv, attention_threshold
    text        policies as text
    kept        the columns of a layer that stay, in order, and gathering them
    attention   weights from queries and keys, never the whole matrix
    rope        keys turned to other positions
    layer       what is known of one layer of a sequence
    pruner      one sequence: observes attention, prunes
    models      models of transformers: their queries, their caches

>>> pruner = Pruner(h2o(0.5), layers)
>>> with watched(model, pruner):
...     model(ids, cache=cache, position_ids=...)
...     if pruner.due:
...         prune(cache, pruner)

A policy is decided layer by layer, from keys, values, the queries of the last tokens and the attention that was
received, and says which columns stay: always in order, of every KV head, the protected among them. Query heads that
share a KV head count with their mean. Tokens keep the positions they were computed at, so that the next one stands at
the true length; or positions are closed up and keys turned to them. Both are right, and only mixing them is not.

What is pruned is approximate, and depends on the whole context it was pruned in: its KV is stored under
`Policy.recipe(context)`, never where exact KV is looked for. Attention is observed from when a model is watched: of a
prefix that was loaded, what its own queries looked at is not known.
"""

from kvtier.pruning.budgets import Budget, ByHead, Length, Pyramid, Ratio, Threshold
from kvtier.pruning.evidence import Evidence
from kvtier.pruning.kept import Kept
from kvtier.pruning.models import prune, watched
from kvtier.pruning.policy import Policy
from kvtier.pruning.presets import attention_threshold, h2o, pyramid_kv, snap_kv, streaming_llm
from kvtier.pruning.pruner import Pruner
from kvtier.pruning.rope import Rope
from kvtier.pruning.scorers import KeyNorm, Mass, Recency, Scorer, Window
from kvtier.pruning.text import parse_policy

__all__ = [
    "Budget",
    "ByHead",
    "Evidence",
    "Kept",
    "KeyNorm",
    "Length",
    "Mass",
    "Policy",
    "Pruner",
    "Pyramid",
    "Ratio",
    "Recency",
    "Rope",
    "Scorer",
    "Threshold",
    "Window",
    "attention_threshold",
    "h2o",
    "parse_policy",
    "prune",
    "pyramid_kv",
    "snap_kv",
    "streaming_llm",
    "watched",
]
