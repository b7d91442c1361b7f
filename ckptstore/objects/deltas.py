"""Choice of the pieces of a save that become deltas, of their bases, and of new keyframes.

The base of a piece is the piece at the same place of the version before; or that piece's own base
if it is a delta itself, so that every delta is one step from a piece that is stored by itself, a
*keyframe*. A sample of both tells early what a delta would take; kinds of tensors for which it
does not pay (first moments) are left alone for some saves, so that they cost nothing.

When a new keyframe begins: let a cycle be a keyframe of ``f`` bytes and the deltas to it, of
``d(1) <= d(2) <= ...``, since training moves away. After ``n`` pieces a cycle has cost
``A(n) = (f + d(1) + ... + d(n-1)) / n`` each. One more delta lowers that as long as
``d(n) < A(n)``, and from the first that does not, none will: there the mean has its minimum, and
the piece is stored by itself. Decided for each piece, from what its own cycle took.

A base is a help and never a need: one that cannot be read, or was condemned, costs a warning and
the bytes of a piece that is stored by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptstore.backends.base import Backend
from ckptstore.codecs.codec_table import BaseData, Encoded, encode, encode_delta
from ckptstore.codecs.delta import sampled
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import Options
from ckptstore.errors import CkptStoreError
from ckptstore.events import silent
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.objects.index import Base, base_of
from ckptstore.objects.piece_reader import ReadItem, read_pieces

_log = logging.getLogger("ckptstore")

# A delta is stored only below this share of what the piece takes by itself. Source: a load
# reads the base as well, twice the bytes; for less than a twentieth that is not worth it. Second
# moments pass it up to some ten steps apart, first moments never do (docs/design/0012-deltas.md).
_WORTH: Final = 0.95
# A kind of tensor for which that was so for so many pieces, and for none before in this save, is
# left alone for so many saves; a comparison with a keyframe that deltas refer to already does not
# count, since the next save has a nearer one. Source: two reads of 4 MiB a kind and eight saves are
# below 1% of the bytes of a state of 1 GB, whose four or five kinds they are.
_TRIES: Final = 2
_PAUSE_SAVES: Final = 8
# How many pieces after the one that is asked for are looked through for neighbours to fetch with
# it. Source: packs that two workers fill take turns; a request holds 16 MiB at most.
_AHEAD: Final = 16

_Data = bytes | bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class Older:
    """The version that a save follows, as far as its tensors have the same places."""

    table: PieceTable
    rows: tuple[int | None, ...]
    """Per tensor of the save: the first piece of the same tensor; None where there is none."""
    counts: tuple[int, ...]
    """Per tensor of the save: pieces that it has there."""
    kinds: tuple[str, ...]
    """Per tensor: what tensors have in common that change alike."""


@dataclass(slots=True)
class _Kind:
    """Experience with one kind of tensors."""

    losses: int = 0
    """Pieces of this save for which a delta to the version before did not pay, and none did."""
    pause: int = 0
    """Saves for which it is left alone."""


class Keyframes:
    """Bases and sizes of cycles that one process keeps from save to save of one store.

    Safe to use from any thread.

    Parameters
    ----------
    bytes_max
        How much decoded data is kept. What is kept stays until it is not needed any more: a state
        that is larger finds a part of its bases here at every save, instead of none.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._data: dict[bytes, _Data] = {}
        self._wanted: set[bytes] = set()
        self._size = 0
        self._cycles: dict[bytes, tuple[int, int]] = {}
        self.kinds: dict[str, _Kind] = {}

    def begin(self, wanted: Iterable[bytes]) -> None:
        """Know the bases that the next save may need; others make room if need be."""
        with self._lock:
            self._wanted = set(wanted)
            self._cycles = {key: self._cycles[key] for key in self._wanted & self._cycles.keys()}
            for kind in self.kinds.values():
                kind.losses, kind.pause = 0, max(0, kind.pause - 1)

    def get(self, piece_id: bytes) -> _Data | None:
        """Return a piece that is kept."""
        with self._lock:
            return self._data.get(piece_id)

    def keep(self, piece_id: bytes, data: _Data | memoryview) -> None:
        """Keep a piece if there is room, or can be made; of a view a copy."""
        with self._lock:
            self._wanted.add(piece_id)
            if piece_id in self._data:
                return
            if self._size + len(data) > self._bytes_max:
                for old in [key for key in self._data if key not in self._wanted]:
                    self._size -= len(self._data.pop(old))
            if self._size + len(data) <= self._bytes_max:
                self._data[piece_id] = bytes(data) if isinstance(data, memoryview) else data
                self._size += len(data)

    def release(self, piece_id: bytes) -> None:
        """Know that a piece is the base of nothing that is to come."""
        with self._lock:
            self._wanted.discard(piece_id)

    def cycle(self, piece_id: bytes) -> tuple[int, int] | None:
        """Return how many pieces the cycle of a base has, and their bytes, if that is known."""
        with self._lock:
            return self._cycles.get(piece_id)

    def count(self, piece_id: bytes, stored_bytes: int, *, start: bool = False) -> None:
        """Note one more piece of a cycle; the keyframe itself with `start`."""
        with self._lock:
            pieces, total = (0, 0) if start else self._cycles.get(piece_id, (0, 0))
            self._cycles[piece_id] = (pieces + 1, total + stored_bytes)


@dataclass(slots=True, kw_only=True)
class Deltas:
    """The deltas of one save while its workers run. Any thread may ask."""

    older: Older
    keyframes: Keyframes
    backend: Backend
    options: Options
    without: Collection[str] = ()
    """Ids of packs that were condemned."""
    _rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per piece of the save: the row that its base has, -1 if it has none."""
    _kinds: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reading: dict[int, Future[_Data | None]] = field(default_factory=dict)
    """Bases on their way or here, by row."""
    _warned: bool = False

    def begin(self, first: Sequence[int]) -> None:
        """Know the pieces of the save: per tensor, and one more, the place of its first."""
        older, table = self.older, self.older.table
        rows = np.full(first[-1], -1, np.int64)
        kinds = np.zeros(first[-1], np.int64)
        for place, start in enumerate(older.rows):
            low, high = first[place], first[place + 1]
            kinds[low:high] = place
            if start is not None and high - low == older.counts[place]:
                rows[low:high] = np.arange(start, start + high - low)
        if table.base is not None and len(rows):
            named = table.base[rows]  # of the last one where there is none, which is not used
            deltas = (rows >= 0) & (named < len(table))
            rows[deltas] = named[deltas]
        bad = [place for place, pack in enumerate(table.packs) if pack in self.without]
        if bad and len(rows):
            rows[np.isin(table.pack[rows], bad)] = -1
        self._rows, self._kinds = rows, kinds
        self.keyframes.begin(table.ids[row].tobytes() for row in np.unique(rows[rows >= 0]))

    def encode(
        self, slot: int, piece_id: bytes, raw: memoryview, layout: Layout
    ) -> tuple[Encoded, Base | None]:
        """Return a piece as it is to be stored, and what it then refers to.

        Parameters
        ----------
        slot
            Its place among the pieces of the save.
        """
        row, kind = int(self._rows[slot]), self._kind(slot)
        table = self.older.table
        if row < 0 or kind.pause or int(table.raw[row]) != len(raw):
            return self._alone(piece_id, raw, layout, keep=not kind.pause), None
        base_id = table.ids[row].tobytes()
        data = self.keyframes.get(base_id) or self._fetch(slot, row, ahead=kind.losses < 0)
        if data is None:
            return self._alone(piece_id, raw, layout, keep=True), None
        base = memoryview(data)
        expected = sampled(raw, base, layout)
        bytes_max = _WORTH * min(expected.full_bytes, len(raw))
        if expected.delta_bytes >= bytes_max:
            if self.keyframes.cycle(base_id) is None:  # else it was left behind: a cycle ends
                self._loses(kind)
            return self._alone(piece_id, raw, layout, keep=not kind.pause), None
        kind.losses = -len(self._rows)  # it pays for some of its pieces
        pieces, total = self.keyframes.cycle(base_id) or (1, self._stored(row))
        if expected.delta_bytes + CHUNK_HEADER_BYTES < total / pieces:
            piece = BaseData(piece_id=base_id, data=base)
            delta = encode_delta(raw, piece, layout, expected.form)
            if delta.stored_bytes < bytes_max:
                if pieces == 1:
                    self.keyframes.count(base_id, self._stored(row), start=True)
                self.keyframes.count(base_id, delta.stored_bytes + CHUNK_HEADER_BYTES)
                self.keyframes.keep(base_id, data)
                return delta, base_of(table, row)
        self.keyframes.release(base_id)
        return self._alone(piece_id, raw, layout, keep=True), None

    def _alone(self, piece_id: bytes, raw: memoryview, layout: Layout, *, keep: bool) -> Encoded:
        """Return a piece that begins a cycle, and keep it for the next save if it may be a base."""
        if keep:
            self.keyframes.keep(piece_id, raw)
        return encode(raw, layout, "delta")

    def _kind(self, slot: int) -> _Kind:
        name = self.older.kinds[int(self._kinds[slot])]
        with self._lock:
            return self.keyframes.kinds.setdefault(name, _Kind())

    def _loses(self, kind: _Kind) -> None:
        with self._lock:
            kind.losses += 1
            if kind.losses >= _TRIES:
                kind.pause = _PAUSE_SAVES

    def _stored(self, row: int) -> int:
        return int(self.older.table.stored[row]) + CHUNK_HEADER_BYTES

    # --- bases that are not in memory -------------------------------------------------------------

    def _fetch(self, slot: int, row: int, *, ahead: bool) -> _Data | None:
        """Return a base from the storage, checked; None if it cannot be had.

        With `ahead` its neighbours that come next are fetched with it, and wait until they are
        asked for: once deltas are known to pay for the kind.
        """
        with self._lock:
            future = self._reading.pop(row, None)
            if future is None:
                run = self._run(slot, row) if ahead else [row]
                for other in run[1:]:
                    self._reading[other] = Future()
                waiting = [self._reading[other] for other in run[1:]]
        if future is not None:
            return future.result()
        found: list[_Data | None] = [None] * len(run)
        try:
            found = self._read(run)
        finally:
            for promise, data in zip(waiting, found[1:], strict=True):
                promise.set_result(data)
        return found[0]

    def _run(self, slot: int, row: int) -> list[int]:
        """Return a row and those after it whose chunks follow, as far as one request may reach."""
        table, capabilities = self.older.table, self.backend.capabilities
        held = sum(int(table.raw[other]) for other in self._reading)
        if held > self.options.host_bytes // 4:  # what nobody asked for: pieces that were shared
            for other in [other for other, future in self._reading.items() if future.done()]:
                del self._reading[other]
        run, start = [row], int(table.offset[row])
        end = start + self._stored(row)
        room = min(capabilities.read_bytes_max, self.options.host_bytes // 8)
        for at in range(slot + 1, min(slot + 1 + _AHEAD, len(self._rows))):
            other = int(self._rows[at])
            kind = self.keyframes.kinds.get(self.older.kinds[int(self._kinds[at])])
            if other < 0 or kind is None or kind.losses >= 0 or other in self._reading:
                continue
            if table.pack[other] != table.pack[row]:
                continue
            offset = int(table.offset[other])
            after = offset + self._stored(other)
            near = 0 <= offset - end <= capabilities.read_gap_bytes and after - start <= room
            if not near or self.keyframes.get(table.ids[other].tobytes()) is not None:
                break
            run.append(other)
            end = after
        return run

    def _read(self, rows: Sequence[int]) -> list[_Data | None]:
        table = self.older.table
        memory = [bytearray(int(table.raw[row])) for row in rows]
        lost: dict[int, CkptStoreError] = {}
        items = [
            ReadItem(row=row, out=memoryview(data), label=f"(base {row})")
            for row, data in zip(rows, memory, strict=True)
        ]
        try:
            read_pieces(
                table,
                items,
                backend=self.backend,
                options=dataclasses.replace(self.options, workers=1),
                progress=silent,
                on_failure=lambda item, error: lost.update({item.row: error}),
            )
        except CkptStoreError as error:
            lost = dict.fromkeys(rows, error)
        for why in lost.values():
            self._warn(why)
        return [None if row in lost else data for row, data in zip(rows, memory, strict=True)]

    def _warn(self, error: CkptStoreError) -> None:
        with self._lock:
            told, self._warned = self._warned, True
        if not told:
            msg = "stored without deltas, since the version before cannot be read: %s"
            _log.warning(msg, error.message)
