"""One sequence whose KV shrinks while it grows: a flow over codecs, pruning and shared prefixes, for transformers.

    recipe   which layers lose precision, which lose tokens, and what is too young for either
    pieces   what has aged: 64 tokens of one head, encoded once; tokens leave it as bytes
    rows     what has not: in 16 bits
    store    one layer: exact first tokens, aged pieces, recent tokens
    cache    a cache of transformers over the stores
    report   bytes, stage by stage
    prefix   what is stored of a prompt, and storing the rest: a space, or a public pool and a session's own blocks
    flow     match, compute, save; settle; generate
    state    what a sequence's KV has become, as bytes
    archive  keeps it for one session

>>> flow = Flow(model, "int4*snap_kv(0.7)", space=space)
>>> flow.generate(ids, max_new_tokens=200)
>>> print(flow.report)

Nothing is quantised twice: a token's 16 bits are encoded when it is old enough, and what is encoded is only ever
decoded into a scratch, or dropped. A prompt is computed on exact KV, and its blocks are saved before anything else;
nothing that was computed on approximate KV is. What became of a context answers for that context alone, under the
recipe, to who has the session's secret.
"""

from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError
from kvtier.flow.recipe import LayerRecipe, Recipe, Stage, parse_recipe
from kvtier.flow.report import Report

if TYPE_CHECKING:
    from kvtier.flow.cache import FlowCache
    from kvtier.flow.flow import Flow

__all__ = ["Flow", "FlowCache", "LayerRecipe", "Recipe", "Report", "Stage", "parse_recipe"]


def __getattr__(name: str) -> Any:
    """Import what needs transformers when it is asked for: recipes can be read without."""
    if name not in ("Flow", "FlowCache"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvtier.flow import cache, flow
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "transformers":
            raise
        raise ConfigError("a flow needs transformers: pip install 'kvtier[transformers]'") from exc
    return flow.Flow if name == "Flow" else cache.FlowCache
