"""Tensors that change while they are written: what is stored is what was digested."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import SYSTEM, CodecChoice, Options
from ckptstore.events import silent
from ckptstore.objects.index import KnownPieces, Location
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.objects.piece_writer import write_pieces

CHUNK_BYTES = 1 << 16


@dataclass
class _Trained:
    """A tensor of bytes, all equal, which another thread raises by one again and again."""

    nbytes: int
    in_place: bool
    dtype: str = "uint8"
    itemsize: int = 1
    row_bytes: int = 1
    memory: bytearray = field(default_factory=bytearray)
    changes: int = 0

    def __post_init__(self) -> None:
        self.memory = bytearray(self.nbytes)

    @property
    def payload(self) -> _Trained:
        return self

    def change(self) -> None:
        """Take a step."""
        self.changes += 1
        self.memory[:] = bytes([self.changes % 251]) * self.nbytes

    def view(self) -> memoryview | None:
        """Give the bytes in place, after a step."""
        self.change()
        return memoryview(self.memory).toreadonly() if self.in_place else None

    def copy_into(self, start: int, out: memoryview) -> None:
        """Copy, after a step."""
        self.change()
        out[:] = self.memory[start : start + len(out)]


class _Between(KnownPieces):
    """Knows nothing; each look-up, which stands between digest and store, is a step of training."""

    def __init__(self, sources: list[_Trained]) -> None:
        super().__init__([])
        self._sources = sources

    def find(self, piece_id: bytes, raw_bytes: int) -> Location | None:
        """Let every tensor change."""
        for source in self._sources:
            source.change()
        return super().find(piece_id, raw_bytes)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("size", [3 * CHUNK_BYTES, 1000], ids=["large", "small"])
def test_what_is_stored_is_what_was_digested(size: int, codec: CodecChoice, in_place: bool) -> None:
    """Every piece that comes back has its id, and is the tensor between two of its changes."""
    sources = [_Trained(size, in_place), _Trained(size, in_place)]
    backend = MemoryBackend(f"changing/{size}/{codec}/{in_place}")
    written = write_pieces(
        sources,
        backend=backend,
        environment=SYSTEM,
        options=Options(workers=1),
        known=_Between(sources),
        chunk_bytes=CHUNK_BYTES,
        choice=codec,
        progress=silent,
    )
    outs = [bytearray(int(raw)) for raw in written.table.raw]
    read_pieces(
        written.table,
        [ReadItem(row=row, out=memoryview(out), label="w") for row, out in enumerate(outs)],
        backend=backend,
        options=Options(workers=1),
        progress=silent,
    )

    assert sum(map(len, outs)) == 2 * size
    assert all(len(set(out)) == 1 for out in outs)
    assert all(source.changes > 2 for source in sources)
