"""Translates HTTP answers of object stores to the error tree, by status and code, never by text."""

from __future__ import annotations

from ckptstore.errors import (
    AmbiguousWriteError,
    CkptStoreError,
    ColdObjectError,
    CorruptObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    TransientStorageError,
    UnsafeBackendError,
)

# Refused before the server did any work: busy, or too many requests.
_BUSY = frozenset({429, 503})
# The server or a proxy before it failed, perhaps in the middle of the work.
_BROKEN = frozenset({500, 502, 504})
_FULL_CODES = frozenset({"QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull"})
# What S3 answers with status 400 although trying again helps: a body that came too slowly or was
# damaged on its way. https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_PASSING_CODES = frozenset({"RequestTimeout", "BadDigest", "IncompleteBody", "SlowDown"})
# Codes of S3 and of Azure.
_NO_BUCKET_CODES = frozenset({"NoSuchBucket", "ContainerNotFound"})
_EXISTS_CODES = frozenset({"BlobAlreadyExists"})
# A GET, and a copy, of an object in an archive class that is not restored; both with status 403.
_COLD_CODES = frozenset({"InvalidObjectState", "ObjectNotInActiveTierError"})
_CREDENTIAL_CODES = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed"}
)


def error_for_answer(status: int, code: str, what: str, *, conditional: bool) -> CkptStoreError:
    """Return the error for an answer that is not a success.

    Parameters
    ----------
    status
        The HTTP status.
    code
        The storage's own, such as ``SlowDown``; empty without one.
    what
        The operation, for the message.
    conditional
        Whether the request was to create a name only if it is absent.
    """
    msg = f"{what}: HTTP {status} {code}".rstrip()
    if code in _NO_BUCKET_CODES:
        return StorageError(msg, hint="create the bucket first; ckptstore never does")
    if code in _EXISTS_CODES and conditional:
        return ObjectExistsError(msg)
    if code in _COLD_CODES:
        return ColdObjectError(msg, hint="it lies in an archive class: ckptstore thaw restores it")
    if status == 507 or code in _FULL_CODES:
        return StorageFullError(msg, hint="raise the quota, or delete old versions")
    if code in _CREDENTIAL_CODES or status in {401, 403}:
        return StoragePermissionError(msg, hint="check the credentials and the bucket's policy")
    if status in _BUSY or code in _PASSING_CODES:
        return TransientStorageError(msg)
    if status in _BROKEN or status == 408:
        return error_for_silence(msg, conditional=conditional)
    return _error_for_refusal(status, msg, conditional=conditional)


def _error_for_refusal(status: int, msg: str, *, conditional: bool) -> CkptStoreError:
    if status == 404:
        return ObjectNotFoundError(msg)
    if status == 412 and conditional:
        return ObjectExistsError(msg)
    if status == 409:  # S3's ConditionalRequestConflict: another create is under way
        return TransientStorageError(msg)
    if status == 416:
        return CorruptObjectError(f"{msg}: the object ends before the range that was asked for")
    if status == 501 and conditional:
        return UnsafeBackendError(
            msg, hint="this storage cannot create a name only if it is absent"
        )
    if status in {301, 307, 308}:
        return StorageError(msg, hint="the bucket is in another region, or at another endpoint")
    return StorageError(msg)


def error_for_silence(msg: str, *, conditional: bool) -> CkptStoreError:
    """Return the error for a request that was sent and got no valid answer."""
    if conditional:
        return AmbiguousWriteError(msg, hint="read the object back to see whether it was written")
    return TransientStorageError(msg)
