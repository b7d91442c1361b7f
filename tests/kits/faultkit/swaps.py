"""Stores in which two chunks have exchanged places: each is intact, but belongs to the other place.

A misdirected write does this: magic, lengths, codec and checksums are right, and only the content
differs from the manifest's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final
from unittest import mock

import torch

from ckptstore.codecs.codec_table import BaseData, encode, encode_delta
from ckptstore.codecs.delta import Sampled, sampled
from ckptstore.codecs.differences import PLAIN, DeltaForm
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import CodecChoice
from ckptstore.format.pack import (
    CHUNK_HEADER_BYTES,
    TRAILER_BYTES,
    IndexRow,
    parse_chunk_header,
    parse_index,
    parse_trailer,
)
from ckptstore.hashing import blake3_digest
from ckptstore.objects import deltas
from ckptstore.store import Store
from faultkit.stores import CHUNK_BYTES, contents, create, memory_with

__all__ = [
    "ELEMENTS", "KINDS", "RUN", "Kind", "Scene", "differing", "exchange", "place_of", "scene",
]  # fmt: skip

Objects = dict[str, bytes]
State = dict[str, dict[str, torch.Tensor]]

RUN: Final = "gpt"
ELEMENTS: Final = CHUNK_BYTES // 4
FORM: Final = DeltaForm(turn=2)
_HITS: Final = {2: {"model.a", "model.b"}, 3: {"model.a", "model.b"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of chunks to exchange."""

    codec: CodecChoice = "raw"
    """Of the store."""
    codes: tuple[int, int] = (0, 0)
    """Codecs of the two chunks, as their headers say."""
    form: DeltaForm | None = None
    """Of deltas."""
    hits: Mapping[int, set[str]]
    """By step, the tensors that are lost by the exchange."""

    @property
    def is_delta(self) -> bool:
        """Return whether the two are deltas, which only loads decode."""
        return self.codes[0] > 2


KINDS: Final[Mapping[str, Kind]] = {
    "raw": Kind(hits=_HITS),
    "zstd": Kind(codec="zstd", codes=(1, 1), hits=_HITS),
    "planes": Kind(codec="planes", codes=(2, 2), hits=_HITS),
    "delta": Kind(codec="delta", codes=(3, 3), form=PLAIN, hits=_HITS),
    "arranged": Kind(codec="delta", codes=(4, 4), form=FORM, hits=_HITS),
    "base": Kind(
        codec="delta",
        codes=(2, 2),
        form=PLAIN,
        hits={key: {"model.a", "model.b", "model.c"} for key in (1, 2, 3)},
    ),
    "slab": Kind(hits={key: {"model.s", "model.t"} for key in (1, 2, 3)}),
    "packs": Kind(hits={1: {"model.a"}, 2: {"model.a", "model.b"}, 3: {"model.a", "model.b"}}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A sound store of three versions, and the ids of the two chunks that may be exchanged."""

    kind: Kind
    objects: Objects
    states: Mapping[int, State]
    """By step."""
    pair: tuple[bytes, bytes]

    def swapped(self, *, disguised: bool) -> Objects:
        """Return the objects after the exchange; see :func:`exchange`."""
        changed = dict(self.objects)
        exchange(changed, self.pair, disguised=disguised)
        return changed


def exchange(objects: Objects, pair: tuple[bytes, bytes], *, disguised: bool) -> bool:
    """Exchange the places of two chunks; return whether both exist.

    Parameters
    ----------
    disguised
        Each keeps its header, with the checksum of the bytes that now follow it.
    """
    places = [place_of(objects, chunk_id) for chunk_id in pair]
    if None in places:
        return False
    (one, first), (two, second) = [place for place in places if place is not None]
    a, b = _chunk(objects[one], first), _chunk(objects[two], second)
    assert len(a) == len(b)
    if disguised:
        a, b = _with_header_of(a, b), _with_header_of(b, a)
    for key, row, data in ((one, first, b), (two, second, a)):
        pack = objects[key]
        objects[key] = pack[: row.offset] + data + pack[row.offset + len(data) :]
    return True


def _with_header_of(body: bytes, head: bytes) -> bytes:
    """Return a chunk in another one's place, with its own codec and bytes, but not its id."""
    header = parse_chunk_header(body[:CHUNK_HEADER_BYTES], where="")
    kept = parse_chunk_header(head[:CHUNK_HEADER_BYTES], where="")
    return replace(header, chunk_id=kept.chunk_id).to_bytes() + body[CHUNK_HEADER_BYTES:]


def place_of(objects: Objects, chunk_id: bytes) -> tuple[str, IndexRow] | None:
    """Return the pack of a chunk and its row of the index, or None if no pack names it."""
    for key, data in objects.items():
        if key.startswith("packs/"):
            tail = data[-TRAILER_BYTES:]
            offset, _, checksum = parse_trailer(tail, pack_bytes=len(data), where=key)
            index = data[offset:-TRAILER_BYTES]
            for row in parse_index(index, checksum=checksum, offset=offset, where=key):
                if row.chunk_id == chunk_id:
                    return key, row
    return None


def _chunk(pack: bytes, row: IndexRow) -> bytes:
    return pack[row.offset : row.offset + CHUNK_HEADER_BYTES + row.stored_bytes]


# --- states ---------------------------------------------------------------------------------------
@cache
def scene(name: str) -> Scene:
    """Return the store of one of the kinds; not to be changed."""
    kind = KINDS[name]
    states = {step: {"model": model} for step, model in enumerate(_models(name, kind), 1)}
    backend = memory_with({})
    with (
        mock.patch.object(deltas, "sampled", partial(_sampled, kind.form)),
        create(backend, codec=kind.codec, workers=1) as store,
    ):
        for step, state in states.items():
            store.run(RUN).save(state, step=step)
        pair = _pair(name, store, states)
    objects = contents(backend)
    for chunk_id, code in zip(pair, kind.codes, strict=True):
        found = place_of(objects, chunk_id)
        assert found is not None
        header = _chunk(objects[found[0]], found[1])[:CHUNK_HEADER_BYTES]
        assert parse_chunk_header(header, where=name).codec == code
    return Scene(kind=kind, objects=objects, states=states, pair=pair)


def _models(name: str, kind: Kind) -> list[dict[str, torch.Tensor]]:
    """Return three models: the third shares everything with the second except ``d``.

    So the packs of the first two are partly dead once only the third is kept.
    """
    base, other = _noise(0), _noise(1)
    if kind.form is not None:
        if name == "base":
            base, other = _twins(_noise, lambda tensor: _stored(tensor, "planes"))
        make = partial(_moved, base)
        a, b = _twins(make, lambda tensor: _delta_bytes(tensor, base, kind.form or PLAIN))
        first = {"a": base, "b": base.clone(), "c": other}
    elif name == "packs":
        a, b = base, _noise(2)
        first = {"a": base, "b": other, "c": _noise(3)}
    else:
        a, b = _twins(lambda seed: _noise(10 + seed), lambda t: _stored(t, kind.codec))
        first = {"a": base, "b": other, "c": _noise(2)}
    second = {"a": a, "b": b, "c": first["c"]}
    first |= {"s": _noise(4)[:100], "t": _noise(5)[:50], "d": _noise(6)}
    second |= {"s": _noise(7)[:100], "t": _noise(8)[:50]}
    return [first, second | {"d": _noise(9)}, second]


def _noise(seed: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 0.02


def _moved(base: torch.Tensor, seed: int) -> torch.Tensor:
    return base + _noise(100 + seed) * 5e-5


def _twins(
    make: Callable[[int], torch.Tensor], stored: Callable[[torch.Tensor], int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of different content whose chunks have one length."""
    met: dict[int, torch.Tensor] = {}
    for seed in range(2000):
        tensor = make(seed)
        if (size := stored(tensor)) in met:
            return met[size], tensor
        met[size] = tensor
    raise AssertionError


def _raw(*tensors: torch.Tensor) -> memoryview:
    return memoryview(b"".join(tensor.numpy().tobytes() for tensor in tensors))


def _stored(tensor: torch.Tensor, codec: CodecChoice) -> int:
    return encode(_raw(tensor), Layout.FLOAT32, codec).stored_bytes


def _delta_bytes(tensor: torch.Tensor, base: torch.Tensor, form: DeltaForm) -> int:
    data = BaseData(piece_id=bytes(32), data=_raw(base))
    return encode_delta(_raw(tensor), data, Layout.FLOAT32, form).stored_bytes


def _sampled(form: DeltaForm | None, raw: memoryview, base: memoryview, layout: Layout) -> Sampled:
    """Estimate as a save does, and choose the form of the kind."""
    found = sampled(raw, base, layout)
    return found if form is None else replace(found, form=form)


def _pair(name: str, store: Store, states: Mapping[int, State]) -> tuple[bytes, bytes]:
    """Return the ids of the chunks to exchange."""
    old, new = (states[step]["model"] for step in (1, 2))
    if name == "slab":
        # A slab holds its members in the order in which they come.
        one, two = _raw(old["s"], old["t"]), _raw(new["s"], new["t"])
    elif name == "base":
        one, two = _raw(old["a"]), _raw(old["c"])
    else:
        one, two = _raw(new["a"]), _raw(new["b"])
    return blake3_digest(one), blake3_digest(two)


def differing(store: Store, scene: Scene) -> dict[int, set[str]]:
    """Load every tensor of every whole version; return those that are refused, by step.

    All others must equal the saved ones bit by bit.
    """
    lost: dict[int, set[str]] = {}
    for version in store.versions():
        if version.level == "record":
            continue
        for path, tensor in scene.states[version.step]["model"].items():
            name = f"model.{path}"
            try:
                found: Any = store.load(f"#{version.id}", include=[name])
            except Exception as error:
                if name not in str(error):
                    raise
                lost.setdefault(version.step, set()).add(name)
            else:
                assert torch.equal(found["model"][path], tensor), (version.step, name)
    return lost
