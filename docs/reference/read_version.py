"""Restores a version of a ckptstore store (format-v1.md) without ckptstore; checks every digest.

python read_version.py STORE RUN [OUT.npz]   (a run gives its newest version; or a version's id)
"""

import io
import json
import struct
import sys
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3

OPS = "create-run declare save annotate tag untag fork rollback delete undelete pin unpin relocate"
OPS += " set-policy verified quarantine condemn swept replicate replicated"
OPS += " name-replica unname-replica set-aside"
COLUMNS = {"raw": "u4", "pack": "u4", "offset": "u8", "stored": "u4", "inner": "u4", "slab": "u4"}
DTYPES = {k: v for k, v in np.sctypeDict.items() if np.dtype(v).isbuiltin == 1}  # not ml_dtypes'
DTYPES |= {"bfloat16": "u2", "bits16": "u2", "complex32": "u4"}  # others are bytes
SHARES = ((1,), (1, 1, 2), (1, 1), (1,) * 8, (1, 1), (1,) * 4, (1,) * 8)  # of planes, by layout
FIRST = {"d": 1, "o": 2, "dd": 2, "ct": 1, "l": 1, "t": 1, "q": 2}  # where the items begin
NUMBERS = dict(zip(range(0xCA, 0xD4), "fdBHIQbhiq", strict=True))  # MessagePack code to struct's
FLOAT8 = {"float8_e4m3fn": (3, 7, 0x7E), "float8_e5m2": (2, 15, 0x7C)}  # bits, bias, last number
QUIET = {"float64": 0x7FF8 << 48, "float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
QUIET |= dict.fromkeys(FLOAT8, 0x7F)
Array = np.ndarray
SIZED = ((0xDE, dict, 2), (0xDC, list, 2), (0xD9, str, 1), (0xC4, bytes, 1))


def require(condition: object, problem: str) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(problem)


def envelope(path: Path) -> tuple[dict[str, Any], str]:
    """Return body and digest of store.json or a commit."""
    data = path.read_bytes()
    digest = blake3(body := data[8:-78]).hexdigest()
    right = data[:8] == b'{"body":' and data[-78:] == b',"blake3":"%s"}\n' % digest.encode()
    require(right, f"{path} does not match its digest")
    return json.loads(body), digest


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the commits in order, without the records that a later commit sets aside."""
    paths, log = {int(path.stem): path for path in folder.glob("[0-9]*/[0-9]*.json")}, []
    number, due = max(paths, default=0), None
    while number:
        require(number in paths, f"{folder}: commit {number} is missing")
        commit, digest = envelope(paths[number])
        right = commit["number"] == number and due in (None, digest)
        require(right, f"{paths[number]}: no chain")
        log.append(commit)
        number, due = commit["ops"][0].get("follows", number - 1), commit["previous"]
        require(0 <= number < commit["number"], f"{folder}: no chain")
    require(not due, f"{folder}: no chain")
    return log[::-1]


def find_save(store: Path, name: str) -> dict[str, Any]:
    """Return the save operation of the newest version of a run, or of a version's id."""
    body, _ = envelope(store / "store.json")
    needs = (body["magic"], body["format"], *body["features"])
    require(needs == ("ckptstore-store", 1), f"no store that this can read: {needs}")
    versions, heads = {}, {}
    for commit in read_log(store / "commits"):
        for op in commit["ops"]:
            unknown = f"commit {commit['number']}: unknown operation {op['op']}"
            require(op["op"] in OPS.split(), unknown)
            if op["op"] in ("save", "replicate"):
                versions[op["version"]] = op
            elif op["op"] == "relocate":
                versions[op["version"]]["manifest"] = op["manifest"]
            elif op["op"] == "delete":
                heads = {run: v for run, v in heads.items() if v not in op["versions"]}
            if op["op"] in ("save", "rollback") or op.get("head"):
                heads[op["run"]] = op["version"]
    found = versions.get(heads.get(name, name))
    require(found and found["manifest"], f"there is no run or version {name}: name it by its id")
    return found


def unpack(data: io.BytesIO) -> Any:  # noqa: ANN401
    """Return the next MessagePack value."""
    first = data.read(1)[0]
    if first < 0x80 or first in (0xC0, 0xC2, 0xC3) or first >= 0xE0:
        return {0xC0: None, 0xC2: False, 0xC3: True}.get(first, first - (first >= 0xE0) * 256)
    if code := NUMBERS.get(first):
        return struct.unpack(f">{code}", data.read(struct.calcsize(code)))[0]
    if first < 0xC0:
        kind, size = (dict, list, str, str)[first // 16 - 8], first & (31 if first >= 0xA0 else 15)
    else:
        kind, width = next((k, w << first - base) for base, k, w in SIZED if base <= first)
        size = int.from_bytes(data.read(width), "big")
    if kind in (dict, list):
        items = [unpack(data) for _ in range(size * (2 if kind is dict else 1))]
        return items if kind is list else dict(zip(items[::2], items[1::2], strict=True))
    return data.read(size).decode() if kind is str else data.read(size)


def unzstd(frame: bytes, size: int) -> bytes:
    """Return what a zstd frame of exactly `size` bytes holds."""
    require(zstandard.frame_content_size(frame) == size, "a zstd frame of another length")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)


def read_manifest(store: Path, save: dict[str, Any]) -> dict[str, Any]:
    """Return the map inside of a version's manifest, its columns as arrays."""
    pointer = save["manifest"]
    data = (store / pointer["key"]).read_bytes()
    right = (len(data), blake3(data).hexdigest()) == (pointer["bytes"], pointer["blake3"])
    require(right, f"{pointer['key']} is not what the commit names")
    magic, form, flags, zero, raw, length, digest = struct.unpack_from("<8sHHIQQ32s", data)
    require((magic, form, flags | 7, zero) == (b"CKPTMANI", 1, 7, 0), "no manifest of format 1")
    right = len(data) == 64 + length and blake3(data[64:]).digest() == digest
    require(right and raw <= max(16 << 20, 2000 * length), "a damaged manifest")
    body = unpack(io.BytesIO(unzstd(data[64:], raw)))
    require(body["version"] == save["version"], "a manifest of another version")
    for name, dtype in COLUMNS.items():
        body[name] = np.frombuffer(body[name], dtype)
        require(len(body[name]) * 32 == len(body["ids"]), "columns of different lengths")
    body["base"] = np.frombuffer(body.get("base", b"\xff" * 4 * len(body["raw"])), "u4")
    return body


def join(layout: int, planes: list[bytes]) -> bytes:
    """Return the elements whose planes are given."""
    parts = [np.frombuffer(plane, np.uint8) for plane in planes]
    if layout in (1, 2):  # exponent | sign and upper mantissa | for float32 the lower 16 bits
        upper, lower = (part.astype(np.uint32) for part in parts[:2])
        bits = (lower & 0x80) << 8 | upper << 7 | lower & 0x7F
        return (bits.astype("u2") if layout == 2 else bits << 16 | parts[2].view("u2")).tobytes()
    stacked = np.stack(parts[::-1] if layout == 3 else parts, axis=1)
    if layout == 3:  # float64, turned left by one bit, the highest byte first
        stacked = (turned := stacked.view("u8")) >> np.uint64(1) | turned << np.uint64(63)
    return stacked.tobytes()


def apply(layout: int, planes: list[bytes], base: bytes, flags: int, turn: int) -> bytes:
    """Return the elements whose folded differences to those of a base are given."""
    parts = [np.frombuffer(plane, "u1") for plane in planes[::-1]]
    if flags & 2:  # planes of four bits
        both = [np.stack([part & 15, part >> 4], axis=1).ravel() for part in parts]
        parts = [low | high << 4 for low, high in zip(both[::2], both[1::2], strict=True)]
    unsigned, signed, top = f"u{len(parts)}", f"i{len(parts)}", 8 * len(parts) - 1
    bits = np.stack(parts, axis=1)[: len(base) // len(parts)].copy().view(unsigned).ravel()
    bits = bits >> turn | bits << top + 1 - turn if turn else bits
    if flags & 1:  # runs of elements in the order of their exponents
        keys = np.frombuffer(base, unsigned) >> (23, 7, 55)[layout - 1] & 255
        runs = np.arange(len(keys)) >> 16
        bits[np.lexsort((keys, runs))] = bits.copy()
    steps = bits >> 1 ^ (bits & 1) * bits.dtype.type((2 << top) - 1)
    if layout not in (1, 2, 3):
        return (np.frombuffer(base, unsigned) + steps).tobytes()
    ordered = lambda bits: bits ^ (bits.view(signed) >> top).view(unsigned) >> 1  # noqa: E731
    return ordered(ordered(np.frombuffer(base, unsigned)) + steps).tobytes()


def read_piece(store: Path, body: dict[str, Any], row: int) -> bytes:
    """Return one piece, checked against its id."""
    raw, place, offset, stored, inner, slab = (int(body[name][row]) for name in COLUMNS)
    pack = body["packs"][16 * place : 16 * place + 16].hex()
    with (store / "packs" / pack[:2] / f"{pack}.pack").open("rb") as file:
        file.seek(offset)
        head, data = file.read(64), file.read(stored)
    magic, codec, layout, _, raw_bytes, length, _, _, _, crc = struct.unpack("<4sBBHIIQ32sII", head)
    where = f"pack {pack}, chunk at byte {offset}"
    require(magic == b"CHNK" and zlib.crc32(head[:60]) == crc, f"{where}: damaged header")
    require((raw_bytes, length, len(data)) == (slab, stored, stored), f"{where}: other lengths")
    require(codec < 5 and layout < 7, f"{where}: unknown codec {codec} or layout {layout}")
    base, shares, old, flags = int(body["base"][row]), SHARES[layout], b"", 0
    require((codec > 2) == (base < len(body["base"])), f"{where}: a base, or none, in vain")
    if codec == 1:
        data = unzstd(data, raw_bytes)
    elif codec > 1:
        if codec > 2:  # the base is no delta itself; its id comes first
            require(not body["base"][base] < len(body["base"]), f"{where}: a base of a base")
            old, shares = read_piece(store, body, base), (1,) * sum(shares)
            require(data[:32] == blake3(old).digest(), f"{where}: another base")
            flags, turn, data = (0, 0, data[32:]) if codec == 3 else (*data[32:34], data[34:])
            require(flags < 4 and turn < 8 and (flags % 2 == 0 or 0 < layout < 4), "unknown form")
        sizes = [raw_bytes // sum(shares) * share for share in shares]
        sizes = [-(-sizes[0] // 2)] * 2 * len(sizes) if flags & 2 else sizes
        at, planes = 4 * len(sizes), []
        for length, size in zip(struct.unpack_from(f"<{len(sizes)}I", data), sizes, strict=True):
            part = data[at : at + (length & 0x7FFFFFFF)]
            planes.append(unzstd(part, size) if length >> 31 else part)
            at += len(part)
        data = apply(layout, planes, old, flags, turn) if codec > 2 else join(layout, planes)
    right = blake3(data[inner : inner + raw]).digest() == body["ids"][32 * row : 32 * row + 32]
    require(right, f"{where}: damaged")
    return data[inner : inner + raw]


@np.errstate(all="ignore")
def to_float32(dtype: str, data: bytes) -> np.ndarray:
    """Return floats of any type as float32."""
    if dtype in FLOAT8:
        return float8(dtype)[np.frombuffer(data, "u1")]
    if dtype == "bfloat16":
        return (np.frombuffer(data, "u2").astype("u4") << 16).view("f4")
    return quiet("float32", np.frombuffer(data, dtype).astype("f4"))


@np.errstate(all="ignore")
def from_float32(dtype: str, values: np.ndarray) -> bytes:
    """Return the nearest floats of a type, ties to even; a NaN is the quiet one of its sign."""
    if dtype == "float32":
        return values.tobytes()
    if dtype == "bfloat16":
        bits = values.view("u4").astype("u8")
        made = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("u2")
    elif dtype in FLOAT8:
        size, book = np.abs(values).astype("f8"), float8(dtype)[:128].astype("f8")
        book = book[: FLOAT8[dtype][2] + 1]  # to the largest, and to what lies beyond it if any
        book[-1] = 65536 if dtype == "float8_e5m2" else book[-1]
        low = np.clip(np.searchsorted(book, size, "right") - 1, 0, len(book) - 2)
        left, right = size - book[low], book[low + 1] - size
        made = (low + ((left > right) | (left == right) & (low % 2 == 1))).astype("u1")
        made |= np.signbit(values).astype("u1") << 7
    else:
        made = values.astype(dtype)
    return quiet(dtype, made, np.isnan(values), np.signbit(values)).tobytes()


@np.errstate(all="ignore")
def float8(dtype: str) -> np.ndarray:
    """Return the values of the 256 codes of a type of 8 bits."""
    bits, bias, last = FLOAT8[dtype]
    exponent, part = np.divmod(np.arange(128), 1 << bits)
    size = ((exponent > 0) + part / (1 << bits)) * 2.0 ** (np.maximum(exponent, 1) - bias)
    size[last:] = size[last:] if dtype == "float8_e4m3fn" else np.inf
    size[last + 1 :] = np.nan
    return quiet("float32", np.concatenate([size, -size]).astype("f4"))


def quiet(dtype: str, made: Array, nan: Array | None = None, sign: Array | None = None) -> Array:
    """Return floats in which each NaN is the quiet one of its sign."""
    nan, sign = (np.isnan(made), np.signbit(made)) if nan is None else (nan, sign)
    bits = made.view(f"u{made.itemsize}").copy()
    bits[nan] = QUIET[dtype] + (np.asarray(sign)[nan].astype(bits.dtype) << 8 * made.itemsize - 1)
    return bits.view(made.dtype)


def codebook(code: int) -> np.ndarray:
    """Return what each of the 256 codes of a block stands for, as a share of its scale."""
    if code == 0:
        return (np.arange(256, dtype="u1").view("i1") / 127).astype("f4")
    found = [Fraction(0), Fraction(1)]
    for decade in range(7):
        parts, top = 2 ** (decade + code - 1), Fraction(10) ** (decade - 6)
        for part in range(parts):
            share = top * (1 + Fraction(9 * (2 * part + 1), 2 * parts)) / 10
            found += [share, -share] if code == 1 else [share]
    return np.array([float(value) for value in sorted(found)], "f4")


def follow(body: dict[str, Any], recipe: list[Any], stored: list[bytes]) -> bytes:
    """Return the bytes of a tensor that follows from others, checked against their digest."""
    place, kind, sources, code, block, digests, _ = recipe
    names = [body["dtypes"][body["tensors"][at][0]] for at in (place, sources[0])]
    if kind == 0:
        values = to_float32(names[1], stored[sources[0]])
    else:
        require(kind == 1 and code < 3, "an unknown recipe")
        codes = np.frombuffer(stored[sources[0]], "u1")
        scales = np.repeat(np.frombuffer(stored[sources[1]], "f4"), block)
        values = codebook(code)[codes] * scales[: len(codes)]
    made = from_float32(names[0], values)
    require(blake3(made).digest() == digests[:32], f"tensor {place} has another digest")
    return made


def collect(node: Any, path: str, tensors: list[Any], into: dict[str, Any]) -> None:  # noqa: ANN401
    """Put what is below a node of the skeleton into `into`, by dotted path."""
    tag = node[0] if isinstance(node, list) else None
    if tag in FIRST and len(node) > FIRST[tag]:
        rest, keyed = node[FIRST[tag] :], tag in ("d", "o", "dd", "ct")
        for key, item in zip(rest[::2], rest[1::2], strict=True) if keyed else enumerate(rest):
            collect(item, f"{path}.{key}" if path else str(key), tensors, into)
    elif tag in ("x", "Q"):  # name and state of an adapter; quantized: the integers come first
        collect(node[2 if tag == "x" else 1], path, tensors, into)
        if tag == "Q":  # then dtype, shape, scheme, parameters
            collect(node[5], f"{path}.quantizer", tensors, into)
    elif tag == "V":  # a view: index, dtype, byte offset, shape, strides in elements
        flat = np.frombuffer(tensors[node[1]][1], DTYPES.get(node[2], "u1"), offset=node[3])
        into[path] = np.ndarray(node[4], flat.dtype, flat, 0, [flat.itemsize * n for n in node[5]])
    elif tag in ("T", "N", "G", "B"):
        array, data = tensors[(node[2] if tag == "G" else node)[1]]
        data = str(data, "utf-8", "surrogatepass") if node[2:] == ["str"] else data
        into[path] = data if tag == "B" else array
    else:
        into[path] = node


def restore(store: Path, name: str) -> dict[str, Any]:
    """Return what the newest version of a run, or the version of an id, holds, by dotted path."""
    body = read_manifest(store, find_save(store, name))
    tensors, row, found, blocks = [], 0, dict[str, Any](), dict(body.get("blocks", []))
    stored = []
    for *_, count in body["tensors"]:
        stored.append(b"".join(read_piece(store, body, at) for at in range(row, row + count)))
        row += count
    for recipe in body.get("recipes", []):  # what one names has none itself
        stored[recipe[0]] = follow(body, recipe, stored)
    for place, (dtype, _, shape, order, nbytes, _) in enumerate(body["tensors"]):
        data = stored[place]
        require(len(data) == nbytes, "the pieces of a tensor do not add up to its bytes")
        order = order or list(range(len(shape)))  # the dimensions as they lie in memory
        flat = np.frombuffer(data, DTYPES.get(body["dtypes"][dtype], "u1"))
        array = flat.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))
        if place in blocks:  # boxes one after the other: offsets and sizes of each
            array, covered = np.empty(shape, flat.dtype), np.zeros(shape, bool)
            for offsets, sizes in np.frombuffer(blocks[place], "<u8").reshape(-1, 2, len(shape)):
                part, flat = np.split(flat, [int(np.prod(sizes))])
                box = tuple(map(slice, offsets, np.add(offsets, sizes)))
                array[box], covered[box] = part.reshape(sizes), True
            require(covered.all() and not len(flat), "the boxes of a tensor do not tile it")
            data = array.tobytes()
        tensors.append((array, data))
    collect(unpack(io.BytesIO(body["skeleton"])), "", tensors, found)
    return found


if __name__ == "__main__":
    values = restore(Path(sys.argv[1]), sys.argv[2])
    print(*(f"{path}: {value!r:.80}" for path, value in values.items()), sep="\n")
    for out in sys.argv[3:]:
        np.savez(out, **{k: v for k, v in values.items() if isinstance(v, np.ndarray)})
