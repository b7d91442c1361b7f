"""Proof that one tensor is another one, converted: what lets a save store a recipe of it.

Two ways lead to it. What this process proved when it saved the version before needs no second
arithmetic: if the one tensor has the digest, and the other one the pieces, that they had then, the
cast gives what it gave. Otherwise the cast is made, and what it gives has to have the digest of the
tensor. Either way each byte is read once, and what was read is what the proof speaks of: the pieces
of the other tensor are compared again when they are written.

What a version says that another process saved is not taken for a proof: its arithmetic may have
been another one, and a mistake would go from version to version. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ckptstore.checkpoint.encoded_sources import Elements, is_guarded, parts_of
from ckptstore.encodings.casts import Raw, Rounding, raw_dtype
from ckptstore.encodings.decoding import decode_elements
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.hashing import Hasher, PieceChecksums, blake3_digest
from ckptstore.objects.sources import Source

# Elements that are converted at once. Source: with smaller steps two threads hold each other up
# more than they help (docs/design/0015-pipeline.md).
_STEP: Final = 1 << 18
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
    digest = _digest(low)
    before = known.of(digest, record, high.dtype)
    if before and b"".join(ids := [blake3_digest(part) for part in parts_of(high, grid)]) in before:
        return Proved(digest=digest, ids=ids)
    hasher = Hasher()
    pieces = PieceChecksums(grid)
    elements = Elements(high)
    given = np.empty(min(_STEP, elements.count), raw_dtype(high.dtype))
    made = np.empty(len(given), raw_dtype(low.dtype))
    for start in range(0, elements.count, _STEP):
        stop = min(start + _STEP, elements.count)
        part = given[: stop - start]  # a copy, since the tensor may change meanwhile
        np.copyto(part, elements.read(start, stop, copy=False))
        pieces.update(part.data.cast("B"))
        out = made[: stop - start].data.cast("B")
        _convert(high.dtype, part, low.dtype, out, rounding)
        hasher.update(out)
    if hasher.digest() != digest:
        return None
    return Proved(digest=digest, sums=pieces.checksums())


def _convert(
    dtype: str, given: Raw, target: str, out: memoryview, rounding: Rounding | None
) -> None:
    """Convert elements just as a load does."""
    decode_elements("cast", "", 0, target, dtype, 0, given.data.cast("B"), None, out, rounding)


def _digest(source: Source) -> bytes:
    """Return the BLAKE3-256 of a tensor; one that is staged is compared as it is read."""
    payload = source.payload
    view = None if is_guarded(payload) else payload.view()
    if view is not None:
        return blake3_digest(view)
    hasher = Hasher()
    for part in parts_of(source, _COPY_BYTES):
        hasher.update(part)
    return hasher.digest()
