"""Reads and writes the manifests of one store, with every check; keeps the last few in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.config import Environment
from ckptstore.errors import CorruptObjectError, ObjectNotFoundError, VersionNotFoundError
from ckptstore.format import manifest as manifests
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key, pack_key
from ckptstore.format.manifest import Manifest
from ckptstore.hashing import blake3_hex
from ckptstore.model import Version
from ckptstore.objects.deltas import Keyframes

# Manifests kept in memory. Source: a run needs its head (to share with) and what it loads; one of
# 1 TB takes some 16 MB.
_KEPT = 4


class Manifests:
    """The manifests of one store, which are immutable; any thread may use it.

    Parameters
    ----------
    backend
        Storage of the store.
    environment
        Source of random names.
    base_bytes
        Memory for the bases of deltas.
    load_backend
        Where loads read; the storage itself, or a cache before it.
    """

    def __init__(
        self,
        backend: Backend,
        environment: Environment,
        *,
        base_bytes: int,
        load_backend: Backend | None = None,
    ) -> None:
        self._backend = backend
        self._load_backend = load_backend or backend
        self._environment = environment
        self._lock = threading.Lock()
        self._kept_max = _KEPT
        self._kept: OrderedDict[str, Manifest] = OrderedDict()
        self._proved: dict[str, frozenset[int]] = {}
        self.keyframes: Keyframes = Keyframes(base_bytes)
        """Bases in memory, which saves with the codec ``delta`` take differences to."""

    @contextmanager
    def keeping(self, count: int) -> Iterator[None]:
        """Keep up to `count` manifests in memory inside the block; for one thread at a time."""
        before, self._kept_max = self._kept_max, max(count, self._kept_max)
        try:
            yield
        finally:
            self._kept_max = before

    def put(self, manifest: Manifest, *, name: str = "") -> ManifestPointer:
        """Write a manifest, durable on return; return its place, for the commit that names it.

        Parameters
        ----------
        name
            32 hex digits that no manifest of the store has had; empty draws them.

        Raises
        ------
        StorageError
            It could not be written.
        """
        data = manifests.encode(manifest)
        key = manifest_key(name or self._environment.random_hex(16))
        self._backend.put(key, data)
        return ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data))

    def load(self, version: Version) -> Manifest:
        """Return the manifest of a version.

        Raises
        ------
        VersionNotFoundError
            Only the version's record is kept.
        CorruptObjectError
            It is missing, or not what the commit says; the message names version and object.
        StorageError
            The storage failed.
        """
        _check_kept(version)
        with self._lock:
            if version.manifest_digest in self._kept:
                self._kept.move_to_end(version.manifest_digest)
                return self._kept[version.manifest_digest]
        try:
            manifest = read_manifest(self._load_backend, version)
        except CorruptObjectError:
            past = self._load_backend.past_caches()
            if past is self._load_backend:
                raise
            manifest = read_manifest(past, version)
        self.keep(version.manifest_digest, manifest)
        return manifest

    def read(self, version: Version) -> Manifest:
        """Return the manifest as it lies there now; as :meth:`load`.

        For checks: a manifest in memory says nothing of the object.
        """
        manifest = read_manifest(self._backend, version)
        self.keep(version.manifest_digest, manifest)
        return manifest

    def keep(self, digest: str, manifest: Manifest, *, proved: Collection[int] = ()) -> None:
        """Remember a manifest by its object's digest, because the next save shares with it.

        Parameters
        ----------
        proved
            Places of the tensors that this process has proved to be another one, converted.
        """
        with self._lock:
            self._kept[digest] = manifest
            self._kept.move_to_end(digest)
            if proved:
                self._proved[digest] = frozenset(proved)
            while len(self._kept) > self._kept_max:
                self._proved.pop(self._kept.popitem(last=False)[0], None)

    def proved(self, version: Version) -> frozenset[int]:
        """Return the tensors of a version that this process has proved to be another one."""
        with self._lock:
            return self._proved.get(version.manifest_digest, frozenset())


def relied_on(pointer: ManifestPointer, manifest: Manifest) -> tuple[str, ...]:
    """Return the keys of what must be there when a commit names a manifest: itself, its packs."""
    return (pointer.key, *map(pack_key, manifest.pieces.packs))


def read_manifest(backend: Backend, version: Version) -> Manifest:
    """Return the manifest of a version, read again; raises as :meth:`Manifests.load`."""
    _check_kept(version)
    key = version.manifest_key
    named = f"{key} of version {version.label}"
    hint = "run ckptstore verify; other versions are not affected"
    if version.manifest_bytes > limits.MANIFEST_STORED_BYTES_MAX:
        msg = f"manifest {named}: {version.manifest_bytes} bytes are over the limit"
        raise CorruptObjectError(msg, hint=hint)
    try:
        data = backend.get(key, bytes_max=version.manifest_bytes)
    except ObjectNotFoundError as error:
        raise CorruptObjectError(f"manifest {named} is gone", hint=hint) from error
    if len(data) != version.manifest_bytes or blake3_hex(data) != version.manifest_digest:
        msg = f"manifest {named} does not match the digest in commit {version.commit}"
        raise CorruptObjectError(msg, hint=hint)
    return manifests.decode(data, where=named, version=version.id)


def _check_kept(version: Version) -> None:
    if version.level == "record":
        msg = f"only the record of {version.label} is kept"
        hint = "its metrics and lineage are; its tensors are not"
        if version.replicas:
            who = f"ckptstore show {version.id[:12]}"
            hint = f"another store has it, {who} says which: go there, or load it with refill=True"
        raise VersionNotFoundError(msg, hint=hint)
