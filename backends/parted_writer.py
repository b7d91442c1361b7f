"""Objects in parts: each part is sent while the next is collected, dozens at once.

Object stores keep an unfinished upload out of sight until its last request, so a pack shows whole
or never, as if it were sent in one piece. Parts are small, for one connection moves 50 to 90 MB/s
and many fill a network; packs stay large, for listings and storage classes count objects.
Measured against small packs: docs/design/0025-width.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptstore.backends.base import Buffer, Buffers, ObjectWriter, parts_of
from ckptstore.backends.buffers import Memory
from ckptstore.backends.part_sender import PartSender
from ckptstore.byte_copies import copy_bytes
from ckptstore.errors import CkptStoreError, StorageError, TransientStorageError
from ckptstore.prefault import prefault


class Upload(Protocol):
    """The requests for one object. Each is sent once and raises errors of the tree.

    Bodies are free again when a call returns or raises. ``part`` is called from several threads.
    """

    def whole(self, body: Buffers) -> None:
        """Send the object in one request."""

    def begin(self) -> None:
        """Begin an upload in parts."""

    def part(self, number: int, body: Buffers) -> Any:  # noqa: ANN401 - of the storage
        """Send part `number`, from 1 on, in place of an earlier try; return its receipt."""

    def complete(self, receipts: Sequence[Any], size_bytes: int) -> None:
        """Show the object; no error if an earlier try did, and its answer was lost."""

    def abandon(self) -> None:
        """Drop the parts that were sent."""


@dataclass(slots=True, eq=False)
class _Kept:
    """Memory that was handed over, and the number of parts that hold some of it."""

    done: Callable[[], None]
    parts_count: int = 1
    """One more while it is written."""


@dataclass(slots=True)
class _Part:
    """One part of an object."""

    body: list[memoryview] = field(default_factory=list)
    size: int = 0
    """Bytes of the body."""
    memory: Memory | None = None
    """Bytes of the body that were copied, from its beginning on."""
    copied: int = 0
    kept: list[_Kept] = field(default_factory=list)
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
        self._upload, self._sender = upload, sender
        self._part_bytes = sender.part_bytes()
        """One for the whole object: some services refuse others."""
        self._open: _Part | None = None
        """The part that is collected."""
        self._parts: list[_Part] = []
        self._changed = threading.Condition()
        """Guards the parts and what follows."""
        self._under_way = 0
        self._beginning = threading.Lock()
        self._begun = self._dropped = self._finished = False

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append a copy; sends each part that is full once there is more."""
        self._check()
        for one in parts_of(data):
            view = memoryview(one).cast("B")
            while len(view):
                part = self._part()
                memory = part.memory = part.memory or self._sender.pool.take()
                count = min(len(view), self._part_bytes - part.size)
                end = part.copied + count
                with memoryview(memory.memory) as whole:
                    place = whole[part.copied : end]
                prefault(place)
                copy_bytes(place, view[:count])
                memory.touched = max(memory.touched, end)
                part.copied = end
                part.body.append(place)
                part.size += count
                view = view[count:]

    def write_kept(self, data: Sequence[Buffer], done: Callable[[], None]) -> None:
        """Append without a copy."""
        self._check()
        kept = _Kept(done)
        for one in data:
            view = memoryview(one).cast("B")
            while len(view):
                part = self._part()
                count = min(len(view), self._part_bytes - part.size)
                part.body.append(view[:count])
                part.size += count
                if kept not in part.kept[-1:]:
                    part.kept.append(kept)
                    with self._changed:
                        kept.parts_count += 1
                view = view[count:]
        self._release(kept)

    def _check(self) -> None:
        if self._finished:
            raise ValueError("this writer is finished")
        self._raise_failures(transient=False)

    def _part(self) -> _Part:
        """Return the part that is collected, which has room."""
        if self._open is not None and self._open.size == self._part_bytes:
            self._close_part()
        if self._open is None:
            self._sender.take(self._part_bytes)
            self._open = _Part()
        return self._open

    def commit(self) -> None:
        """Send what is left, wait for all parts, and show the object."""
        if self._finished:
            return
        self._raise_failures(transient=False)  # a write that raised has not taken its bytes
        if not self._parts:
            self._upload.whole([] if self._open is None else self._open.body)
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
        part, self._open = self._open, None
        with self._changed:
            held = [part for part in self._parts if part.failure is not None]
            for failed in held:
                failed.failure = None
        for one in held if part is None else [*held, part]:
            self._give_back(one)

    def _give_back(self, part: _Part) -> None:
        """Return the memory of a part that is not needed any more."""
        part.body.clear()
        while part.kept:
            self._release(part.kept.pop())
        memory, part.memory = part.memory, None
        if memory is not None:
            self._sender.pool.give(memory)
        self._sender.give(self._part_bytes)

    def _release(self, kept: _Kept) -> None:
        """Note that one part fewer holds this memory."""
        with self._changed:
            kept.parts_count -= 1
            last = not kept.parts_count
        if last:
            kept.done()

    def _close_part(self) -> None:
        """Send the part that was collected."""
        part, self._open = self._open, None
        if part is not None:
            self._parts.append(part)
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
                part.receipt = self._upload.part(number, part.body)
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the owner
            failure = error
        with self._changed:
            self._under_way -= 1
            done = failure is None or self._dropped
            part.failure = None if done else failure
            last = self._dropped and not self._under_way
            self._changed.notify_all()
        if done:
            self._give_back(part)
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
