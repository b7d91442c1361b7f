"""Writes one encrypted object in pieces, with a few segments in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptstore import limits
from ckptstore.backends.base import Buffer, ObjectWriter, parts_of
from ckptstore.backends.sealing import Sealer
from ckptstore.errors import InvalidInputError, StorageError


class EncryptedWriter(ObjectWriter):
    """Seals segments as they become full, and passes them on a few at a time.

    The last segment is sealed as such, so a full one waits for the bytes after it. Each segment is
    sealed once: a commit that is retried sends nothing again. A forked child cannot continue an
    object that its parent began, since both would seal different bytes under one nonce.
    """

    def __init__(self, inner: ObjectWriter, sealer: Sealer, *, segment_bytes: int) -> None:
        self._inner = inner
        self._sealer = sealer
        self._segment_bytes = segment_bytes
        self._pid = os.getpid()
        self._held = bytearray()
        """At most a segment, which may be the last."""
        self._ready: list[Buffer] = [sealer.header]
        """Sealed, and not yet handed on."""
        self._index = 0
        self._sealed_last = False
        self._incomplete = False
        """Something that was sealed may not have got to the storage."""

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append; passes on the segments that become full."""
        self._check()
        if self._sealed_last:
            msg = "this writer is finished"
            raise ValueError(msg)
        for part in parts_of(data):
            self._append(memoryview(part).cast("B"))

    def commit(self) -> None:
        """Seal the last segment, and make the object visible."""
        self._check()
        if not self._sealed_last:
            self._sealed_last = self._incomplete = True
            self._ready.append(self._sealer.seal(self._index, self._held, last=True))
            self._held = bytearray()
            self._hand_on()
        self._inner.commit()

    def abort(self) -> None:
        """Drop the bytes written so far."""
        self._sealed_last = True
        self._held = bytearray()
        self._ready = []
        self._inner.abort()

    def _append(self, data: memoryview) -> None:
        size = self._segment_bytes
        while data.nbytes:
            if len(self._held) == size:
                self._seal(self._held)
                self._held = bytearray()
            if not self._held and data.nbytes > size:
                self._seal(data[:size])  # without a copy
                data = data[size:]
                continue
            count = min(size - len(self._held), data.nbytes)
            self._held += data[:count]
            data = data[count:]

    def _seal(self, data: Buffer) -> None:
        self._ready.append(self._sealer.seal(self._index, data, last=False))
        self._index += 1
        if len(self._ready) >= limits.SEGMENTS_PER_WRITE:
            self._hand_on()

    def _hand_on(self) -> None:
        ready, self._ready = self._ready, []
        self._incomplete = True
        self._inner.write(ready)
        self._incomplete = False

    def _check(self) -> None:
        if self._incomplete:
            msg = f"a part of {self._sealer.key} could not be written"
            raise StorageError(msg, hint="write the object again from its beginning")
        if os.getpid() != self._pid:
            msg = f"{self._sealer.key} was begun in another process; only that one can continue it"
            raise InvalidInputError(msg, hint="open a writer after the fork")
