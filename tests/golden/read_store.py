"""Read an NVMe store by docs/format.md and docs/keys.md alone, with nothing of kvtier.

python tests/golden/read_store.py FOLDER     lists what is stored
"""

import re
import sys
from pathlib import Path
from struct import unpack_from

import numpy as np
import pyarrow as pa
import xxhash

PAGE, FRAME, ROW, FOOTER = 4096, 150, 78, 72


def xxh(content):
    return xxhash.xxh3_64_intdigest(content)


def up(nbytes, unit=PAGE):
    return -(-nbytes // unit) * unit


def sealed(content, nbytes):
    """The seal behind the first bytes; None when it is wrong."""
    (seal,) = unpack_from("<Q", content, nbytes)
    return seal if seal == xxh(content[:nbytes]) else None


def read_store(folder):
    """Payloads by address, unpacked and verified."""
    file = Path(folder, "regions").read_bytes()
    magic, version, _, page, store, size, count = unpack_from("<8sHHI16sQQ", file)
    assert (magic, version, page) == (b"KVTIERRL", 2, PAGE)
    assert sealed(file, 48) is not None
    lives = [life for i in range(count) if (life := read_life(file, store, PAGE + i * size, size))]
    numbers = [life["sequence"] for life in lives]
    lives = sorted((life for life in lives if numbers.count(life["sequence"]) == 1), key=lambda life: life["sequence"])
    ends = {life["former"]: life["former_tail"] for life in lives}
    places = {}
    for life in lives:
        end = ends.get(life["sequence"])
        for number, row in enumerate(life["rows"]):
            at = unpack_from("<I", row, 68)[0] * PAGE
            if end is not None and number >= life["tabled"] and at >= end:
                break
            follow(file, life["start"] + at, row, places)
    found = {address: payload_at(file, *place) for address, place in places.items()}
    return {address: payload for address, payload in found.items() if whole(address, payload)}


def read_life(file, store, start, size):
    """The present life of a region: its begin, and its rows by table and walk."""
    magic, owner, sequence, place, former, former_tail, _ = unpack_from("<8s16sQQQQQ", file, start)
    root = sealed(file[start : start + PAGE], 64)
    if (magic, owner, place) != (b"KVTBEGIN", store, start) or root is None or not sequence:
        return None
    rows, at, last = read_table(file, store, root, start + size) or ([], PAGE, root)
    tabled = len(rows)
    while at + PAGE <= size:
        frame = file[start + at : start + at + PAGE]
        magic, owner, _, life, place, previous, _ = unpack_from("<8s16sQQQQQ", frame)
        seal = sealed(frame, FRAME - 8)
        if (magic, owner, life, place, previous) != (b"KVTFRAME", store, sequence, start + at, last) or seal is None:
            break
        row = frame[64 : 64 + ROW]
        if at + record_nbytes(row) > size:
            break
        rows.append(row)
        at, last = at + record_nbytes(row), seal
    life = {"sequence": sequence, "start": start, "former": former, "former_tail": former_tail}
    return life | {"rows": rows, "tabled": tabled}


def read_table(file, store, root, end):
    magic, owner, of, count, tail, last, digest = unpack_from("<8s16sQQQQQ", file, end - FOOTER)
    if (magic, owner, of) != (b"KVTTABLE", store, root) or sealed(file[end - FOOTER : end], 64) is None:
        return None
    rows = file[end - FOOTER - count * ROW : end - FOOTER]
    if xxh(rows) != digest:
        return None
    return [rows[i * ROW : (i + 1) * ROW] for i in range(count)], tail, last


def record_nbytes(row):
    nbytes, packed, kind = *unpack_from("<I", row, 34), *unpack_from("<IH", row, 72)
    return up(FRAME + nbytes) if kind else PAGE + up(packed or nbytes)


def follow(file, at, row, places):
    """Let one record have its say."""
    (nbytes,), (packed, kind) = unpack_from("<I", row, 34), unpack_from("<IH", row, 72)
    if not kind:
        places[row[:34]] = (at + PAGE, nbytes, packed)
        return
    addresses = file[at + FRAME : at + FRAME + nbytes]
    assert row[:8] == xxh(addresses).to_bytes(8, "little")
    for i in range(0, nbytes, 34):
        places.pop(addresses[i : i + 34], None)


def payload_at(file, at, nbytes, packed):
    if not packed:
        return file[at : at + nbytes]
    magic, version, method, _, size, rest = unpack_from("<8sHHIQQ", file, at)
    assert (magic, version, size, rest) == (b"KVTIERLL", 1, nbytes, packed - 32)
    codec = pa.Codec({1: "lz4_raw", 2: "zstd"}[method])
    elements, at = size // 2, at + 32
    step, out = -(-elements // -(-elements // 524288)), np.empty((elements, 2), np.uint8)
    for first in range(0, elements, step):
        m = min(step, elements - first)
        (high,) = unpack_from("<I", file, at)
        plane = file[at + 4 + m : at + 4 + m + high]
        out[first : first + m, 0] = np.frombuffer(file, np.uint8, m, at + 4)
        out[first : first + m, 1] = np.frombuffer(plane if high == m else codec.decompress(plane, m), np.uint8)
        at += 4 + m + high
    return out.tobytes()


def header_of(payload):
    names = "magic version size codec rank tokens position body checksum key spec n space expires"
    return dict(zip(names.split(), unpack_from("<8sHHHHIIQQ32s32sH6x16sQ", payload), strict=True))


def plan_of(payload):
    return payload[136 : 136 + header_of(payload)["n"]].decode()


def whole(address, payload):
    head = header_of(payload)
    size, end = head["size"], head["size"] + head["body"]
    return (
        (head["magic"], head["version"]) == (b"KVTIERBK", 2)
        and sealed(payload, size - 8) is not None
        and len(payload) == end
        and xxh(payload[size:end]) == head["checksum"]
        and address == head["key"] + head["rank"].to_bytes(2, "little")
    )


POSITIVE = {
    2: [0.452780035, 1.510417608],
    3: [0.245094179, 0.756005281, 1.343909279, 2.151945705],
    4: [0.128395030, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571],
}
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "e4m3": 8, "e5m2": 8, "bf16": 16, "fp16": 16}


def schemes_of(plan, layer):
    """Schemes of K and V in a layer, and how many first tokens are exact."""
    if plan.startswith("layers("):
        for part in plan[7:-1].split(";"):
            numbers, _, inner = part.partition(":")
            first, _, last = numbers.partition("-")
            if int(first) <= layer <= int(last or first):
                return schemes_of(inner, layer)
    if sinks := re.fullmatch(r"sinks:(\d+)\((.*)\)", plan):
        return schemes_of(sinks[2], layer)[0], int(sinks[1])
    both = re.fullmatch(r"K=(.*),V=(.*)", plan)
    return ((both[1], both[2]) if both else (plan, plan)), 0


def body_of(payload, layers, tokens, heads, dim, dtype):
    """KV as `[layers, 2, tokens, heads, dim]`: bits of 16-bit elements, or float32."""
    head, plan = header_of(payload), plan_of(payload)
    body, at = payload[head["size"] :], 0
    out = np.empty((layers, 2, tokens, heads, dim), np.float32 if dtype == "float32" else np.uint16)
    for layer in range(layers):
        schemes, sinks = schemes_of(plan, layer)
        for part, scheme in enumerate(schemes):
            out[layer, part], at = part_of(body, at, scheme, sinks if head["position"] == 0 else 0, out[0, 0], dtype)
    assert at == head["body"]
    return out


def part_of(body, at, scheme, sinks, like, dtype):
    tokens, heads, dim = like.shape
    if scheme == "raw":
        return np.frombuffer(body, like.dtype, like.size, at).reshape(like.shape), at + like.nbytes
    precision, granularity, *options = scheme.split("/") if "/" in scheme else (scheme, "")
    bits, begin, rest = BITS[precision], at, tokens - sinks
    exact = np.frombuffer(body, like.dtype, sinks * heads * dim, at).reshape(sinks, heads, dim)
    at += up(exact.nbytes, 2)
    row = up(heads * dim, 32) * bits // 8
    codes = unpacked(np.frombuffer(body, np.uint8, rest * row, at), bits, rest)[:, : heads * dim]
    codes, at = codes.reshape(rest, heads, dim), at + rest * row
    if precision in ("bf16", "fp16"):
        values = widened(codes.astype(np.uint16), {"bf16": "bfloat16", "fp16": "float16"}[precision])
    else:
        kind, _, group = granularity.partition(":")
        shape = {
            "tensor": (1, 1, 1),
            "token": (rest, heads, 1),
            "group": (rest, heads, -(-dim // min(int(group or 1), dim))),
            "channel": (-(-rest // int(group or 1)), heads, dim),
        }[kind]
        shared = []
        for _ in range(2 if "asym" in options else 1):
            numbers = np.frombuffer(body, np.float16, int(np.prod(shape)), at).astype(np.float32).reshape(shape)
            at += 2 * numbers.size
            if kind == "channel":
                numbers = np.repeat(numbers, int(group), axis=0)[:rest]
            if kind == "group":
                numbers = np.repeat(numbers, min(int(group), dim), axis=2)[:, :, :dim]
            shared.append(numbers)
        scale, zero = shared[0], shared[1] if len(shared) > 1 else np.float32(0)
        values = meant(precision, options, codes, bits) * scale + zero
        if "hadamard" in options:
            values = rotated(values, dim & -dim)
    return np.concatenate([exact, narrowed(values, dtype)]), begin + up(at - begin, 64)


def unpacked(stored, bits, rows):
    unit = stored.reshape(-1, 4 * bits).astype(np.int64)
    if bits == 16:
        codes = unit[:, ::2] | unit[:, 1::2] << 8
    elif bits == 8:
        codes = unit
    elif bits == 4:
        codes = np.concatenate([unit & 15, unit >> 4], axis=1)
    else:
        codes = np.concatenate([unit[:, :8] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        if bits == 3:
            word = sum(unit[:, 8 + i] << 8 * i for i in range(4))
            codes |= (word[:, None] >> np.arange(32) & 1) << 2
    return codes.reshape(rows, -1)


def meant(precision, options, codes, bits):
    if "lloyd" in options:
        half = np.array(POSITIVE[bits], np.float32)
        return np.concatenate([-half[::-1], half])[codes]
    if precision in ("e4m3", "e5m2"):
        mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[precision]
        exponent, rest = codes >> mantissa & (2 ** (7 - mantissa) - 1), codes & (2**mantissa - 1)
        size = np.where(exponent > 0, 1 + rest / 2**mantissa, rest / 2**mantissa) * 2.0 ** (
            np.maximum(exponent, 1) - bias
        )
        return np.where(codes & 128, -size, size).astype(np.float32)
    return (codes - (2 ** (bits - 1) if "sym" in options else 0)).astype(np.float32)


def rotated(values, run):
    step = 1
    while step < run:
        pairs = values.reshape(-1, 2, step)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(values.shape)
        step *= 2
    return values * np.float32(run**-0.5)


def widened(stored, dtype):
    return (
        stored.view(np.float16).astype(np.float32) if dtype == "float16" else (stored.astype("<u4") << 16).view("<f4")
    )


def narrowed(values, dtype):
    if dtype == "float32":
        return values
    if dtype == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


if __name__ == "__main__":
    for _address, _payload in read_store(sys.argv[1]).items():
        _head = header_of(_payload)
        _said = _address.hex(), _head["position"], _head["tokens"], len(_payload), plan_of(_payload)
        sys.stdout.write(" ".join(map(str, _said)) + "\n")
