"""Sources of a writer of packs: tensors, wherever their bytes are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptstore.byte_copies import copy_bytes
from ckptstore.format.dtypes import ITEM_BYTES


class Payload(Protocol):
    """The bytes of one tensor, dense, in stored order."""

    def view(self) -> memoryview | None:
        """Return the bytes in place, or None where they are not in host memory as stored."""

    def copy_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. Called from several threads at once."""


def copy_from(payload: Payload, start: int, out: memoryview) -> None:
    """Fill `out` with the bytes of a payload from `start` on, wherever they are."""
    view = payload.view()
    if view is None:
        payload.copy_into(start, out)
    else:
        copy_bytes(out, view[start : start + len(out)])


class Source(Protocol):
    """One tensor to write, wherever its bytes are."""

    @property
    def nbytes(self) -> int:
        """Return the length in bytes."""

    @property
    def dtype(self) -> str:
        """Return torch's name of the dtype, without ``torch.``."""

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element; 1 where elements are smaller than a byte."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one step of the outermost dimension in memory order."""

    @property
    def payload(self) -> Payload:
        """Return where its bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSource:
    """A :class:`Source` made of its parts."""

    nbytes: int
    dtype: str
    itemsize: int
    row_bytes: int
    payload: Payload
    piece_ids: Sequence[bytes] = ()
    """Id of each piece, known before a byte of it is read, since an earlier version has them; none
    if they are not known. The bytes are read if a piece is no longer stored elsewhere."""


@dataclass(frozen=True, slots=True)
class _InMemory:
    """Bytes in memory, as the payload of a source."""

    data: bytes | bytearray

    def view(self) -> memoryview:
        return memoryview(self.data)

    def copy_into(self, start: int, out: memoryview) -> None:
        copy_bytes(out, self.view()[start : start + len(out)])


def piece_in_memory(data: bytes | bytearray, dtype: str) -> PieceSource:
    """Return the source of one piece of a tensor, which is not cut further."""
    size, payload = len(data), _InMemory(data)
    return PieceSource(
        nbytes=size, dtype=dtype, itemsize=ITEM_BYTES[dtype], row_bytes=size, payload=payload
    )
