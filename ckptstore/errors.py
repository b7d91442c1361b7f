"""All errors that ckptstore raises, grouped by the reaction they call for.

::

    CkptStoreError                      catch-all; every instance has .kind and .exit_code
    |-- InvalidInputError (ValueError)  the arguments are wrong: correct the call
    |   |-- InvalidKeyError             a storage key breaks the key rules
    |   |-- InvalidRefError             the text is not a valid ref
    |   |-- InvalidUrlError             no backend serves the location
    |   |-- StateError (TypeError)      the state contains an unsupported object
    |   |-- TornStateError              the state changed while it was being saved
    |   |-- EncryptionKeyError          the key is invalid, or the store is not encrypted
    |   |   |-- MissingKeyError         the store is encrypted, and no key was given
    |   |   `-- WrongKeyError           the store is encrypted with another key
    |   |-- TensorIndexError (IndexError)  the index is outside the tensor, or unsupported
    |   `-- UnknownNameError (AttributeError)  the object has no attribute of this name
    |-- NotFoundError (LookupError)     the named object does not exist
    |   |-- StoreNotFoundError
    |   |-- RunNotFoundError
    |   |-- VersionNotFoundError
    |   |-- TensorNotFoundError
    |   `-- ObjectNotFoundError         a key of the backend
    |-- ConflictError                   another process was first: read again, then decide again
    |   |-- SaveBusyError               a background save is still running
    |   |-- StoreExistsError
    |   |-- ReplicaChangedError         the location of a replica holds another store
    |   |-- ObjectExistsError           put-if-absent found an existing object
    |   `-- CommitConflictError         an earlier commit invalidated this one
    |       `-- CondemnedError          a collection condemned an object that the commit relied on
    |-- IntegrityError                  stored data is damaged or missing: use verify
    |   |-- CorruptObjectError          an object or record does not match its digest or its limits
    |   `-- CorruptTensorError          the data of a named tensor does not match its chunk id
    |-- FormatError                     written by a newer ckptstore, or not by ckptstore
    |   `-- UnsupportedFeatureError
    |-- PolicyError                     refused for safety
    |   |-- ReadOnlyError
    |   |-- UnsafeBackendError          the storage does not support put-if-absent
    |   |-- UnsafeEncodingError         a lossy encoding that would harm the training
    |   `-- LimitError (ValueError)     the operation would exceed a limit of limits.py
    |-- StorageError (OSError)          the storage failed
    |   |-- TransientStorageError       a temporary failure that outlasted all retries
    |   |-- StorageFullError            no space, or quota reached
    |   |-- StoragePermissionError      credentials or permissions
    |   |-- AmbiguousWriteError         a conditional write may or may not have happened
    |   |-- ColdObjectError             the data is in an archive class: restore it first (thaw)
    |   |-- NotReplicatedError          a replica does not hold a version yet
    |   |-- SaverDiedError              the process of a background save died
    |   |-- WorkerDiedError             workers died, or none is left
    |   |-- RankFailedError             a rank that takes part in a shared load failed, or is gone
    |   `-- MissingDependencyError      the backend needs a package that is not installed
    `-- OperationCancelledError         the caller cancelled the operation

A ``kind`` is a stable, append-only code: match on it, never on the message.
Each class is a name of the package too: ``except ckptstore.RunNotFoundError``.
Foreign exceptions (botocore, gcsfs, OSError, msgspec, zstandard) never leave ckptstore.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AmbiguousWriteError", "CkptStoreError", "ColdObjectError", "CommitConflictError",
    "CondemnedError", "ConflictError", "CorruptObjectError", "CorruptTensorError",
    "EncryptionKeyError", "FormatError", "IntegrityError", "InvalidInputError",
    "InvalidKeyError", "InvalidRefError", "InvalidUrlError", "LimitError",
    "MissingDependencyError", "MissingKeyError", "NotFoundError", "NotReplicatedError",
    "ObjectExistsError", "ObjectNotFoundError", "OperationCancelledError", "PolicyError",
    "RankFailedError", "ReadOnlyError", "ReplicaChangedError", "RunNotFoundError",
    "SaveBusyError", "SaverDiedError", "StateError", "StorageError", "StorageFullError",
    "StoragePermissionError", "StoreExistsError", "StoreNotFoundError", "TensorIndexError",
    "TensorNotFoundError", "TornStateError", "TransientStorageError", "UnknownNameError",
    "UnsafeBackendError", "UnsafeEncodingError", "UnsupportedFeatureError",
    "VersionNotFoundError", "WorkerDiedError", "WrongKeyError",
]  # fmt: skip


class CkptStoreError(Exception):
    """Base class of all errors that ckptstore raises.

    Attributes
    ----------
    kind
        Stable code of the failure, for programs (``--json`` prints it).
    exit_code
        Exit code of the command line.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        """Take the kind of the classes below from their names, where they give no other."""
        if cls.__module__ == __name__ and "kind" not in vars(cls):
            name = cls.__name__.removesuffix("Error")
            cls.kind = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)[1:]

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the message and, after a dash, the hint."""
        return f"{self.message} -- {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with its hint and attributes, so that process pools can return it."""
        return _rebuild, (type(self), self.message, self.hint), self.__dict__


def _rebuild(cls: type[CkptStoreError], message: str, hint: str) -> CkptStoreError:
    return cls(message, hint=hint)


class InvalidInputError(CkptStoreError, ValueError):
    """The arguments of the call are wrong."""

    exit_code = 2


class InvalidKeyError(InvalidInputError):
    """A storage key breaks the rules of :func:`ckptstore.backends.base.check_key`."""


class InvalidRefError(InvalidInputError):
    """The text is not a valid ref."""


class InvalidUrlError(InvalidInputError):
    """No backend serves this location."""


class StateError(InvalidInputError, TypeError):
    """The state contains an object of an unsupported type; the message names its path."""


class TornStateError(InvalidInputError):
    """A tensor changed between the call and the write; the message names it.

    Nothing was saved, because the data would mix two states.
    """

    kind = "state_torn"


class EncryptionKeyError(InvalidInputError):
    """The key cannot be read or is not valid, or the store is not encrypted."""

    kind = "key"


class MissingKeyError(EncryptionKeyError):
    """The store is encrypted and no key was given; the hint lists the ways to give one."""

    kind = "key_missing"


class WrongKeyError(EncryptionKeyError):
    """The store is encrypted with another key; only its key records were read."""

    kind = "key_wrong"


class TensorIndexError(InvalidInputError, IndexError):
    """The index is outside a stored tensor, or of an unsupported kind."""


class UnknownNameError(InvalidInputError, AttributeError):
    """The object has no attribute of this name; the hint names the one that was probably meant."""


class NotFoundError(CkptStoreError, LookupError):
    """The named object does not exist."""

    exit_code = 3


class StoreNotFoundError(NotFoundError):
    """There is no store at this location."""


class RunNotFoundError(NotFoundError):
    """The store has no run of this name."""


class VersionNotFoundError(NotFoundError):
    """The ref is valid, but no version matches it."""


class TensorNotFoundError(NotFoundError):
    """The version has no tensor at this path."""


class ObjectNotFoundError(NotFoundError):
    """The backend has no object with this key."""


class ConflictError(CkptStoreError):
    """Another process or call was first."""

    exit_code = 4


class SaveBusyError(ConflictError):
    """A background save is still running, and the caller asked not to wait for it."""


class StoreExistsError(ConflictError):
    """A store already exists at this location."""


class ReplicaChangedError(ConflictError):
    """The location of a replica now holds another store.

    Nothing was read from it and nothing was written to it.
    """


class ObjectExistsError(ConflictError):
    """Put-if-absent found an existing object with this key; nothing was written."""


class CommitConflictError(ConflictError):
    """Another commit came first and invalidated an assumption of this one."""


class CondemnedError(CommitConflictError):
    """A collection condemned an object that the commit relied on; `keys` names it.

    A save handles this by writing the data again to a new object. The error reaches the caller only
    if that fails repeatedly.
    """

    keys: frozenset[str] = frozenset()
    """Keys of the condemned objects."""


class IntegrityError(CkptStoreError):
    """Stored data differs from the written data, or is missing."""

    exit_code = 5


class CorruptObjectError(IntegrityError):
    """An object or a record does not match its digest, its length or its limits."""


class CorruptTensorError(IntegrityError):
    """The data of a tensor does not match its chunk id; the message names the tensor."""


class FormatError(CkptStoreError):
    """The data was not written by ckptstore, or by a newer version of it."""

    exit_code = 6


class UnsupportedFeatureError(FormatError):
    """The store, manifest or commit requires a feature that this version of ckptstore lacks."""


class PolicyError(CkptStoreError):
    """The operation is refused for safety; the hint says how to allow it."""

    exit_code = 7


class ReadOnlyError(PolicyError):
    """The store was opened read-only."""


class UnsafeBackendError(PolicyError):
    """The storage does not support put-if-absent, so concurrent writers could lose commits."""


class UnsafeEncodingError(PolicyError):
    """A rule would store a tensor too inexactly for its use in training; the message names it."""


class LimitError(PolicyError, ValueError):
    """The operation would exceed a limit of :mod:`ckptstore.limits`."""


class StorageError(CkptStoreError, OSError):
    """The storage failed."""

    exit_code = 8


class TransientStorageError(StorageError):
    """A temporary failure (timeout, reset, 503) that outlasted all retries.

    Attributes
    ----------
    slow_down
        Whether the storage asked for fewer requests (429, 503).
    """

    kind = "storage_transient"
    slow_down = False


class StorageFullError(StorageError):
    """The storage has no space left, or a quota is reached."""


class StoragePermissionError(StorageError):
    """The storage rejected the credentials or denied permission."""


class AmbiguousWriteError(StorageError):
    """The result of a conditional write is unknown: it may or may not have happened."""

    kind = "storage_ambiguous"


class ColdObjectError(StorageError):
    """The data is in an archive class of the storage and must be restored before it can be read.

    Retries do not help; ``ckptstore thaw`` does. The error of a load contains the exact command.
    """

    kind = "storage_cold"
    version: str = ""
    """Id of the version that needs the object; empty if unknown."""


class NotReplicatedError(StorageError):
    """Versions are durable here, but not yet in a replica that should hold them."""


class SaverDiedError(StorageError):
    """The process of a background save died before the commit; no version appeared."""


class WorkerDiedError(StorageError):
    """Workers died, or none is left; finished tasks keep their effect."""


class RankFailedError(StorageError):
    """A rank that takes part in a shared load failed, or is gone; the message names it.

    A rank that fails with an error of ckptstore makes the others raise an error of the same class
    instead, whose message begins with the rank.
    """


class MissingDependencyError(StorageError):
    """The backend needs a package that is not installed; the hint names the extra to install."""


class OperationCancelledError(CkptStoreError):
    """The caller cancelled the operation; nothing became visible."""

    kind = "cancelled"
    exit_code = 130
