"""Gain and cost of the codec, by kind of tensor, on one thread, in memory.

Every variant gets the same values in chunks of 4 MiB, and gives them back bit for bit. Speeds are
of raw bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.states import StateSpec, make_values
from benchmarks.training import Trained, train
from ckptstore import limits
from ckptstore.codecs import codec_table
from ckptstore.codecs.plane_layout import Layout, layout_of, split
from ckptstore.hashing import blake3_digest, xxh3_64

__all__ = ["run"]

_KIND = "up.weight"
Chunk = npt.NDArray[np.uint8]
Encode = Callable[[Chunk], Sequence[bytes | bytearray | memoryview]]
Decode = Callable[[memoryview, Chunk], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One way to encode a chunk."""

    name: str
    encode: Encode
    decode: Decode | None = None
    """Fills a chunk; None where only the size is of interest."""


def run(space: Workspace, *, bytes_min: int, rounds: int, training_steps: int = 120) -> Result:
    """Run everything; return a table a kind of tensor, and the sweeps.

    Parameters
    ----------
    bytes_min
        Raw bytes of each kind of tensor.
    """
    spec = StateSpec(bytes_min=bytes_min, training_steps=training_steps)
    trained = train(seed=spec.seed, steps=spec.training_steps)
    result = Result(
        benchmark="codecs",
        header=header(space.root),
        parameters={
            "bytes_each": bytes_min,
            "chunk_bytes": limits.CHUNK_BYTES_DEFAULT,
            "rounds": rounds,
            "seed": spec.seed,
            "training_steps": spec.training_steps,
        },
    )
    kinds = _kinds(trained, bytes_min, spec.seed)
    for kind, tensor in kinds.items():
        layout = layout_of(str(tensor.dtype).removeprefix("torch."))
        chunks = _chunks(tensor, limits.CHUNK_BYTES_DEFAULT)
        result.tables[kind] = _measure(_variants(layout), chunks, rounds)
        result.facts[f"planes of {kind}"] = _planes(chunks, layout)
        say(f"codecs: {kind}")
    result.tables["chunk size"] = _sweep(kinds["fp32 master weights"], rounds)
    result.tables["digests"] = _digests(kinds["fp32 master weights"], rounds)
    result.facts["fidelity"] = _fidelity(trained, kinds)
    return result


def _kinds(trained: Trained, bytes_each: int, seed: int) -> dict[str, torch.Tensor]:
    """Return made tensors of `bytes_each` bytes, by kind of a mixed-precision state."""
    rows = bytes_each // 4 // 1024
    master, first, second = make_values(trained, _KIND, (rows, 1024), seed=(seed, 1))
    wide, _, _ = make_values(trained, _KIND, (2 * rows, 1024), seed=(seed, 2))
    return {
        "fp32 master weights": master,
        "fp32 first moments": first,
        "fp32 second moments": second,
        "bf16 weights": wide.to(torch.bfloat16),
    }


def _chunks(tensor: torch.Tensor, size: int) -> list[Chunk]:
    octets = tensor.reshape(-1).view(torch.uint8).numpy()
    return [octets[begin : begin + size] for begin in range(0, octets.size, size)]


def _measure(variants: Sequence[_Variant], chunks: Sequence[Chunk], rounds: int) -> list[Measured]:
    """Encode and decode all chunks by each variant, interleaved; check the decoded chunks."""
    raw = sum(chunk.size for chunk in chunks)
    rows = {variant.name: Measured(name=variant.name, logical_bytes=raw) for variant in variants}
    decoding: dict[str, list[float]] = {variant.name: [] for variant in variants}
    out = np.empty(chunks[0].size, np.uint8)
    for number in range(-1 if rounds > 1 else 0, rounds):
        for variant in variants:
            encode_s = decode_s = 0.0
            stored = 0
            for chunk in chunks:
                began = time.perf_counter()
                parts = variant.encode(chunk)
                encode_s += time.perf_counter() - began
                stored += sum(len(part) for part in parts)
                if variant.decode is None:
                    continue
                target = out[: chunk.size]
                read = memoryview(b"".join(parts))  # in one place, as a load has read it
                began = time.perf_counter()
                variant.decode(read, target)
                decode_s += time.perf_counter() - began
                if number < 1 and not np.array_equal(target, chunk):
                    msg = f"{variant.name} does not give back what it got"
                    raise AssertionError(msg)
            rows[variant.name].numbers["stored_bytes"] = stored
            if number >= 0:
                rows[variant.name].seconds.append(encode_s)
                decoding[variant.name].append(decode_s)
    for name, seconds in decoding.items():
        if any(second > 0 for second in seconds):
            rows[name].numbers["decode_s"] = float(np.median(seconds))
    return list(rows.values())


# --- variants ---------------------------------------------------------------------------------


def _variants(layout: Layout) -> list[_Variant]:
    variants = [_ours(layout), *(_plain(level) for level in (1, 3, 9))]
    variants.append(_shuffled(layout, level=1))
    variants += [_planes_variant(layout, mm, hl) for mm, hl in ((0, 0), (5, 0), (7, 0), (7, 6))]
    return variants


def _ours(layout: Layout) -> _Variant:
    """Return the codec that ckptstore chooses."""
    headers: list[tuple[int, int]] = []

    def encode(chunk: Chunk) -> Sequence[bytes | bytearray | memoryview]:
        encoded = codec_table.encode(chunk.data, layout, "auto")
        headers[:] = [(encoded.codec, encoded.layout)]
        return [bytes(part) if isinstance(part, bytes) else part for part in encoded.parts]

    def decode(stored: memoryview, out: Chunk) -> None:
        codec, used = headers[0]
        codec_table.decode(codec, used, stored, out.data)

    return _Variant(name="ckptstore auto", encode=encode, decode=decode)


def _plain(level: int) -> _Variant:
    """Return zstd on the unchanged bytes."""
    compressor = zstandard.ZstdCompressor(level=level)
    decompressor = zstandard.ZstdDecompressor()

    def decode(stored: memoryview, out: Chunk) -> None:
        data = decompressor.decompress(stored, max_output_size=out.size)
        out[:] = np.frombuffer(data, np.uint8)

    return _Variant(
        name=f"zstd -{level}, bytes as they are",
        encode=lambda chunk: [compressor.compress(chunk.data)],
        decode=decode,
    )


def _shuffled(layout: Layout, *, level: int) -> _Variant:
    """Return byte shuffle, as HDF5 and Blosc do it, and one zstd frame."""
    item = 4 if layout is Layout.FLOAT32 else 2
    compressor = zstandard.ZstdCompressor(level=level)
    decompressor = zstandard.ZstdDecompressor()

    def encode(chunk: Chunk) -> Sequence[bytes]:
        turned = np.ascontiguousarray(chunk.reshape(-1, item).T)
        return [compressor.compress(turned.data)]

    def decode(stored: memoryview, out: Chunk) -> None:
        data = decompressor.decompress(stored, max_output_size=out.size)
        out.reshape(-1, item)[:] = np.frombuffer(data, np.uint8).reshape(item, -1).T

    return _Variant(name=f"byte shuffle + zstd -{level}", encode=encode, decode=decode)


def _planes_variant(layout: Layout, min_match: int, hash_log: int) -> _Variant:
    """Return planes with other parameters of zstd; sizes and encoding only."""
    chosen = {
        key: value for key, value in (("min_match", min_match), ("hash_log", hash_log)) if value
    }
    parameters = zstandard.ZstdCompressionParameters.from_level(1, **chosen)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    label = ", ".join(f"{key} {value}" for key, value in chosen.items()) or "defaults"

    def encode(chunk: Chunk) -> Sequence[bytes | memoryview]:
        parts: list[bytes | memoryview] = []
        for plane in split(layout, chunk.data):
            frame = compressor.compress(plane.data)
            parts.append(frame if len(frame) < 0.98 * plane.nbytes else plane.data)
        return parts

    return _Variant(name=f"planes + zstd -1 ({label})", encode=encode)


# --- further figures --------------------------------------------------------------------------


def _planes(chunks: Sequence[Chunk], layout: Layout) -> list[float]:
    """Return the share of its raw bytes that each plane takes, compressed."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    raw: list[int] = []
    stored: list[int] = []
    for chunk in chunks:
        for place, plane in enumerate(split(layout, chunk.data)):
            if place == len(raw):
                raw.append(0)
                stored.append(0)
            raw[place] += plane.nbytes
            stored[place] += len(compressor.compress(plane.data))
    return [done / whole for done, whole in zip(stored, raw, strict=True)]


def _sweep(tensor: torch.Tensor, rounds: int) -> list[Measured]:
    """Measure ckptstore's codec for chunks of 1 to 16 MiB."""
    rows = []
    for mib in (1, 2, 4, 8, 16):
        size = mib * limits.MIB
        if size > tensor.nbytes:
            continue
        (row,) = _measure([_ours(Layout.FLOAT32)], _chunks(tensor, size), rounds)
        row.name = f"{mib} MiB"
        rows.append(row)
    return rows


def _digests(tensor: torch.Tensor, rounds: int) -> list[Measured]:
    """Measure the two digests over chunks."""
    chunks = _chunks(tensor, limits.CHUNK_BYTES_DEFAULT)
    rows = []
    digests: dict[str, Callable[[memoryview], object]] = {
        "BLAKE3-256": blake3_digest,
        "XXH3-64": xxh3_64,
    }
    for name, digest in digests.items():
        row = Measured(name=name, logical_bytes=tensor.nbytes)
        for number in range(-1 if rounds > 1 else 0, rounds):
            began = time.perf_counter()
            for chunk in chunks:
                digest(chunk.data)
            if number >= 0:
                row.seconds.append(time.perf_counter() - began)
        rows.append(row)
    return rows


def _fidelity(trained: Trained, kinds: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return, by kind, the compressed share of trained values, and of made ones."""
    master, first, second = trained.values[_KIND]
    real = {
        "fp32 master weights": master,
        "fp32 first moments": first,
        "fp32 second moments": second,
        "bf16 weights": master.to(torch.bfloat16),
    }
    return {kind: [_share(tensor), _share(kinds[kind])] for kind, tensor in real.items()}


def _share(tensor: torch.Tensor) -> float:
    layout = layout_of(str(tensor.dtype).removeprefix("torch."))
    chunks = _chunks(tensor, limits.CHUNK_BYTES_DEFAULT)
    stored = sum(codec_table.encode(c.data, layout, "auto").stored_bytes for c in chunks)
    return stored / tensor.nbytes
