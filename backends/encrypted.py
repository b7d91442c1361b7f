"""Encrypts objects on write and decrypts them on read; names, times and counts stay as they are.

Each object has a key of its own, which follows from the store's key, a random salt in the object,
and its name; it is cut into segments, each sealed with its number and whether it is the last
(:mod:`ckptstore.format.segments`). So a range costs the segments that it touches, and an object
that was changed, moved to another name, truncated or extended does not decrypt. Reasons and
measurements: docs/design/0019-encryption.md.

Sizes reported are those of the plain content. ``store.json``, ``keys/`` and the two objects of a
published store are not encrypted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from ckptstore import errors, limits
from ckptstore.backends import base
from ckptstore.backends.buffers import BufferPool
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import Scatter
from ckptstore.backends.sealing import DataKey, Sealer, salt_of
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import SYSTEM, Environment
from ckptstore.format.keys import CLEAR_KEYS, KEYS_PREFIX
from ckptstore.format.segments import HEADER_BYTES, SALT_BYTES, TAG_BYTES, SegmentLayout
from ckptstore.prefault import prefault


@dataclass(frozen=True, slots=True)
class _Head:
    """Facts about an object that a read of one of its ranges needs."""

    sealer: Sealer
    plain_bytes: int


class EncryptedBackend(WrapperBackend):
    """Encrypts every object but those that any reader must be able to read: see ``_is_clear``.

    It wraps the retry wrapper, so that a retry sends the same encrypted bytes.
    Pickled, it carries the store's key to the worker that unpickles it.

    A read in flight holds the fetched bytes a second time, encrypted, beside the buffers that it
    fills and the caller's byte budget: :attr:`read_memory_bytes` at most, all reads together;
    further reads wait. The first range of an object in this process costs one request more (for
    its size), and one more if it does not begin near the object's beginning (for its salt).

    Parameters
    ----------
    key
        The store's.
    segment_bytes
        The store's, of plain content.
    """

    def __init__(
        self,
        inner: base.Backend,
        key: DataKey,
        *,
        segment_bytes: int = limits.SEGMENT_BYTES_DEFAULT,
        environment: Environment = SYSTEM,
    ) -> None:
        super().__init__(inner)
        self._key = key
        self._layout = SegmentLayout(segment_bytes=segment_bytes)
        self._environment = environment
        self._heads: dict[str, _Head] = {}
        capabilities = inner.capabilities
        sealed = segment_bytes + TAG_BYTES
        # A read of the largest range that callers ask for touches this many bytes.
        self._window_bytes = max(capabilities.read_bytes_max // sealed, 1) * sealed + 2 * sealed
        kept = min(capabilities.concurrency, limits.ENCRYPTED_BUFFERS_KEPT)
        each = self._layout.sealed_bytes(limits.HEADER_READ_BYTES) + self._window_bytes
        self._pool = BufferPool(buffer_bytes=each, kept_max=kept, kept_bytes=kept * each)
        self.read_memory_bytes: int = limits.ENCRYPTED_READS_MAX * each
        """Encrypted bytes that reads hold at once, at most."""
        # A forked child would inherit turns that are taken.
        self._turns = PerProcess(threading.BoundedSemaphore, limits.ENCRYPTED_READS_MAX)

    def put(self, key: str, data: base.Buffer) -> None:
        """Write a whole object; the same content again is no error if the inner put allows it."""
        if _is_clear(key):
            self.inner.put(key, data)
            return
        self._heads.pop(key, None)
        try:
            self.inner.put(key, self._sealed(key, data))
        except errors.ObjectExistsError:
            # An earlier try of the same call may have come through, under another salt.
            if self.get(key, bytes_max=limits.PACK_BYTES_MAX) != data:
                raise

    def put_if_absent(self, key: str, data: base.Buffer) -> None:
        """Create an object; the inner backend decides which of several writers is first.

        As every wrapper, this raises ObjectExistsError even if this very call took the key and the
        reply was lost: the caller reads back, and compares the decrypted content.
        """
        if _is_clear(key):
            self.inner.put_if_absent(key, data)
            return
        self._heads.pop(key, None)
        self.inner.put_if_absent(key, self._sealed(key, data))

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Return a writer that holds some segments."""
        if _is_clear(key):
            return self.inner.open_writer(key)
        self._heads.pop(key, None)
        sealer = self._new_sealer(key)
        segment_bytes = self._layout.segment_bytes
        return EncryptedWriter(self.inner.open_writer(key), sealer, segment_bytes=segment_bytes)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""
        if _is_clear(key):
            return self.inner.get(key, bytes_max=bytes_max)
        data = memoryview(self.inner.get(key, bytes_max=self._layout.sealed_bytes(bytes_max)))
        sealer = self._key.sealer(key, salt_of(data[:HEADER_BYTES], where=key))
        count = self._layout.segments(self._layout.check(data.nbytes, where=key))
        starts = [self._layout.start(index) for index in range(count + 1)]
        spans = enumerate(pairwise(starts), 1)
        return b"".join(sealer.open(at - 1, data[a:b], last=at == count) for at, (a, b) in spans)

    def read_into(self, key: str, offset: int, buffers: base.Buffers) -> None:
        """Fill `buffers` from the segments that hold the range."""
        if _is_clear(key):
            self.inner.read_into(key, offset, buffers)
            return
        known = self._heads.get(key)
        if known is not None:
            try:
                self._read(key, known, offset, Scatter(buffers))
            except errors.CorruptObjectError:
                # A repair may have replaced the damaged commit by another object.
                self._heads.pop(key, None)
            else:
                return
        self._read(key, None, offset, Scatter(buffers))

    def list(self, prefix: str, *, after: str = "") -> Iterator[base.ObjectInfo]:
        """Yield objects with the sizes of their plain content."""
        return map(self._without, self.inner.list(prefix, after=after))

    def stat(self, key: str) -> base.ObjectInfo:
        """Return the size of the plain content, and the time, of one object."""
        return self._without(self.inner.stat(key))

    def delete(self, key: str) -> None:
        """Remove one object."""
        self._heads.pop(key, None)
        self.inner.delete(key)

    def close(self) -> None:
        """Close the inner backend, and release memory."""
        self._heads.clear()
        self._pool.clear()
        self.inner.close()

    def _new_sealer(self, key: str) -> Sealer:
        salt = bytes.fromhex(self._environment.random_hex(SALT_BYTES))
        return self._key.sealer(key, salt)

    def _sealed(self, key: str, data: base.Buffer) -> bytes:
        sealer = self._new_sealer(key)
        view = memoryview(data).cast("B")
        size = self._layout.segment_bytes
        count = self._layout.segments(view.nbytes)
        parts = (
            sealer.seal(index, view[index * size : (index + 1) * size], last=index + 1 == count)
            for index in range(count)
        )
        return b"".join((sealer.header, *parts))

    def _without(self, info: base.ObjectInfo) -> base.ObjectInfo:
        if _is_clear(info.key):
            return info
        return replace(info, size_bytes=self._layout.plain_bytes(info.size_bytes))

    def _read(self, key: str, head: _Head | None, offset: int, out: Scatter) -> None:
        """Read a range in windows; the first includes the header if that is near."""
        layout, size = self._layout, self._layout.segment_bytes
        plain = (
            head.plain_bytes if head else layout.check(self.inner.stat(key).size_bytes, where=key)
        )
        end = offset + out.left
        if end > plain:
            raise errors.CorruptObjectError(f"{key} ends at byte {plain}, before byte {end}")
        if head is None:
            head = self._first(key, plain, offset, out)
        while out.left:
            at = end - out.left
            first = at // size
            start = layout.start(first)
            stop = min(layout.start(-(-end // size)), layout.sealed_bytes(plain))
            stop = min(stop, start + self._window_bytes)
            with self._memory(stop - start) as memory:
                self.inner.read_into(key, start, [memory])
                self._open(head, first, memory, at, out)

    def _first(self, key: str, plain: int, offset: int, out: Scatter) -> _Head:
        """Read the header; also the wanted bytes from the object's beginning, if they are near."""
        layout, size = self._layout, self._layout.segment_bytes
        near = out.left and offset <= limits.HEADER_READ_BYTES
        stop = HEADER_BYTES
        if near:
            stop = min(layout.start(-(-(offset + out.left) // size)), layout.sealed_bytes(plain))
            stop = min(stop, layout.start(offset // size) + self._window_bytes)
        with self._memory(stop) as memory:
            self.inner.read_into(key, 0, [memory])
            salt = salt_of(memory[:HEADER_BYTES], where=key)
            head = _Head(self._key.sealer(key, salt), plain)
            if near:
                first = offset // size
                self._open(head, first, memory[layout.start(first) :], offset, out)
        if len(self._heads) >= limits.ENCRYPTED_HEADS_MAX:
            self._heads.clear()
        self._heads[key] = head
        return head

    def _open(self, head: _Head, first: int, sealed: memoryview, at: int, out: Scatter) -> None:
        """Feed `out` with the plain content of segments from `first` on, from byte `at` on."""
        step = self._layout.segment_bytes + TAG_BYTES
        last = self._layout.segments(head.plain_bytes) - 1
        skip = at - first * self._layout.segment_bytes
        for place, start in enumerate(range(0, sealed.nbytes, step)):
            index = first + place
            segment = sealed[start : start + step]
            whole = None if skip else out.take(segment.nbytes - TAG_BYTES)
            if whole is None:
                data = head.sealer.open(index, segment, last=index == last)
                out.feed(memoryview(data)[skip:])
            else:
                head.sealer.open_into(index, segment, whole, last=index == last)
            skip = 0

    @contextmanager
    def _memory(self, size: int) -> Iterator[memoryview]:
        """Yield memory for one read, in its turn: from the pool, unless little is needed."""
        with self._turns.get():
            if size <= limits.MIB:
                yield memoryview(bytearray(size))
                return
            buffer = self._pool.take()
            buffer.touched = max(buffer.touched, size)
            memory = memoryview(buffer.memory)[:size]
            prefault(memory)
            try:
                yield memory
            finally:
                self._pool.give(buffer)

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = partial(EncryptedBackend, segment_bytes=self._layout.segment_bytes)
        return rebuild, (self.inner, self._key)


def _is_clear(key: str) -> bool:
    """Return whether an object is stored unencrypted; checks every key that may name one."""
    base.check_key(key)
    return key in CLEAR_KEYS or key.startswith(KEYS_PREFIX)


class EncryptedWriter(base.ObjectWriter):
    """Seals segments as they become full, and passes them on a few at a time.

    The last segment is sealed as such, so a full one waits for the bytes after it. Each segment is
    sealed once: a commit that is retried sends nothing again. A forked child cannot continue an
    object that its parent began, since both would seal different bytes under one nonce.
    """

    def __init__(self, inner: base.ObjectWriter, sealer: Sealer, *, segment_bytes: int) -> None:
        self._inner, self._sealer, self._segment_bytes = inner, sealer, segment_bytes
        self._pid = os.getpid()
        self._held = bytearray()
        """At most a segment, which may be the last."""
        self._ready: list[base.Buffer] = [sealer.header]
        """Sealed, and not yet handed on."""
        self._index = 0
        self._sealed_last = False
        self._incomplete = False
        """Something that was sealed may not have got to the storage."""

    def write(self, data: base.Buffer | Sequence[base.Buffer]) -> None:
        """Append; passes on the segments that become full."""
        self._check()
        if self._sealed_last:
            raise ValueError("this writer is finished")
        for part in base.parts_of(data):
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

    def _seal(self, data: base.Buffer) -> None:
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
            raise errors.StorageError(msg, hint="write the object again from its beginning")
        if os.getpid() != self._pid:
            msg = f"{self._sealer.key} was begun in another process; only that one can continue it"
            raise errors.InvalidInputError(msg, hint="open a writer after the fork")
