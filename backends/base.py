"""The one interface between ckptstore and any storage: keys and bytes, nothing else.

A backend knows no tensors, packs, digests or versions. The order of calls:

0.  ``registry.open_backend(url)`` makes a backend and wraps it (retries, and further wrappers).
1.  ``probe.probe(backend)`` tests, once per store, whether put-if-absent really holds.
2.  A save calls ``open_writer`` for packs, ``put`` for the manifest, then ``put_if_absent`` for
    the commit, in that order; each has returned only when its object is durable.
3.  A load calls ``list`` and ``get`` for the log, then ``read_into`` for ranges of packs.
4.  ``close`` releases clients and pools.

Threads: every method may be called from any thread at once. Processes: an instance may be carried
over a fork or pickled to a spawned worker; clients are made lazily per process.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, InvalidKeyError, ReadOnlyError

if TYPE_CHECKING:
    from ckptstore.backends.buffers import BufferPool
    from ckptstore.backends.per_process import PerProcess
    from ckptstore.backends.storage_classes import ColdStorage
    from ckptstore.backends.transfers import Recorder

__all__ = [
    "Backend", "Buffer", "Buffers", "Capabilities", "Leftovers", "ObjectInfo", "ObjectWriter",
    "PutIfAbsent", "check_key", "check_prefix", "check_size",
]  # fmt: skip

Buffer = bytes | bytearray | memoryview
"""Bytes to write."""
Buffers = Sequence[memoryview]
"""Memory that a read fills, or whose bytes a request sends, one buffer after another."""

_SEGMENT = r"[a-z0-9][a-z0-9._-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*\Z")
_PREFIX = re.compile(rf"(({_SEGMENT}/)*({_SEGMENT})?)?\Z")


def is_key(text: str) -> bool:
    """Return whether a text may name an object, by the rules of :func:`check_key`."""
    return len(text) <= limits.KEY_CHARS_MAX and _KEY.match(text) is not None


def check_key(key: str) -> str:
    """Return `key` if it may name an object, both when writing and when listed.

    A key is relative, lower-case ASCII, ``/`` between non-empty segments that begin with a letter
    or digit (so there is no ``..``, no hidden file and no temporary name), and bounded in length.

    Raises
    ------
    InvalidKeyError
        If it breaks one of these rules.
    """
    if not is_key(key):
        msg = f"not a storage key: {key[:80]!r}"
        raise InvalidKeyError(msg, hint="keys look like packs/ab/0123.pack")
    return key


def check_size(key: str, size_bytes: int, bytes_max: int) -> None:
    """Refuse an object that is larger than its reader allows.

    Parameters
    ----------
    size_bytes
        Its size, or how much of it has arrived.

    Raises
    ------
    CorruptObjectError
        It has more than `bytes_max` bytes.
    """
    if size_bytes > bytes_max:
        raise CorruptObjectError(f"{key} has more than the {bytes_max} bytes allowed")


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it may be listed: the beginning of a key, or empty.

    Raises
    ------
    InvalidKeyError
        If no key could begin with it.
    """
    if len(prefix) > limits.KEY_CHARS_MAX or not _PREFIX.match(prefix):
        raise InvalidKeyError(f"not the beginning of a storage key: {prefix[:80]!r}")
    return prefix


def parts_of(data: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """Return the buffers of a call to ``ObjectWriter.write``, which may be a single one."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data


class PutIfAbsent(StrEnum):
    """Atomic creation of a name: claimed by a backend, tested by the probe."""

    ATOMIC = "atomic"
    """Of any number of creators exactly one wins and the others are told."""
    IGNORED = "ignored"
    """The condition has no effect: several creators believe they won."""
    REFUSED = "refused"
    """The storage answers that it does not support the condition."""
    UNKNOWN = "unknown"
    """Not known without a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Properties that a backend declares; layers above decide by these, never by its class."""

    put_if_absent: PutIfAbsent
    """The claim; a store trusts only the result of its probe."""
    pack_bytes: int
    """Size at which a pack is closed, in bytes."""
    part_bytes: int
    """Bytes of an object that a writer holds in memory (its buffer; a whole pack if
    the storage takes an object in one request)."""
    read_gap_bytes: int
    """Two ranges closer than this are fetched as one, in bytes."""
    read_bytes_max: int
    """A fetch is cut at this size, in bytes, so that fetches run in parallel."""
    concurrency: int
    """Requests in flight that serve this storage best."""
    scatter_read: bool
    """``read_into`` fills the buffers without a copy in between."""
    lookup_lag_s: float
    """Seconds that a name may seem absent to one client after another created it."""
    private: bool = False
    """Objects are in the memory of this process, where no other one can reach them."""
    lists: bool = True
    """``list`` works; where it does not, layers above find objects by names that they know."""
    read_only: bool = False
    """Every call that writes raises ReadOnlyError."""
    write_bytes_per_s: float = limits.WRITE_BYTES_PER_S_DEFAULT
    """Roughly how fast it takes durable bytes; decides ``codec="auto"`` (see
    :mod:`ckptstore.objects.auto_codec`)."""


def read_only_error(url: str, hint: str = "") -> ReadOnlyError:
    """Return the error for a write to storage whose capabilities are ``read_only``."""
    if "::" in url:
        msg = f"{url} is a chain of file systems, through which ckptstore only reads"
        return ReadOnlyError(msg, hint=hint or "write to the location at its end")
    msg = f"{url} is behind a web server, which is read-only"
    return ReadOnlyError(msg, hint=hint or "write to the store that is published there")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as a listing or ``stat`` reports it."""

    key: str
    size_bytes: int
    modified_at: float
    """Seconds since 1970 by the *storage's* clock."""
    storage_class: str = ""
    """As the storage calls it, such as ``STANDARD_IA``; empty where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Files left behind by writers that died, beside the objects."""

    count: int = 0
    size_bytes: int = 0


class ObjectWriter(ABC):
    """Writes one object in pieces; the object appears at ``commit``, whole and durable, or never.

    Owned by one thread at a time. Leaving the ``with`` block without ``commit`` aborts.
    """

    @abstractmethod
    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append; may return before the bytes are durable. `data` may be reused afterwards.

        Raises
        ------
        StorageError
            The storage failed; only ``abort`` may follow.
        """

    def write_kept(self, data: Sequence[Buffer], done: Callable[[], None]) -> None:
        """Append memory that stays as it is until `done` is called, from any thread.

        After an error, which is one of :meth:`write`, `done` may never be called.
        """
        self.write(data)
        done()

    @abstractmethod
    def commit(self) -> None:
        """Make the object visible under its key; returns when it is durable.

        Raises
        ------
        TransientStorageError
            It may be called again, with nothing lost.
        StorageError
            The storage failed; the object must be taken for absent, though it may appear.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop the bytes written so far; never raises for a storage failure; idempotent."""

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Abort unless committed."""
        self.abort()


class Backend(ABC):
    """Keys and bytes in one place; the module gives the order of calls and the thread rules.

    Every method checks its key with :func:`check_key`, and raises only errors of
    :mod:`ckptstore.errors`: ``ObjectNotFoundError``, ``ObjectExistsError``, and the children of
    ``StorageError``. The backend, which knows the storage's codes, decides what is transient;
    message texts are never examined. No method here retries: the retry wrapper does.
    """

    url: str
    """The location as the user would write it, without credentials."""
    name: str
    """Kind of backend: ``local``, ``nfs``, ``parallel``, ``s3``, ``gcs``, ``azure``,
    ``memory``, ``web``, ``fsspec``; recorded with probe results."""
    transfers: PerProcess[Recorder] | None = None
    """Figures of its requests; None if it does not count them: then the retry wrapper counts the
    calls."""

    def staging(self) -> BufferPool | None:
        """Return memory for what is given to ``write_kept``; None if writers copy it, or send it.

        A buffer from there may be handed over, and be given back when the writer is done with it.
        """
        return None

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the properties that this backend declares."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object; returns when it is durable and visible to every reader.

        For names that are used only once. Writing the same content again is no error.

        Raises
        ------
        ObjectExistsError
            The key is taken by other content, which stays. Storage that is not sent a condition
            replaces the content instead: after success the object has these bytes.
        """

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create `key` with `data` atomically, or raise if it exists; durable on return.

        A reader sees the whole object or none of it. This is the only primitive on which
        concurrent writers rely.

        Raises
        ------
        ObjectExistsError
            The key is taken; nothing was written. After a lost reply this very call may have
            taken it: the caller reads back to find out.
        AmbiguousWriteError
            No clear answer; the write may have happened, or may still happen.
        UnsafeBackendError
            The storage refuses the condition (501, say); nothing was written.
        TransientStorageError
            Not written, so far as can be known; a client library below may have tried before.
        StorageError
            The storage failed. Not written, or (the message says so) visible, but perhaps not
            durable: reading it back would prove nothing.
        """

    @abstractmethod
    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer for a large object under a name that is used only once."""

    @abstractmethod
    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object.

        Raises
        ------
        ObjectNotFoundError
            No such key.
        CorruptObjectError
            It is larger than `bytes_max`; at most that many bytes are held.
        """

    @abstractmethod
    def read_into(self, key: str, offset: int, buffers: Buffers) -> None:
        """Fill `buffers`, one after another, from byte `offset` of an object on.

        Parameters
        ----------
        buffers
            Writable, C-contiguous, format ``B``. Their contents are undefined after an error.

        Raises
        ------
        ObjectNotFoundError
            No such key.
        CorruptObjectError
            The object ends before the buffers are full.
        """

    @abstractmethod
    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with `prefix` and sorts after `after`, ascending.

        Lists every object that existed when the call began and was not deleted: no client-side
        cache. Objects that break the key rules (temporary files of writers, for example) are
        left out. A missing folder is an empty listing.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object.

        Raises
        ------
        ObjectNotFoundError
            No such key.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; an object that is not there is no error."""

    def make_durable(self, keys: Iterable[str]) -> None:  # noqa: B027 - most need not do anything
        """Make objects durable that are visible, and that another process may have written.

        A writer that dies, or fails, may leave an object that is visible and not durable yet. Does
        nothing where the storage shows no object before it is durable.

        Raises
        ------
        StorageError
            It is not known whether they are durable.
        """

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> Leftovers:
        """Remove files left behind by writers that died, such as temporary files; return them.

        Does nothing where the storage keeps no such files, or removes them itself.

        Parameters
        ----------
        modified_before
            Seconds since 1970 by the storage's clock; younger files may be in use.
        dry_run
            Only count.
        """
        return Leftovers()

    def keep_reserve(self, *, whole: bool = True) -> None:  # noqa: B027 - only disks need one
        """Keep some room for :func:`ckptstore.committing.on_reserve`; never raises.

        Parameters
        ----------
        whole
            Only if there is room for all of it, so that a nearly full storage can be used; False
            keeps what there is.
        """

    def drop_reserve(self) -> None:  # noqa: B027 - only disks need one
        """Give up that room, for the writes that free a full storage; never raises."""

    def remarks(self) -> Sequence[str]:
        """Return properties of the location that may need a change, as sentences for people."""
        return ()

    def cold_storage(self) -> ColdStorage | None:
        """Return access to this storage's classes; None where there are none."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def past_caches(self) -> Backend:
        """Return a backend that reads from the storage itself; this one if it has no cache.

        What it reads is removed from the cache: for readers that found cached bytes damaged.
        """
        return self

    @abstractmethod
    def close(self) -> None:
        """Release clients and pools of this process; idempotent; no call may follow."""
