"""One sequence whose KV shrinks while it grows: a flow over codecs, pruning and shared prefixes, for transformers.

    recipe   which layers lose precision, which lose tokens, and what is too young for either
    pieces   what has aged: 64 tokens of one head, encoded once; tokens leave it as bytes
    rows     what has not: in 16 bits
    store    one layer: exact first tokens, aged pieces, recent tokens
    cache    a cache of transformers over the stores
    report   bytes, stage by stage
    flow     match, compute, save; settle; generate

>>> flow = Flow(model, "int4*snap_kv(0.7)", space=space)
>>> flow.generate(ids, max_new_tokens=200)
>>> print(flow.report)

Nothing is quantised twice: a token's 16 bits are encoded when it is old enough, and what is encoded is only ever
decoded into a scratch, or dropped. A prompt is computed on exact KV, and its blocks are saved before anything else;
nothing that was computed on approximate KV is.
"""

from kvtier.flow.recipe import LayerRecipe, Recipe, Stage, parse_recipe
from kvtier.flow.report import Report

try:
    from kvtier.flow.cache import FlowCache
    from kvtier.flow.flow import Flow
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError("a flow needs transformers: pip install 'kvtier[transformers]'", name=exc.name) from exc

__all__ = ["Flow", "FlowCache", "LayerRecipe", "Recipe", "Report", "Stage", "parse_recipe"]
