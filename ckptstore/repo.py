"""Opens and creates a store at a location, and connects its parts. Torch-free.

Creating: list the location; refuse a store, or remains of one; probe the storage; then
put-if-absent ``store.json``. Of several concurrent creators exactly one makes the store, the others
open it. Other files at the location stay untouched: a store may share its folder or bucket,
since it uses only ``store.json``, its prefixes, and ``probe/`` while it probes. With a
key, the first record of keys is written before ``store.json``.

Opening reads one object; with a key it reads two, and later calls go through
:class:`ckptstore.backends.encrypted.EncryptedBackend`. Opening writes nothing; the log is read at
its first use.
Storage that was probed through another kind of backend (a local store now reached by NFS, for
example) is probed again before the first write, and the result kept in memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from ckptstore import errors, limits
from ckptstore.argument_checks import integer
from ckptstore.backends.base import Backend, PutIfAbsent, read_only_error
from ckptstore.backends.key_sources import KeyInput, read_key
from ckptstore.backends.registry import open_backend
from ckptstore.backends.sealing import UserKey
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.log import Log
from ckptstore.config import SYSTEM, Environment, Options, writer_identity
from ckptstore.events import SaveEvent, SaveEventKind
from ckptstore.format.keys import KEYS_PREFIX, STORE_KEY
from ckptstore.format.superblock import Superblock
from ckptstore.keyring import record_numbers, unlocked
from ckptstore.superblocks import read_superblock, remains, write_encrypted, write_superblock

if TYPE_CHECKING:
    from ckptstore.manifests import Manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of probing a storage."""

    put_if_absent: PutIfAbsent
    report: Mapping[str, Any]
    """JSON values, for people."""


Prober = Callable[[Backend, Environment], Finding]

_HINT_REMAINS: Final = f"ckptstore repair brings {STORE_KEY} back"
_HINT_UNSAFE: Final = (
    "open it with single_writer=True if no one else writes at the same time; reading is safe"
)


def probe_backend(backend: Backend, environment: Environment) -> Finding:
    """Run the probe of :mod:`ckptstore.backends.probe`; writes and deletes a few small objects.

    Raises
    ------
    StorageError
        The storage failed, or failed a check that every store needs, even with a single writer.
    """
    from ckptstore.backends.probe import failed_check, probe

    found = probe(backend, environment=environment)
    report = found.to_dict()
    if failed := failed_check(report):
        msg = f"{backend.url} cannot hold a store, not even for a single writer: {failed} failed"
        hint = f"ckptstore doctor {backend.url} shows all checks; use another storage or driver"
        hint = "; ".join([hint, *backend.remarks()])
        raise errors.StorageError(msg, hint=hint)
    return Finding(put_if_absent=found.put_if_absent, report=report)


class Repo:
    """One opened store: its backend, its superblock, its log. Any thread may use it.

    Made by :func:`open_repo`; a context manager. Closing it closes its
    backend.
    """

    def __init__(
        self,
        backend: Backend,
        superblock: Superblock,
        *,
        environment: Environment = SYSTEM,
        options: Options | None = None,
        prober: Prober = probe_backend,
    ) -> None:
        self.backend = backend
        self.superblock = superblock
        self.environment = environment
        self.options: Options = options if options is not None else Options()
        if backend.capabilities.read_only:
            self.options = replace(self.options, read_only=True)
        self.load_backend: Backend = self._through_cache()
        """The backend that loads read packs and manifests from; checks and copies use the other."""
        self._prober = prober
        self._verdict: PutIfAbsent | None = None
        if superblock.backend == backend.name:
            self._verdict = PutIfAbsent(superblock.put_if_absent)
        self._lock = threading.Lock()
        self._closed = False
        self._reserved = False
        self._manifests: Manifests | None = None
        self.log: Log = Log(
            backend, environment, by=writer_identity(), check_writable=self.check_writable
        )

    def _through_cache(self) -> Backend:
        if not self.options.cache_folder:
            return self.backend
        from ckptstore.backends.shared_cache import CacheFolder, with_cache

        folder = CacheFolder(
            os.fspath(self.options.cache_folder),
            bytes_max=self.options.cache_bytes,
            environment=self.environment,
        )
        return with_cache(self.backend, folder, self.superblock.store_id, self.environment)

    @property
    def url(self) -> str:
        """The location, without credentials."""
        return self.backend.url

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk before compression, in bytes."""
        return self.superblock.chunk_bytes

    @property
    def manifests(self) -> Manifests:
        """The manifests of its versions; made at the first use, since listing needs none."""
        with self._lock:
            if self._manifests is None:
                from ckptstore.manifests import Manifests

                self._manifests = Manifests(
                    self.backend,
                    self.environment,
                    base_bytes=self.options.base_bytes,
                    load_backend=self.load_backend,
                )
            return self._manifests

    @property
    def catalog(self) -> Catalog:
        """The catalog as last read; the first access reads the log.

        Raises
        ------
        CkptStoreError
            As :meth:`ckptstore.catalog.log.Log.refresh`, the first time.
        """
        return self.log.catalog if self.log.opened else self.refresh()

    def refresh(self, *, writing: bool = False) -> Catalog:
        """Read new commits and return the catalog.

        See :meth:`ckptstore.catalog.log.Log.refresh`.

        Raises
        ------
        InvalidInputError
            The store is closed.
        """
        self.check_open()
        return self.log.refresh(writing=writing)

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    def __reduce__(self) -> NoReturn:
        msg = f"an open repository ({self.url}) cannot be sent to another process"
        hint = "pickle the store, a run, or a lazy version as a whole"
        raise errors.InvalidInputError(msg, hint=hint)

    def check_open(self) -> None:
        """Raise InvalidInputError if the store is closed."""
        if self._closed:
            msg = f"the store {self.url} is closed"
            hint = "use it inside its with block, or open it again"
            raise errors.InvalidInputError(msg, hint=hint)

    def put_if_absent(self) -> PutIfAbsent:
        """Return whether the storage has put-if-absent; probes it if its backend has changed.

        Raises
        ------
        StorageError
            As :func:`probe_backend`.
        """
        with self._lock:
            if self._verdict is None:
                self._verdict = self._prober(self.backend, self.environment).put_if_absent
            return self._verdict

    def check_writable(self) -> None:
        """Return if this process may commit; called before each commit, and early by savers.

        Raises
        ------
        InvalidInputError
            The store is closed.
        ReadOnlyError
            The store was opened read-only.
        UnsafeBackendError
            The storage has no put-if-absent, and the user has not promised a single writer.
        """
        self.check_open()
        if self.backend.capabilities.read_only:
            raise read_only_error(self.backend.url)
        if self.options.read_only:
            msg = f"{self.url} was opened read-only"
            raise errors.ReadOnlyError(msg, hint="write to a store that you open to write")
        verdict = self.put_if_absent()
        safe = verdict is PutIfAbsent.ATOMIC
        if not (safe or self.options.single_writer):
            raise unsafe(self.url, verdict)
        # Where the storage can tell, the probe decides, whatever the user promised.
        self.log.single_writer = not safe
        if not self._reserved:
            self._reserved = True
            self.backend.keep_reserve()

    def save_event(
        self,
        kind: SaveEventKind,
        run: str,
        step: int,
        version: str = "",
        *,
        receipt: Mapping[str, float] | None = None,
        error: BaseException | None = None,
        replica: str = "",
    ) -> SaveEvent:
        """Return an event of a save in this store, at this time."""
        return SaveEvent(
            kind=kind,
            store=self.url,
            run=run,
            step=step,
            version=version,
            at_ms=self.environment.now_ms(),
            receipt=dict(receipt or {}),
            error_kind="" if error is None else getattr(error, "kind", "error"),
            message="" if error is None else str(error),
            replica=replica,
        )

    def close(self) -> None:
        """Release the backend; idempotent. Later reads and writes are refused."""
        self._closed = True
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_repo(
    url: str | os.PathLike[str],
    *,
    create: bool = False,
    exist_ok: bool = True,
    options: Options | None = None,
    environment: Environment = SYSTEM,
    chunk_bytes: int = limits.CHUNK_BYTES_DEFAULT,
    key: KeyInput | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Repo:
    """Open the store at a location; with `create`, make it if there is none.

    Parameters
    ----------
    exist_ok
        Open a store that is there; otherwise, with `create`, that is an error.
    key
        Opens an encrypted store, or makes a new one encrypted: ``file:PATH``, ``env:NAME``,
        ``command:CMD``, or 32 bytes.

    Raises
    ------
    EncryptionKeyError
        The key cannot be read, is missing, or is not the store's; or the store is not
        encrypted.
    StoreNotFoundError
        There is none, and `create` is False.
    StoreExistsError, ReadOnlyError, UnsafeBackendError
        With `create`, as :func:`create_on`.
    UnsupportedFeatureError, FormatError
        A newer version, or another program, made it.
    CorruptObjectError
        Its superblock is damaged.
    InvalidUrlError, MissingDependencyError, StorageError
        From the backend.
    """
    key = None if key is None else read_key(key)  # no variable keeps what was given
    opening: Any = {"options": options, "environment": environment, "key": key}
    backend = open_backend(url, environment=environment, **(storage_options or {}))
    try:
        if create:
            return create_on(backend, chunk_bytes=chunk_bytes, exist_ok=exist_ok, **opening)
        return open_on(backend, **opening)
    except BaseException:
        backend.close()
        raise


def open_on(
    backend: Backend,
    *,
    key: UserKey | None = None,
    options: Options | None = None,
    environment: Environment = SYSTEM,
    prober: Prober = probe_backend,
) -> Repo:
    """Open the store on a backend; the backend then belongs to the repo.

    Raises
    ------
    StoreNotFoundError
        There is none.
    CorruptObjectError, FormatError, StorageError
        As :func:`open_repo`.
    """
    superblock = read_superblock(backend)
    if superblock is None:
        raise _no_store(backend)
    backend = unlocked(backend, superblock, key, environment=environment)
    return Repo(backend, superblock, environment=environment, options=options, prober=prober)


def create_on(
    backend: Backend,
    *,
    options: Options | None = None,
    environment: Environment = SYSTEM,
    chunk_bytes: int = limits.CHUNK_BYTES_DEFAULT,
    key: UserKey | None = None,
    exist_ok: bool = False,
    prober: Prober = probe_backend,
) -> Repo:
    """Create a store on a backend; the backend then belongs to the repo.

    Raises
    ------
    StoreExistsError
        There is one and `exist_ok` is False; or there are objects of one without its
        ``store.json``.
    UnsafeBackendError
        The storage has no put-if-absent, and the user has not promised a single writer.
    StorageError
        The storage fails, or does not return the bytes written, even for a single writer.
    InvalidInputError
        The chunk size is not within its limits.
    ReadOnlyError
        The options demand a read-only store, which is not there.
    EncryptionKeyError
        There is a store, and the key does not fit; or another creator began one with another key.
    """
    options = options if options is not None else Options()
    # First the remains of a store, then the superblock: a running creator writes that first.
    left, found = remains(backend), read_superblock(backend)
    if found is None:
        if left:
            msg = f"{backend.url} holds objects of a store ({left}) but no {STORE_KEY}"
            raise errors.StoreExistsError(msg, hint=f"{_HINT_REMAINS}, or use an empty location")
        if key is None and record_numbers(backend):
            msg = f"another process began to create an encrypted store at {backend.url}"
            hint = f"give its key, or remove {KEYS_PREFIX} if nothing is stored there"
            raise errors.StoreExistsError(msg, hint=hint)
        if backend.capabilities.read_only:
            hint = "create it in a folder or bucket, such as the one that the server serves"
            raise read_only_error(backend.url, hint)
        if options.read_only:
            raise errors.ReadOnlyError(f"no store can be created read-only at {backend.url}")
        finding = prober(backend, environment)
        if finding.put_if_absent is not PutIfAbsent.ATOMIC and not options.single_writer:
            raise unsafe(backend.url, finding.put_if_absent)
        wanted = _superblock(backend, finding, options, environment, chunk_bytes)
        if key is None:
            found = write_superblock(backend, wanted, environment)
            made = found.store_id == wanted.store_id
        else:
            found, made = write_encrypted(backend, wanted, key, environment)
        exist_ok = exist_ok or made
    if not exist_ok:
        msg = f"there is a store at {backend.url} already"
        raise errors.StoreExistsError(msg, hint="open it, or name another place")
    backend = unlocked(backend, found, key, environment=environment)
    return Repo(backend, found, environment=environment, options=options, prober=prober)


def _superblock(
    backend: Backend, finding: Finding, options: Options, environment: Environment, chunk_bytes: int
) -> Superblock:
    low, high = limits.CHUNK_BYTES_MIN, limits.CHUNK_RAW_BYTES_MAX
    chunk_bytes = integer("chunk_bytes", chunk_bytes, low, high, "4 MiB, the default, suits most")
    return Superblock(
        store_id=environment.random_hex(16),
        chunk_bytes=chunk_bytes,
        created_at_ms=environment.now_ms(),
        by=writer_identity()[: limits.BY_CHARS_MAX],
        backend=backend.name,
        put_if_absent=finding.put_if_absent.value,
        single_writer=finding.put_if_absent is not PutIfAbsent.ATOMIC,
        probe=dict(finding.report),
    )


def unsafe(url: str, verdict: PutIfAbsent) -> errors.UnsafeBackendError:
    """Return the error for storage on which two writers would lose commits."""
    what = {
        PutIfAbsent.IGNORED: "takes no notice of the condition",
        PutIfAbsent.REFUSED: "refuses the condition",
    }.get(verdict, "was not seen to keep the condition")
    msg = f"{url} {what} to create an object only if it is absent: two writers would lose commits"
    return errors.UnsafeBackendError(msg, hint=_HINT_UNSAFE)


def _no_store(backend: Backend) -> errors.StoreNotFoundError:
    left = remains(backend)
    if left:
        msg = f"{backend.url} holds objects of a store ({left}) but no {STORE_KEY}"
        return errors.StoreNotFoundError(msg, hint=_HINT_REMAINS)
    msg = f"there is no store at {backend.url}"
    if "::" in backend.url:
        hint = f"name the folder with {STORE_KEY} before ::, as in zip://st::file:///data/st.zip"
        return errors.StoreNotFoundError(msg, hint=hint)
    if backend.capabilities.read_only:
        hint = f"its URL is that of the folder with {STORE_KEY}, which anyone must be able to read"
        return errors.StoreNotFoundError(msg, hint=hint)
    return errors.StoreNotFoundError(
        msg, hint=f"create one: ckptstore init {backend.url}, or create=True"
    )
