"""Every error that ckptstore raises, grouped by what the caller does about it.

::

    CkptStoreError                      catch-all; every instance has .kind and .exit_code
    |-- InvalidInputError (ValueError)  the call is wrong: mend the arguments
    |   |-- InvalidKeyError             a storage key breaks the key rules
    |   |-- InvalidRefError             text that is not a ref
    |   |-- InvalidUrlError             a location that no backend serves
    |   |-- StateError (TypeError)      the state holds something that cannot be represented
    |   |-- TornStateError              the state was changed while it was being saved
    |   |-- EncryptionKeyError          a key that is none, or that nothing here is encrypted with
    |   |   |-- MissingKeyError         the store is encrypted, and no key was given
    |   |   `-- WrongKeyError           the store is encrypted with another key
    |   `-- TensorIndexError (IndexError)  an index outside a tensor, or of a kind it does not take
    |-- NotFoundError (LookupError)     what was named is not there
    |   |-- StoreNotFoundError
    |   |-- RunNotFoundError
    |   |-- VersionNotFoundError
    |   |-- TensorNotFoundError
    |   `-- ObjectNotFoundError         a key of the backend
    |-- ConflictError                   somebody else was there first: look again, decide again
    |   |-- SaveBusyError               a save in the background is still under way
    |   |-- StoreExistsError
    |   |-- ReplicaChangedError         where a replica was there is another store now
    |   |-- ObjectExistsError           put-if-absent lost
    |   `-- CommitConflictError         the log moved and what the commit relied on no longer holds
    |       `-- CondemnedError          a collection condemned an object that the commit relied on
    |-- IntegrityError                  stored bytes are not what was written: use verify
    |   |-- CorruptObjectError          an object or record does not match its digest or its limits
    |   `-- CorruptTensorError          the bytes of a named tensor do not match their chunk id
    |-- FormatError                     written by a newer ckptstore, or not by ckptstore at all
    |   `-- UnsupportedFeatureError
    |-- PolicyError                     refused on purpose
    |   |-- ReadOnlyError
    |   |-- UnsafeBackendError          the storage cannot do put-if-absent
    |   |-- UnsafeEncodingError         a lossy form that would spoil the training
    |   `-- LimitError (ValueError)     a limit of limits.py would be passed
    |-- StorageError (OSError)          the storage failed
    |   |-- TransientStorageError       trying again may help; raised when retries are used up
    |   |-- StorageFullError            no space, or quota reached
    |   |-- StoragePermissionError      credentials or permissions
    |   |-- AmbiguousWriteError         a conditional write may or may not have happened
    |   |-- ColdObjectError             it lies in an archive class: restore it first (thaw)
    |   |-- NotReplicatedError          a replica does not have a version (yet)
    |   |-- SaverDiedError              the process that saved in the background died
    |   |-- WorkerDiedError             workers that ran tasks died, or there is none left
    |   `-- MissingDependencyError      the backend needs a package that is not installed
    `-- OperationCancelledError         the caller cancelled

A ``kind`` is a stable, append-only code: programs match on it, never on the message.
Foreign exceptions (botocore, gcsfs, OSError, msgspec, zstandard) never leave ckptstore.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AmbiguousWriteError",
    "CkptStoreError",
    "ColdObjectError",
    "CommitConflictError",
    "CondemnedError",
    "ConflictError",
    "CorruptObjectError",
    "CorruptTensorError",
    "EncryptionKeyError",
    "FormatError",
    "IntegrityError",
    "InvalidInputError",
    "InvalidKeyError",
    "InvalidRefError",
    "InvalidUrlError",
    "LimitError",
    "MissingDependencyError",
    "MissingKeyError",
    "NotFoundError",
    "NotReplicatedError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "OperationCancelledError",
    "PolicyError",
    "ReadOnlyError",
    "ReplicaChangedError",
    "RunNotFoundError",
    "SaveBusyError",
    "SaverDiedError",
    "StateError",
    "StorageError",
    "StorageFullError",
    "StoragePermissionError",
    "StoreExistsError",
    "StoreNotFoundError",
    "TensorIndexError",
    "TensorNotFoundError",
    "TornStateError",
    "TransientStorageError",
    "UnsafeBackendError",
    "UnsafeEncodingError",
    "UnsupportedFeatureError",
    "VersionNotFoundError",
    "WorkerDiedError",
    "WrongKeyError",
]


class CkptStoreError(Exception):
    """The root of the tree; catch this to catch everything that ckptstore raises.

    Attributes
    ----------
    kind
        Stable code of the failure, for programs (``--json`` prints it).
    exit_code
        What the command line exits with.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return what happened and, after a dash, what to do next."""
        return f"{self.message} -- {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the trip through a process pool with hint and attributes intact."""
        return _rebuild, (type(self), self.message, self.hint), self.__dict__


def _rebuild(cls: type[CkptStoreError], message: str, hint: str) -> CkptStoreError:
    return cls(message, hint=hint)


class InvalidInputError(CkptStoreError, ValueError):
    """The call is wrong; mend the arguments."""

    kind = "invalid_input"
    exit_code = 2


class InvalidKeyError(InvalidInputError):
    """A storage key breaks the rules of :func:`ckptstore.backends.base.check_key`."""

    kind = "invalid_key"


class InvalidRefError(InvalidInputError):
    """Text that does not follow the ref grammar."""

    kind = "invalid_ref"


class InvalidUrlError(InvalidInputError):
    """A location that no backend serves."""

    kind = "invalid_url"


class StateError(InvalidInputError, TypeError):
    """The state holds something that cannot be represented; the message names its path."""

    kind = "state"


class TornStateError(InvalidInputError):
    """A tensor was changed between the call and the write; the message names it.

    Nothing was saved: what would have been is neither the state before nor the one after.
    """

    kind = "state_torn"


class EncryptionKeyError(InvalidInputError):
    """A key that cannot be read or is none, or one for a store that is not encrypted."""

    kind = "key"


class MissingKeyError(EncryptionKeyError):
    """The store is encrypted, and no key was given; the hint names the ways to give one."""

    kind = "key_missing"


class WrongKeyError(EncryptionKeyError):
    """The store is encrypted with another key; nothing but its records of keys was read."""

    kind = "key_wrong"


class TensorIndexError(InvalidInputError, IndexError):
    """An index outside a stored tensor, or of a kind that it does not take."""

    kind = "tensor_index"


class NotFoundError(CkptStoreError, LookupError):
    """What was named is not there."""

    kind = "not_found"
    exit_code = 3


class StoreNotFoundError(NotFoundError):
    """There is no store at this location."""

    kind = "store_not_found"


class RunNotFoundError(NotFoundError):
    """The store has no run of this name."""

    kind = "run_not_found"


class VersionNotFoundError(NotFoundError):
    """The ref is well formed, but names no version."""

    kind = "version_not_found"


class TensorNotFoundError(NotFoundError):
    """The version has no tensor at this path."""

    kind = "tensor_not_found"


class ObjectNotFoundError(NotFoundError):
    """The backend has no object of this key."""

    kind = "object_not_found"


class ConflictError(CkptStoreError):
    """Somebody else was there first."""

    kind = "conflict"
    exit_code = 4


class SaveBusyError(ConflictError):
    """A save in the background is still under way, and the caller does not want to wait for it."""

    kind = "save_busy"


class StoreExistsError(ConflictError):
    """A store is already at this location."""

    kind = "store_exists"


class ReplicaChangedError(ConflictError):
    """At the location of a replica there is another store than the one that was named.

    Nothing was read from it and nothing was written to it.
    """

    kind = "replica_changed"


class ObjectExistsError(ConflictError):
    """Put-if-absent found the key taken; nothing was written."""

    kind = "object_exists"


class CommitConflictError(ConflictError):
    """Other commits came first and what this one relied on no longer holds."""

    kind = "commit_conflict"


class CondemnedError(CommitConflictError):
    """A collection condemned an object that the commit relied on; `keys` says which.

    Savers write what it held again under a new name and go on; it is raised to a caller only when
    that happened again and again.
    """

    kind = "condemned"
    keys: frozenset[str] = frozenset()
    """The objects that were condemned."""


class IntegrityError(CkptStoreError):
    """Stored bytes are not what was written."""

    kind = "integrity"
    exit_code = 5


class CorruptObjectError(IntegrityError):
    """An object or a record does not match its digest, its length or its limits."""

    kind = "corrupt_object"


class CorruptTensorError(IntegrityError):
    """The bytes of a tensor do not match their chunk id; the message names the tensor."""

    kind = "corrupt_tensor"


class FormatError(CkptStoreError):
    """Not written by ckptstore, or by a version that this one does not understand."""

    kind = "format"
    exit_code = 6


class UnsupportedFeatureError(FormatError):
    """The store, manifest or commit requires a feature that this version does not have."""

    kind = "unsupported_feature"


class PolicyError(CkptStoreError):
    """Refused on purpose; the hint says what would make it allowed."""

    kind = "policy"
    exit_code = 7


class ReadOnlyError(PolicyError):
    """The store was opened read-only."""

    kind = "read_only"


class UnsafeBackendError(PolicyError):
    """The storage cannot do put-if-absent, so concurrent writers would lose commits."""

    kind = "unsafe_backend"


class UnsafeEncodingError(PolicyError):
    """A rule would store a tensor in a form that spoils what it is for; the message names it."""

    kind = "unsafe_encoding"


class LimitError(PolicyError, ValueError):
    """A limit of :mod:`ckptstore.limits` would be passed."""

    kind = "limit"


class StorageError(CkptStoreError, OSError):
    """The storage failed."""

    kind = "storage"
    exit_code = 8


class TransientStorageError(StorageError):
    """A failure that may pass (timeout, reset, 503); raised once the retries are used up."""

    kind = "storage_transient"


class StorageFullError(StorageError):
    """No space left, or a quota is reached."""

    kind = "storage_full"


class StoragePermissionError(StorageError):
    """The storage refused the credentials or the permissions."""

    kind = "storage_permission"


class AmbiguousWriteError(StorageError):
    """A conditional write got no clear answer: it may or may not have happened."""

    kind = "storage_ambiguous"


class ColdObjectError(StorageError):
    """What is to be read lies in an archive class of the storage, and must be restored first.

    Trying again does not help: ``ckptstore thaw`` does. A load names the exact command.
    """

    kind = "storage_cold"
    version: str = ""
    """Id of the version that needs it; empty where only the object is known."""


class NotReplicatedError(StorageError):
    """Versions are durable here, and a replica that should have them does not have them yet."""

    kind = "not_replicated"


class SaverDiedError(StorageError):
    """The process that saved in the background died before it was done; no version appeared."""

    kind = "saver_died"


class WorkerDiedError(StorageError):
    """Workers that ran tasks died again and again, or none is left; what was done stays done."""

    kind = "worker_died"


class MissingDependencyError(StorageError):
    """The backend needs a package that is not installed; the hint names the extra."""

    kind = "missing_dependency"


class OperationCancelledError(CkptStoreError):
    """The caller cancelled; nothing became visible."""

    kind = "cancelled"
    exit_code = 130
