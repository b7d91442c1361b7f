"""Derived tensors: which are another one of the state, converted, and the proof of it.

Mixed-precision training keeps weights twice: in bfloat16 or float16 to compute with, and as masters
in float32 to update. The low ones are the masters, rounded to nearest even (Micikevicius et al.,
"Mixed Precision Training", ICLR 2018, section 3.1), and a state that holds both can store the
masters only. Such pairs are found by a few sampled elements at first, which is next to free, and
then by all of them, which is the proof. Copies that are equal byte for byte (tied tensors, an
average that has not moved yet) are not looked for: equal pieces are stored once anyway.

The proof is of what a load would give: the code that restores a tensor rounds the other one here,
and every bit must agree. Where another framework rounded otherwise, or a NaN carries another
payload, the tensor is stored as any other.

Two ways lead to a proof. A pair that this process proved when it saved the version before needs no
second arithmetic: if the one tensor has the digest, and the other one the pieces, that they had
then, the cast gives what it gave. Otherwise the cast is made, and its result has to have the digest
of the tensor. Either way each byte is read once, and the proof speaks of the bytes that were read:
the pieces of the other tensor are compared again when they are written.

The proofs of another process are not taken over: its arithmetic may have been another one, and a
mistake would go from version to version. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ckptstore import limits
from ckptstore.checkpoint.encoded_sources import Elements, parts_of, unguarded
from ckptstore.encodings.casts import Rounding, raw_dtype
from ckptstore.encodings.coding import cast_elements
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.hashing import Hasher, PieceChecksums, blake3_digest, blake3_of
from ckptstore.objects.sources import Source

# Elements that are converted at once. Source: with smaller steps two threads wait for the
# interpreter's lock longer than they work (docs/design/0015-pipeline.md: 1.8 ms for two casts).
_STEP: Final = 1 << 18
# Bytes of each step that are compared at once, to give up early. Source: 1.5% of a step, found
# in all but 2% of steps if one element in 1,000 differs.
_STEP_LOOK_BYTES: Final = 8192
# Bytes that are copied at once where a tensor cannot be read in place. Source: stays in cache.
_COPY_BYTES: Final = 1 << 20

_Key: TypeAlias = "tuple[bytes, str, tuple[int, ...], tuple[int, ...] | None, str]"
"""Digest, dtype, shape and order of a tensor, and the dtype of the other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """That one tensor is another one, converted."""

    digest: bytes
    """BLAKE3-256 of it."""
    sums: Sequence[int] = ()
    """XXH3-64 of each piece of the other, if the cast was made."""
    ids: Sequence[bytes] = ()
    """BLAKE3-256 of each piece of the other, if the version before proves it: it has them."""

    @property
    def source(self) -> tuple[int, ...] | tuple[bytes, ...]:
        """Return what each piece of the other was when this was proved."""
        return tuple(self.ids) or tuple(self.sums)


class KnownCasts:
    """The casts that this process proved when it saved a version. Immutable.

    Parameters
    ----------
    parent
        The version; None for none.
    proved
        The places of its tensors whose recipes this process proved.
    """

    def __init__(self, parent: Manifest | None, proved: Collection[int] = ()) -> None:
        self._ids: dict[_Key, set[bytes]] = {}
        if parent is None:
            return
        for place in proved:
            record = parent.tensors[place]
            if record.recipe is None or len(record.recipe.sources) != 1:
                continue
            (source,) = record.recipe.sources
            rows = slice(parent.first[source], parent.first[source + 1])
            key = _key(record.recipe.digest, record, parent.tensors[source].dtype)
            self._ids.setdefault(key, set()).add(parent.pieces.ids[rows].tobytes())

    def of(self, digest: bytes, record: TensorRecord, dtype: str) -> Collection[bytes]:
        """Return what a tensor was proved to be converted from: the ids of all pieces, each.

        Parameters
        ----------
        digest, record
            Of the tensor.
        dtype
            Of what it may be converted from; shape and order are the tensor's.
        """
        return self._ids.get(_key(digest, record, dtype), ())


def _key(digest: bytes, record: TensorRecord, dtype: str) -> _Key:
    return digest, record.dtype, record.shape, record.order, dtype


def prove(
    low: Source,
    high: Source,
    record: TensorRecord,
    known: KnownCasts,
    grid: int,
    rounding: Rounding | None = None,
) -> Proved | None:
    """Read a tensor and the one that it may be made of; return None if it is not, in every bit.

    Parameters
    ----------
    record
        Of `low`.
    known
        What was proved before.
    grid
        Bytes of a piece of `high`.
    rounding
        Rounds to bfloat16 faster than NumPy; None for NumPy.

    Raises
    ------
    TornStateError
        One of them is not what was staged.
    """
    if _rounded(_sample(high, _LOOK_ELEMENTS), high, low) != _sample(low, _LOOK_ELEMENTS):
        return None
    digest = blake3_of(parts_of(low, _COPY_BYTES))
    before = known.of(digest, record, high.dtype)
    if before and b"".join(ids := [blake3_digest(part) for part in parts_of(high, grid)]) in before:
        return Proved(digest=digest, ids=ids)
    hasher, pieces = Hasher(), PieceChecksums(grid)
    elements = Elements(high)
    there = unguarded(low.payload).view()  # on a device it is not read a second time
    given = np.empty(min(_STEP, elements.count), raw_dtype(high.dtype))
    made = np.empty(len(given), raw_dtype(low.dtype))
    for start in range(0, elements.count, _STEP):
        stop = min(start + _STEP, elements.count)
        part = given[: stop - start]  # a copy, since the tensor may change meanwhile
        np.copyto(part, elements.read(start, stop, copy=False))
        pieces.update(part.data.cast("B"))
        out = made[: stop - start].data.cast("B")
        cast_elements(high.dtype, low.dtype, part.data.cast("B"), out, rounding)
        looked = out if there is None else there[start * low.itemsize : stop * low.itemsize]
        if bytes(out[:_STEP_LOOK_BYTES]) != bytes(looked[:_STEP_LOOK_BYTES]):
            return None  # whether all of it agrees is for the digest to say
        hasher.update(out)
    if hasher.digest() != digest:
        return None
    return Proved(digest=digest, sums=pieces.checksums())


# --- the search for pairs -------------------------------------------------------------------------

_WIDER: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
"""What a tensor of a dtype may be the rounding of, what is looked at first being first."""

# Elements that two tensors are compared by at first: runs of neighbours, evenly over the tensor,
# and the length of a run. Source: of masters that went a step further than their weights, one
# element in 100 rounds to another one; 64 elements told 28 of 49 such tensors apart, 1,024 all of
# them (docs/design/0026-cores.md). Runs, since a tensor on a device is read one run at a time.
_RUNS: Final = 8
_RUN_ELEMENTS: Final = 128
# The same before all of two tensors is compared. Source: one element in 1,000 differs where only a
# few rows were trained, or the rate is nearly 0; takes 5% of the time of a comparison of 1 MiB.
_LOOK_ELEMENTS: Final = 1024
# Tensors with equal samples that one is compared with in full. Source: the first is the right one
# but where all samples are zero, and then two tensors of zeros differ elsewhere: one more try.
_TRIES: Final = 2


def derived_pairs(
    sources: Sequence[Source],
    records: Sequence[TensorRecord],
    wished: Collection[int],
    same: Callable[[int, int], bool],
    samples: dict[int, bytes] | None = None,
) -> dict[int, int]:
    """Return which tensors are exactly another one rounded: place to place of the other.

    No source is derived itself. Where nothing has two precisions of one shape, only shapes are
    compared; where something has, 1,024 elements of each such tensor are read, and `same` is asked
    of those that agree in these. Tensors below ``DERIVED_BYTES_MIN`` bytes, and tensors in blocks,
    are left alone.

    Parameters
    ----------
    sources, records
        The tensors, and what the manifest says of them.
    wished
        Places of those that may get a lossy form: nothing is derived from them.
    same
        Says of two places whether the first is the second one rounded, in every bit. One that
        always agrees gives the pairs that are likely, from these elements alone.
    samples
        Keeps the elements of each tensor from one search to the next; None for none.
    """
    samples = {} if samples is None else samples
    groups: dict[object, dict[str, list[int]]] = {}
    for place, one in enumerate(records):
        if one.blocks is None and (one.dtype in _WIDER or one.dtype == "float64"):
            group = groups.setdefault((one.shape, one.order), {})
            group.setdefault(one.dtype, []).append(place)
    found: dict[int, int] = {}
    for group in groups.values():
        for dtype, wider in _WIDER.items() if len(group) > 1 else ():
            giving = set(found.values())
            lows = [
                place
                for place in group.get(dtype, ())
                if sources[place].nbytes >= limits.DERIVED_BYTES_MIN and place not in giving
            ]
            for high_dtype in wider:
                kept = [place for place in group.get(high_dtype, ()) if place not in wished]
                highs = [place for place in kept if place not in found]
                if highs and lows:
                    for place in (*lows, *highs):
                        if place not in samples:
                            samples[place] = _sample(sources[place], _RUN_ELEMENTS)
                    found.update(_match(sources, lows, highs, same, samples))
                    lows = [place for place in lows if place not in found]
    return found


def _match(
    sources: Sequence[Source],
    lows: Sequence[int],
    highs: Sequence[int],
    same: Callable[[int, int], bool],
    samples: Mapping[int, bytes],
) -> Iterator[tuple[int, int]]:
    """Yield which of `lows`, all of one dtype, is which of `highs`, all of another."""
    low = sources[lows[0]]
    by_sample: dict[bytes, list[int]] = {}
    for place in lows:
        by_sample.setdefault(samples[place], []).append(place)
    tried: Counter[int] = Counter()
    for high in highs:
        left = by_sample.get(_rounded(samples[high], sources[high], low), [])
        for place in list(left):
            tried[place] += 1
            found = same(place, high)
            if found:
                yield place, high
            if found or tried[place] == _TRIES:
                left.remove(place)


def _rounded(sample: bytes, high: Source, low: Source) -> bytes:
    """Return elements of one tensor as elements of the type of another."""
    rounded = bytearray(len(sample) // high.itemsize * low.itemsize)
    cast_elements(high.dtype, low.dtype, memoryview(sample), memoryview(rounded))
    return bytes(rounded)


def _sample(source: Source, length: int) -> bytes:
    """Return the bytes of runs of so many elements, the same for all tensors of one shape."""
    item = source.itemsize
    count = source.nbytes // item
    run = min(length, count)
    starts = sorted({(count - run) * turn // (_RUNS - 1) for turn in range(_RUNS)})
    payload = unguarded(source.payload)
    view = payload.view()  # once: it takes as long as all of the rest
    if view is not None:
        return b"".join(view[at * item : (at + run) * item] for at in starts)
    out = memoryview(bytearray(run * item * len(starts)))
    for turn, at in enumerate(starts):
        payload.copy_into(at * item, out[turn * run * item : (turn + 1) * run * item])
    return bytes(out)
