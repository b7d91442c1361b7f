"""Packs that were just written, read again and compared with what was to be written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ckptstore.backends.base import Backend
from ckptstore.config import Environment, Options
from ckptstore.errors import ColdObjectError, CorruptObjectError, IntegrityError, NotFoundError
from ckptstore.events import ProgressCallback
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import IndexRow
from ckptstore.objects.copying import Copied, Room, copy_chunks, read_rows
from ckptstore.objects.plan import Want, join_chunks


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
            for part in join_chunks(rows, self._backend.capabilities):
                go_on()
                for _ in read_rows(self._backend, pack, part, room):
                    pass
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


def copy_read_back(
    table: PieceTable,
    wants: Sequence[Want],
    *,
    source: Backend,
    target: Backend,
    environment: Environment,
    options: Options,
    progress: ProgressCallback,
    check: bool,
    whole_bytes: int = 0,
) -> Copied:
    """Copy chunks as :func:`ckptstore.objects.copying.copy_chunks`, and read them back.

    Parameters
    ----------
    check
        Read back what was written, but for what deltas decode to; else this only copies.
    """
    read_back = ReadBack(target, environment) if check else None
    copied = copy_chunks(
        table,
        wants,
        source=source,
        target=target,
        environment=environment,
        options=options,
        progress=progress,
        after=read_back,
        whole_bytes=whole_bytes,
    )
    if read_back is not None:
        copied.read_back_s, copied.is_cold = read_back.seconds, read_back.is_cold
    return copied
