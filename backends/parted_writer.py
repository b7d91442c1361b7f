"""Objects in parts: each part is sent while the next is collected, dozens at once.

Object stores keep an unfinished upload out of sight until its last request, so a pack shows whole
or never, as if it were sent in one piece. Parts are small, for one connection moves 50 to 90 MB/s
and many fill a network; packs stay large, for listings and storage classes count objects.
Measured against small packs: docs/design/0025-width.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ckptstore.backends.base import Buffer, ObjectWriter, parts_of
from ckptstore.backends.buffers import Memory
from ckptstore.backends.part_sender import PartSender
from ckptstore.byte_copies import copy_bytes
from ckptstore.errors import CkptStoreError, StorageError, TransientStorageError
from ckptstore.prefault import prefault


class Upload(Protocol):
    """The requests for one object. Each is sent once and raises errors of the tree.

    Bodies are free again when a call returns or raises. ``part`` is called from several threads.
    """

    def whole(self, body: memoryview) -> None:
        """Send the object in one request."""

    def begin(self) -> None:
        """Begin an upload in parts."""

    def part(self, number: int, body: memoryview) -> Any:  # noqa: ANN401 - of the storage
        """Send part `number`, from 1 on, in place of an earlier try; return its receipt."""

    def complete(self, receipts: Sequence[Any], size_bytes: int) -> None:
        """Show the object; no error if an earlier try did, and its answer was lost."""

    def abandon(self) -> None:
        """Drop the parts that were sent."""


@dataclass(slots=True)
class _Part:
    """One part of an object."""

    memory: Memory
    size: int
    receipt: Any = None
    """The storage's; None until it was sent."""
    failure: BaseException | None = None
    """Of the last try."""


class PartedWriter(ObjectWriter):
    """Sends an object in parts of one size while it is written; a small one in one request.

    A part that failed for a while keeps its memory and is sent again by ``commit``; a commit that
    raised ``TransientStorageError`` may be called again.
    """

    def __init__(self, upload: Upload, sender: PartSender) -> None:
        self._upload = upload
        self._sender = sender
        self._part_bytes = sender.part_bytes()
        """One for the whole object: some services refuse others."""
        self._memory: Memory | None = None
        self._size = 0
        """Bytes of the part that is collected."""
        self._parts: list[_Part] = []
        self._changed = threading.Condition()
        """Guards the parts and what follows."""
        self._under_way = 0
        self._dropped = False
        self._finished = False
        self._beginning = threading.Lock()
        self._begun = False

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append; sends each part that is full once there is more."""
        if self._finished:
            raise ValueError("this writer is finished")
        self._raise_failures(transient=False)
        for one in parts_of(data):
            view = memoryview(one).cast("B")
            while len(view):
                if self._size == self._part_bytes:
                    self._close_part()
                if self._memory is None:
                    self._memory = self._sender.take(self._part_bytes)
                count = min(len(view), self._part_bytes - self._size)
                end = self._size + count
                with memoryview(self._memory.memory) as whole, whole[self._size : end] as place:
                    prefault(place)
                    copy_bytes(place, view[:count])
                self._size = end
                self._memory.touched = max(self._memory.touched, self._size)
                view = view[count:]

    def commit(self) -> None:
        """Send what is left, wait for all parts, and show the object."""
        if self._finished:
            return
        self._raise_failures(transient=False)  # a write that raised has not taken its bytes
        if not self._parts:
            memory = b"" if self._memory is None else self._memory.memory
            with memoryview(memory) as whole, whole[: self._size] as body:
                self._upload.whole(body)
        else:
            self._close_part()
            for number, part in enumerate(self._parts, 1):
                with self._changed:
                    failed = part.failure is not None
                if failed:
                    self._start(number, part)
            with self._changed:
                while self._under_way:
                    self._changed.wait()
            self._raise_failures(transient=True)
            sizes = sum(part.size for part in self._parts)
            self._upload.complete([part.receipt for part in self._parts], sizes)
        self._finish()

    def abort(self) -> None:
        """Drop the parts; those on their way are waited for by their own threads."""
        if self._finished:
            return
        with self._changed:
            self._dropped = True
            last = not self._under_way
        self._finish()
        if last:
            self._abandon()

    def _finish(self) -> None:
        """Return the memory that no thread uses."""
        self._finished = True
        memory, self._memory = self._memory, None
        if memory is not None:
            self._sender.give(memory, self._part_bytes)
        with self._changed:
            kept = [part for part in self._parts if part.failure is not None]
            for part in kept:
                part.failure = None
        for part in kept:
            self._sender.give(part.memory, self._part_bytes)

    def _close_part(self) -> None:
        """Send the part that was collected."""
        memory, self._memory = self._memory, None
        if memory is not None:
            part = _Part(memory, self._size)
            self._parts.append(part)
            self._size = 0
            self._start(len(self._parts), part)

    def _start(self, number: int, part: _Part) -> None:
        with self._changed:
            part.failure = None
            self._under_way += 1
        self._sender.start(lambda: self._send(number, part))

    def _send(self, number: int, part: _Part) -> None:
        """Send one part, in a thread of the sender."""
        failure: BaseException | None = None
        try:
            if not self._dropped:
                self._begin()
                with memoryview(part.memory.memory) as whole, whole[: part.size] as body:
                    part.receipt = self._upload.part(number, body)
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the owner
            failure = error
        with self._changed:
            self._under_way -= 1
            done = failure is None or self._dropped
            part.failure = None if done else failure
            last = self._dropped and not self._under_way
            self._changed.notify_all()
        if done:
            self._sender.give(part.memory, self._part_bytes)
        if last:
            self._abandon()

    def _begin(self) -> None:
        with self._beginning:
            if not self._begun:
                self._upload.begin()
                self._begun = True

    def _abandon(self) -> None:
        if self._begun:
            with suppress(CkptStoreError):  # gc removes what is left
                self._upload.abandon()

    def _raise_failures(self, *, transient: bool) -> None:
        """Raise the first failure, of those that another try cannot mend before all others."""
        with self._changed:
            failures = [part.failure for part in self._parts if part.failure is not None]
        failures.sort(key=lambda error: isinstance(error, TransientStorageError))
        for error in failures[:1]:
            if transient or not isinstance(error, TransientStorageError):
                raise error


def gone(key: str) -> StorageError:
    """Return the error for an upload that the storage no longer knows."""
    msg = f"put {key}: the storage has dropped the parts that were sent"
    return StorageError(msg, hint="save again; look for a lifecycle rule that aborts uploads early")
