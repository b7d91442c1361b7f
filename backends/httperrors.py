"""Translates HTTP answers of object stores to the error tree, by status and code, never by text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ckptstore import errors

# Refused before the server did any work: busy, or too many requests.
_BUSY = frozenset({429, 503, 529})
# The server or a proxy before it failed, perhaps in the middle of the work: 520 to 526 are answers
# of content networks.
_BROKEN = frozenset({408, *range(500, 600)}) - {501, 505, 507}

_NO_BUCKET: Final = "create the bucket or container first; ckptstore never does"
_CREDENTIALS: Final = "check the credentials and the bucket's policy"
_FULL: Final = "raise the quota, or delete old versions"
_COLD: Final = "it lies in an archive class: ckptstore thaw restores it"
_WRONG_KEY: Final = "the credentials are wrong or expired: check key, token, account and clock"
_NO_KEY: Final = "give credentials: without any, only a public bucket can be used"
_NO_IDENTITY: Final = "give credentials: an account key, a SAS token, or an identity"
_NO_KEYS: Final = "the account allows no keys: take an identity (credential=, az login)"
_RIGHTS: Final = "these credentials lack the right: check the bucket's policy"
_FIREWALL: Final = (
    "the credentials are wrong or lack this right, or the account's firewall refuses you"
)
_AZURE_RIGHTS: Final = (
    "these credentials may not do this: give the role Storage Blob Data Contributor (to read:"
    " Storage Blob Data Reader), or a SAS token with more rights"
)
_LOCKED: Final = "somebody else's setting of this object is in the way; see the storage's console"
_OLD_SERVER: Final = (
    "this server is older than the client: give the option api_version, such as 2021-12-02"
)
_Meaning: TypeAlias = "tuple[type[errors.CkptStoreError], str]"
_CODES: Final[Mapping[str, _Meaning]] = {
    code: (kind, hint)
    for kind, hints in {
        errors.StorageError: {
            _NO_BUCKET: "NoSuchBucket ContainerNotFound ContainerBeingDeleted",
            # Conflicts that do not pass by themselves, unlike others of their status.
            _LOCKED: "BlobImmutableDueToPolicy SnapshotsPresent InvalidBlobType",
            _OLD_SERVER: "InvalidHeaderValue",
        },
        # A GET, and a copy, of an object in an archive class that is not restored.
        errors.ColdObjectError: {
            _COLD: "InvalidObjectState ObjectNotInActiveTierError BlobArchived BlobBeingRehydrated"
        },
        errors.StorageFullError: {_FULL: "QuotaExceeded InsufficientCapacity XMinioStorageFull"},
        errors.StoragePermissionError: {
            _WRONG_KEY: "ExpiredToken InvalidToken TokenRefreshRequired authError"
            " AuthorizationHeaderMalformed InvalidAccessKeyId SignatureDoesNotMatch"
            " RequestTimeTooSkewed AuthenticationFailed InvalidAuthenticationInfo",
            _RIGHTS: "AccessDenied AllAccessDisabled forbidden",
            _NO_KEY: "required",
            _NO_IDENTITY: "NoAuthenticationInformation PublicAccessNotPermitted",
            _AZURE_RIGHTS: "AuthorizationPermissionMismatch AuthorizationServiceMismatch"
            " AuthorizationResourceTypeMismatch InsufficientAccountPermissions"
            " UnauthorizedBlobOverwrite",
            _FIREWALL: "AuthorizationFailure AuthorizationSourceIPMismatch",
            _NO_KEYS: "KeyBasedAuthenticationNotPermitted",
        },
        # Trying again helps: a body that came too slowly or was damaged on its way.
        # https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
        errors.TransientStorageError: {"": "RequestTimeout BadDigest IncompleteBody Md5Mismatch"},
    }.items()
    for hint, codes in hints.items()
    for code in codes.split()
}
"""Meaning of a storage's own code, whatever its status; the codes of S3 and of Azure."""
# The name is taken: Azure's words for the status 412. The second is for credentials that may
# create, but not overwrite.
_EXISTS_CODES = frozenset({"BlobAlreadyExists", "UnauthorizedBlobOverwrite"})
# Not finished in time, and perhaps done all the same.
_UNCLEAR_CODES = frozenset({"OperationTimedOut"})

_ELSEWHERE: Final = "the bucket is in another region, or at another endpoint"
_STATUSES: Final[dict[int, _Meaning]] = {
    **dict.fromkeys((301, 307, 308), (errors.StorageError, _ELSEWHERE)),
    **dict.fromkeys((401, 403), (errors.StoragePermissionError, _CREDENTIALS)),
    404: (errors.ObjectNotFoundError, ""),
    409: (errors.TransientStorageError, ""),  # S3's: another create is under way
    416: (errors.CorruptObjectError, ""),
    507: (errors.StorageFullError, _FULL),
}
_UNSAFE: Final = "this storage cannot create a name only if it is absent"
_OF_CREATES: Final[dict[int, _Meaning]] = {
    412: (errors.ObjectExistsError, ""),
    501: (errors.UnsafeBackendError, _UNSAFE),
}


def error_for_answer(
    status: int, code: str, what: str, *, conditional: bool
) -> errors.CkptStoreError:
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
    if code in _EXISTS_CODES and conditional:
        return errors.ObjectExistsError(msg)
    if code in _UNCLEAR_CODES:
        return error_for_silence(msg, conditional=conditional)
    if status in _BUSY or code == "SlowDown":
        busy = errors.TransientStorageError(msg)
        busy.slow_down = True
        return busy
    if status in _BROKEN and code not in _CODES:
        return error_for_silence(msg, conditional=conditional)
    meanings = _STATUSES | _OF_CREATES if conditional else _STATUSES
    kind, hint = _CODES.get(code) or meanings.get(status, (errors.StorageError, ""))
    if kind is errors.CorruptObjectError:
        msg = f"{msg}: the object ends before the range that was asked for"
    return kind(msg, hint=hint)


def error_for_silence(msg: str, *, conditional: bool) -> errors.CkptStoreError:
    """Return the error for a request that was sent and got no valid answer."""
    if conditional:
        hint = "read the object back to see whether it was written"
        return errors.AmbiguousWriteError(msg, hint=hint)
    return errors.TransientStorageError(msg)


def answer_of(error: BaseException | None) -> tuple[int, str] | None:
    """Return HTTP status and code of a library's error or of its cause, or None without them."""
    for found in (error, getattr(error, "__cause__", None)):
        for holder in (found, getattr(found, "response", None)):
            for name in ("status_code", "status"):
                status = getattr(holder, name, None)
                if isinstance(status, int) and 300 <= status < 600:
                    code = getattr(found, "error_code", None)
                    return status, str(getattr(code, "value", code) or "")
    return None
