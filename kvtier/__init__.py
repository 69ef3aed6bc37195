"""A tiered cache of attention KV for LLM serving.

>>> cache = kvtier.connect()                     # the host's kvtier (`kvtier up`); kvtier.open() builds one in process
>>> spec = kvtier.KVSpec.from_hf(model.config, dtype=model.dtype)
>>> space = cache.keyspace(spec, model="SmolLM2-135M-Instruct", revision="q4_1", plan="int8")
>>> with space.match(token_ids) as hit:          # the longest stored prefix, pinned while open
...     n = hit.load(kv)                         # verified tokens; kv beyond n is undefined
>>> done = space.save(token_ids, kv, start=n, after=hit)

Each package's docstring is its design note; `docs/architecture.md` says how they fit together.
"""

from kvtier.client.cache import Cache
from kvtier.client.connect import connect, open  # noqa: A004
from kvtier.client.hit import Hit
from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.keys import Keyspace
from kvtier.spec import KVSpec

__version__ = "0.1.0"
__all__ = ["Cache", "Hit", "KVSpec", "Keyspace", "Saved", "Space", "connect", "open"]
