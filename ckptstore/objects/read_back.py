"""Packs that were just written, read again and compared with what was to be written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from ckptstore.backends.base import Backend
from ckptstore.config import Environment
from ckptstore.errors import ColdObjectError, CorruptObjectError, IntegrityError, NotFoundError
from ckptstore.format.keys import pack_key
from ckptstore.format.pack import CHUNK_HEADER_BYTES, IndexRow
from ckptstore.objects.copying import Room, broken, take_chunk

__all__ = ["ReadBack", "altered"]


def altered(url: str, error: IntegrityError) -> CorruptObjectError:
    """Return the error for a target that gives back something else than was written."""
    msg = f"{url} does not hold what was written there: {error.message}"
    return CorruptObjectError(msg, hint="examine the target: ckptstore doctor")


def _nothing() -> None:
    """Let the reading go on."""


class ReadBack:
    """Reads each pack as soon as it is durable, while the next ones are filled and sent.

    Each chunk is compared with its row of the index: its lengths, its id, the checksum of its
    stored bytes, and what it decodes to with its id. Of a delta, which takes its base to be
    decoded, all but the last.

    May be called from any thread. A call holds one request of the backend at a time
    (``read_bytes_max`` or one chunk) and one decoded chunk.
    """

    def __init__(self, backend: Backend, environment: Environment) -> None:
        self._backend = backend
        self._clock = environment.monotonic
        self._lock = threading.Lock()
        self._rooms: list[Room] = []
        """Memory of calls that ended, for those that come: of at most so many as ran at once."""
        self.seconds = 0.0
        """Of all calls together."""
        self.is_cold = False
        """Some pack went to a storage class that cannot be read: it counts as not read."""

    def __call__(
        self, pack: str, rows: Sequence[IndexRow], go_on: Callable[[], None] = _nothing
    ) -> None:
        """Read a pack.

        Parameters
        ----------
        go_on
            Called before each request; what it raises ends the reading.

        Raises
        ------
        CorruptObjectError
            The storage does not hold what was written there.
        StorageError
            It failed.
        """
        began = self._clock()
        with self._lock:
            room = self._rooms.pop() if self._rooms else Room()
        try:
            for part in _spans(rows, self._backend.capabilities.read_bytes_max):
                go_on()
                self._read(pack, part, room)
        except ColdObjectError:
            self.is_cold = True
        except NotFoundError as error:
            gone = CorruptObjectError(f"pack {pack} is gone")
            raise altered(self._backend.url, gone) from error
        except IntegrityError as error:
            raise altered(self._backend.url, error) from error
        with self._lock:
            self._rooms.append(room)
            self.seconds += self._clock() - began

    def _read(self, pack: str, rows: Sequence[IndexRow], room: Room) -> None:
        start, last = rows[0].offset, rows[-1]
        memory = room.bytes(last.offset + CHUNK_HEADER_BYTES + last.stored_bytes - start)
        self._backend.read_into(pack_key(pack), start, [memory])
        for row in rows:
            where = f"{pack} at {row.offset}"
            at = row.offset - start
            found = take_chunk(
                memory[at : at + CHUNK_HEADER_BYTES + row.stored_bytes],
                stored_bytes=row.stored_bytes,
                raw_bytes=row.raw_bytes,
                where=where,
                room=room,
            )
            if found.chunk_id != row.chunk_id:
                raise broken(where, "another chunk is there")
            if found.piece_id(0, row.raw_bytes) != row.chunk_id:
                raise broken(where, "content does not match its chunk id")


def _spans(rows: Sequence[IndexRow], bytes_max: int) -> Iterator[Sequence[IndexRow]]:
    """Yield neighbouring chunks that are read with one request each."""
    first = 0
    for at, row in enumerate(rows):
        end = row.offset + CHUNK_HEADER_BYTES + row.stored_bytes
        if at > first and end - rows[first].offset > bytes_max:
            yield rows[first:at]
            first = at
    if rows:
        yield rows[first:]
