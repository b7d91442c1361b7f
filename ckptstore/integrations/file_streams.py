"""Streams of files whose bytes are tensors of versions: written in parts, read by chunks."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckptstore import limits
from ckptstore.byte_copies import copy_bytes
from ckptstore.checkpoint.assemble import RankPart
from ckptstore.format.manifest import PieceTable
from ckptstore.repo import Repo
from ckptstore.states.lazy import LazyTensor
from ckptstore.states.shards import Shard, write_part


@dataclass(eq=False, repr=False, kw_only=True)
class FileWriter(io.RawIOBase):
    """A stream whose bytes go into packs while it is written; for one thread.

    It holds at most ``FILE_PART_BYTES``. An error in its ``with`` block ends it without a file.

    Parameters
    ----------
    name
        Name of the tensor.
    shared
        Tables of versions whose chunks are not written again.
    looked
        Number of the catalog in which those were looked up.
    done
        Called once when the stream is closed, with the parts of the tensor; commits them.
    """

    repo: Repo
    name: str
    shared: list[PieceTable]
    looked: int
    done: Callable[[list[RankPart]], object]

    def __post_init__(self) -> None:
        """Begin with nothing written."""
        self._held = bytearray()
        self._parts: list[RankPart] = []
        self._written = 0
        grid = self.repo.chunk_bytes
        self._part_bytes = max(grid, limits.FILE_PART_BYTES // grid * grid)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self._written + len(self._held)

    def write(self, data: Any) -> int:  # any contiguous buffer
        """Take bytes; return their number."""
        if self.closed:
            raise ValueError("write to a closed file")
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view, at = view.cast("B"), 0
        while at < len(view):
            more = view[at : at + self._part_bytes - len(self._held)]
            self._held += more
            at += len(more)
            if len(self._held) == self._part_bytes:
                self._flush_part()
        return len(view)

    def _flush_part(self) -> None:
        """Write the bytes held; they are durable on return."""
        held, self._held = self._held, bytearray()
        tensor = torch.frombuffer(held or bytearray(1), dtype=torch.uint8)[: len(held)]
        size = self._written + len(held)
        shard = Shard(name=self.name, shape=(size,), offsets=(self._written,), tensor=tensor)
        part = write_part(
            self.repo,
            [shard],
            {},
            paths={self.name: (self.name,)},
            shared=self.shared,
            looked=self.looked,
            codec=self.repo.options.codec,
        )
        self._parts.append(part)
        self._written = size

    def close(self) -> None:
        """Write the rest, and commit the file."""
        if self.closed:
            return
        try:
            if self._held or not self._parts:
                self._flush_part()
            shards = [replace(part.shards[0], shape=(self._written,)) for part in self._parts]
            self.done([replace(p, shards=(s,)) for p, s in zip(self._parts, shards, strict=True)])
        finally:
            super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the stream; after an error without a file."""
        if kind is not None:
            super().close()
        self.close()

    def __del__(self) -> None:
        """Leave no file behind that nobody closed."""


def reading(tensor: LazyTensor) -> io.BufferedReader:
    """Return a stream that fetches the chunks that are read, and checks them; for one thread.

    It raises CorruptTensorError for a damaged chunk, and StorageError.
    """
    return io.BufferedReader(_Chunks(tensor), limits.CHUNK_BYTES_DEFAULT)


class _Chunks(io.RawIOBase):
    """The bytes of a tensor, each read as often as it is asked for."""

    def __init__(self, tensor: LazyTensor) -> None:
        super().__init__()
        self._tensor = tensor
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; return the new position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._tensor)}[whence]
        if base + offset < 0:
            raise ValueError(f"{base + offset} is before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, out: Any) -> int:  # any writable buffer
        """Fetch at most ``FILE_PART_BYTES``; return their number, 0 at the end."""
        into = memoryview(out).cast("B")[: limits.FILE_PART_BYTES]
        found = self._tensor[self._at : self._at + len(into)].numpy()
        copy_bytes(into[: len(found)], memoryview(found))
        self._at += len(found)
        return len(found)
