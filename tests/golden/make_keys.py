"""Write keys.json from docs/keys.md alone, with nothing of kvtier: `python tests/golden/make_keys.py`."""

import json
from hashlib import sha256
from pathlib import Path
from struct import pack


def text(value):
    return value.encode()


def u32(value):
    return pack("<I", value)


def sized(value):
    return u32(len(value)) + value


def spec_bytes(spec):
    numbers = [spec[k] for k in ("layers", "first_layer", "kv_heads", "head_dim", "v_head_dim", "block_tokens")]
    return pack("<7IB", *numbers, len(spec["dtype"]), spec["mla"]) + text(spec["dtype"])


def root(spec, space):
    pairs = sorted((text(k), text(v)) for k, v in space["overrides"].items())
    value = {k: text(v) for k, v in space.items() if k not in ("overrides", "tp_size")}
    value["overrides"] = b"".join(sized(k) + sized(v) for k, v in pairs)
    value["tp_size"], value["spec"] = u32(space["tp_size"]), spec_bytes(spec)
    order = ("tenant", "model", "revision", "spec", "layout", "overrides", "kv_scales", "tp_size")
    order += ("adapter", "adapter_digest", "plan", "recipe")
    return sha256(b"kvtier/keyspace/1\0" + b"".join(sized(text(k)) + sized(value[k]) for k in order)).digest()


def chain(key, tokens, step, extra):
    for i in range(len(tokens) // step):
        block = b"".join(map(u32, tokens[i * step : (i + 1) * step]))
        key = sha256(key + block + (bytes.fromhex(extra[i]) if extra else b"")).digest()
        yield key


GQA = {"layers": 30, "first_layer": 0, "kv_heads": 3, "head_dim": 64, "v_head_dim": 64, "block_tokens": 64}
GQA |= {"dtype": "bfloat16", "mla": False}
MLA = {"layers": 3, "first_layer": 58, "kv_heads": 1, "head_dim": 576, "v_head_dim": 0, "block_tokens": 4}
MLA |= {"dtype": "float32", "mla": True}
PLAIN = {"tenant": "", "model": "m", "revision": "", "layout": "canonical", "overrides": {}, "kv_scales": ""}
PLAIN |= {"tp_size": 1, "adapter": "", "adapter_digest": "", "plan": "raw", "recipe": ""}
FULL = {"tenant": "t\u00e9nant", "model": "org/model", "revision": "0f3a", "layout": "opaque:vllm 0.11 avx512 16"}
FULL |= {"overrides": {"rope.factor": "8.0", "a": ""}, "kv_scales": "ks", "tp_size": 8, "adapter": "lora"}
FULL |= {"adapter_digest": "d1", "plan": "int8", "recipe": "h2o(256)"}
CASES = [
    (GQA, PLAIN, [], None),
    (GQA, PLAIN, list(range(130)), None),
    (GQA | {"block_tokens": 1}, PLAIN, [0, 2**32 - 1, 0], None),
    (MLA, FULL, [7, 7, 7, 7, 1, 2, 3, 4], None),
    (MLA, FULL, [7, 7, 7, 7, 1, 2, 3, 4], ["", "c0ffee"]),
]


def vector(spec, space, tokens, extra):
    keys = list(chain(root(spec, space), tokens, spec["block_tokens"], extra))
    digest = sha256(b"kvtier/spec/1\0" + spec_bytes(spec)).hexdigest()
    inputs = {"spec": spec, "keyspace": space, "tokens": tokens, "extra": extra}
    outputs = {"spec_canonical": spec_bytes(spec).hex(), "spec_digest": digest, "root": root(spec, space).hex()}
    name = sha256(b"page").digest()
    outputs["row_named_sha256_of_page"] = sha256(b"kvtier/row/1\0" + root(spec, space) + name).hexdigest()
    outputs |= {"keys": [k.hex() for k in keys], "addresses_of_rank_3": [(k + pack("<H", 3)).hex() for k in keys]}
    return inputs | outputs


if __name__ == "__main__":
    vectors = ",\n".join(json.dumps(vector(*case)) for case in CASES)
    Path(__file__).with_name("keys.json").write_text(f"[\n{vectors}\n]\n")
