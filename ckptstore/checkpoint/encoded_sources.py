"""Codes and scales of a tensor in a lossy form, as sources of a save: computed on each read.

Nothing of it is kept, so that the memory of a save does not grow with the state: a tensor is read,
and encoded, once to measure the error and once to write. What is written is compared with what was
measured, piece by piece; a state that was changed in between is refused by the name of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.byte_copies import copy_bytes
from ckptstore.chunking import cut, piece_bytes
from ckptstore.encodings.casts import Rounding, raw_dtype
from ckptstore.encodings.coding import Form
from ckptstore.errors import TornStateError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import TensorRecord
from ckptstore.hashing import blake3_digest, xxh3_64
from ckptstore.objects.sources import Payload, PieceSource, Source

Raw: TypeAlias = "npt.NDArray[Any]"


class Guarded(Payload, Protocol):
    """A payload that compares each piece, as it is read, with what was staged."""

    @property
    def piece_bytes(self) -> int:
        """Return the length of its pieces: what :meth:`Payload.copy_into` is to be asked for."""

    def unguarded(self) -> Payload:
        """Return the same bytes, for any range, without a comparison."""


def is_guarded(payload: Payload) -> TypeGuard[Guarded]:
    """Return whether a payload compares what is read; ``isinstance`` of a protocol takes 10 us."""
    return hasattr(payload, "unguarded")


def unguarded(payload: Payload) -> Payload:
    """Return the same bytes, for any range, without a comparison."""
    return payload.unguarded() if is_guarded(payload) else payload


def torn(name: str) -> TornStateError:
    """Return the error of a tensor that is not any more what was measured."""
    msg = f"{name!r} was changed while it was being saved; nothing was saved"
    return TornStateError(msg, hint="save from one thread, when no step is under way")


def grid_of(nbytes: int, row_bytes: int, itemsize: int, chunk_bytes: int) -> int:
    """Return the length of the pieces that a save cuts a tensor into; at least 1."""
    if nbytes < limits.SMALL_TENSOR_BYTES:
        return max(1, nbytes)
    return piece_bytes(row_bytes, itemsize, chunk_bytes)


def parts_of(source: Source, length: int, *, copy: bool = False) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; what is staged is compared, piece by piece.

    Parameters
    ----------
    length
        Of a part, in bytes, where it is not a piece of a staged tensor.
    copy
        Into memory that no one else changes; each part is valid until the next.
    """
    payload = source.payload
    view = None if is_guarded(payload) else payload.view()
    if is_guarded(payload):
        length = payload.piece_bytes
    if view is not None and not copy:
        yield from (view[at : at + size] for at, size in cut(source.nbytes, length))
        return
    buffer = memoryview(bytearray(min(length, source.nbytes)))
    for start, size in cut(source.nbytes, length):
        part = buffer[:size]
        if view is None:
            payload.copy_into(start, part)
        else:
            copy_bytes(part, view[start : start + size])
        yield part


class Elements:
    """The elements of a float tensor, a few at a time, in stored order. Any thread may read.

    Parameters
    ----------
    rounding
        Rounds them to bfloat16 faster than NumPy; None for NumPy.
    """

    def __init__(self, source: Source, rounding: Rounding | None = None) -> None:
        self.rounding = rounding
        self.dtype: str = source.dtype
        self.count: int = source.nbytes // source.itemsize
        self._item = source.itemsize
        self._raw = raw_dtype(source.dtype)
        self._payload = unguarded(source.payload)

    def read(self, start: int, stop: int, *, copy: bool) -> Raw:
        """Return elements as unsigned integers.

        Parameters
        ----------
        copy
            Into memory of their own, which no one else changes.
        """
        view = self._payload.view()
        if view is not None:
            part = np.frombuffer(view[start * self._item : stop * self._item], self._raw)
            return part.copy() if copy else part
        data = memoryview(bytearray((stop - start) * self._item))
        self._payload.copy_into(start * self._item, data)
        return np.frombuffer(data, self._raw)


@dataclass(frozen=True, slots=True)
class ComputedPayload:
    """A payload whose bytes are made, or copied, each time they are asked for."""

    fill: Callable[[int, memoryview], None]
    """Fills memory with the bytes from a place on."""

    def view(self) -> memoryview | None:
        """Return None: the bytes lie nowhere."""
        return None

    def copy_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""
        self.fill(start, out)


def source_of(
    record: TensorRecord, payload: Payload, piece_ids: Sequence[bytes] = ()
) -> PieceSource:
    """Return the source of a tensor, and the ids of its pieces if these are known."""
    item = ITEM_BYTES[record.dtype]
    outer = record.order[0] if record.order else 0
    rows = max(record.shape[outer], 1) if record.shape else 1
    return PieceSource(
        nbytes=record.nbytes,
        dtype=record.dtype,
        itemsize=item,
        row_bytes=max(record.nbytes // rows, item),
        payload=payload,
        piece_ids=piece_ids,
    )


def coded_sources(record: TensorRecord, elements: Elements, form: Form) -> list[CodedSource]:
    """Return what a form stores of a tensor: codes, and scales if it has any."""
    count = math.prod(record.shape)
    nbytes = count * form.item_bytes
    codes = record.replace(dtype=form.dtype, nbytes=nbytes, blocks=None, recipe=None)
    found = [CodedSource(codes, source_of(codes, ComputedPayload(partial(_codes, elements, form))))]
    if form.block:
        blocks = -(-count // form.block)
        scales = TensorRecord(
            dtype="float32", shape=(blocks,), order=None, role=record.role, nbytes=4 * blocks
        )
        payload = ComputedPayload(partial(_scales, elements, form))
        found.append(CodedSource(scales, source_of(scales, payload)))
    return found


class CodedSource(NamedTuple):
    """A hidden tensor: what the manifest says of it, and its bytes."""

    record: TensorRecord
    source: Source


def _codes(elements: Elements, form: Form, start: int, out: memoryview) -> None:
    """Encode the elements whose codes begin at byte `start`."""
    target = np.frombuffer(out, np.dtype(f"<u{form.item_bytes}"))
    low, high = start // form.item_bytes, start // form.item_bytes + len(target)
    block = form.block or 1
    end = min(-(-high // block) * block, elements.count)
    for at in range(low // block * block, end, form.step):
        stop = min(at + form.step, end)
        raw = elements.read(at, stop, copy=False)
        codes = form.encode(elements.dtype, raw, elements.rounding).codes
        first, last = max(at, low), min(stop, high)
        target[first - low : last - low] = codes[first - at : last - at]


def _scales(elements: Elements, form: Form, start: int, out: memoryview) -> None:
    """Compute the scales from byte `start` on."""
    target = np.frombuffer(out, np.dtype("<f4"))
    low, step = start // 4, form.step // form.block
    for at in range(0, len(target), step):
        count = min(step, len(target) - at)
        first = (low + at) * form.block
        raw = elements.read(first, min(first + count * form.block, elements.count), copy=False)
        target[at : at + count] = form.scales(elements.dtype, raw)


def checked(
    payload: Payload, pieces: Sequence[int] | Sequence[bytes], length: int, name: str
) -> ComputedPayload:
    """Return a payload that is read by pieces; each must be the one that was seen before.

    Bytes are copied first and compared then, so that they stay still. A piece that is another one
    raises a TornStateError.

    Parameters
    ----------
    pieces
        Per piece: its XXH3-64, or its BLAKE3-256.
    length
        Of a piece, in bytes.
    name
        Of the tensor that errors are about.
    """
    strong = bool(pieces) and isinstance(pieces[0], bytes)
    digest: Callable[[memoryview], int | bytes] = blake3_digest if strong else xxh3_64

    def fill(start: int, out: memoryview) -> None:
        """Fill `out` with the piece that begins at `start`."""
        payload.copy_into(start, out)
        if digest(out) != pieces[start // length]:
            raise torn(name)

    return ComputedPayload(fill)


_EMPTY = TensorRecord(dtype="uint8", shape=(0,), order=None, role="", nbytes=0)
NOTHING = source_of(_EMPTY, ComputedPayload(lambda start, out: None))
"""The source of a tensor that has a recipe."""
