"""Storage classes of S3, by HeadObject (class), CopyObject (change) and RestoreObject (restore).

The backend's client sends these calls: fsspec has none for them, but s3fs passes on any call
of the S3 API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from ckptstore import limits
from ckptstore.backends.bucket import Foreign
from ckptstore.backends.s3_calls import Request, S3Calls, code_of
from ckptstore.backends.storage_classes import STANDARD, TIERING, Access, ObjectState, class_named
from ckptstore.errors import ColdObjectError, LimitError, StorageError, TransientStorageError

_CLASSES: Final = (
    *(STANDARD, "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING"),
    *("GLACIER_IR", "GLACIER", "DEEP_ARCHIVE"),
)
_RESTORE = re.compile(r'ongoing-request="(true|false)"(?:,\s*expiry-date="([^"]*)")?')


Sender = Callable[[str, Callable[[S3Calls], Any]], Any]
"""The backend's way to send: ``send(what, work)`` is ``work(client)``, errors translated."""


class S3ColdStorage:
    """The classes of the objects below one prefix of a bucket.

    Parameters
    ----------
    location
        Bucket and prefix of the objects.
    send
        The backend's function for one request.
    """

    def __init__(self, name: Callable[[str], Request], send: Sender) -> None:
        self._object = name
        self._send = send

    def restore_state(self, key: str) -> ObjectState:
        """Return class and state by a HEAD."""
        return _state(self._head(key))

    def set_class(self, key: str, name: str) -> bool:
        """Copy an object onto itself, into another class.

        Only if it has not changed since its class was read: a second caller, or a retry after a
        lost answer, must not copy it within one class. (Some releases of Ceph then delete the
        copy: https://tracker.ceph.com/issues/70746) Two concurrent callers may both copy it from
        its old class; the later copy stands.
        """
        head = self._head(key)
        before = _state(head)
        if before.storage_class == name:
            return False
        if not before.is_readable:
            msg = f"{key} is in {before.storage_class}, and cannot be moved unless it is restored"
            raise ColdObjectError(msg, hint="ckptstore thaw restores it for some days")
        if before.size_bytes > limits.S3_COPY_BYTES_MAX:
            most = limits.S3_COPY_BYTES_MAX
            msg = f"{key} has {before.size_bytes} bytes; S3 moves {most} at most"
            raise LimitError(msg, hint="a lifecycle rule of the bucket can move it")
        request = self._object(key) | {
            "CopySource": self._object(key),
            "CopySourceIfUnmodifiedSince": head["LastModified"],
            "StorageClass": name,
        }
        what = f"move {key} to {name}"

        def copy(calls: S3Calls) -> bool:
            """Return False if another client moved the object since its class was read."""
            try:
                calls.call("copy_object", request)
            except Exception as error:
                code = code_of(error)
                if code == "InvalidStorageClass":
                    msg = f"{what}: this storage has no such class"
                    raise StorageError(msg, hint="AWS has " + ", ".join(_CLASSES)) from error
                # Another client was quicker: its copy is newer than the object that was looked at.
                # Ceph tells times by the second, and refuses a copy within one class by itself.
                there = code == "InvalidRequest" and _state(self._head(key)).storage_class == name
                if not there and code != "PreconditionFailed":
                    raise
                return False
            return True

        copied: bool = self._send(what, copy)
        after = self.restore_state(key).storage_class
        if after == name:
            return copied
        if not copied:
            msg = f"{what}: another client moved it to {after} at the same time"
            raise TransientStorageError(msg)
        msg = f"{what}: the object is in {after} afterwards"
        raise StorageError(msg, hint="does this storage have the class?")

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        """Send a RestoreObject."""
        wanted: dict[str, Any] = {"GlacierJobParameters": {"Tier": tier}, "Days": days}
        if self.restore_state(key).storage_class == TIERING:
            del wanted["Days"]  # it is restored for good
        request = self._object(key) | {"RestoreRequest": wanted}

        def ask(calls: S3Calls) -> bool:
            """Return False if a restore is under way already."""
            try:
                calls.call("restore_object", request)
            except Exception as error:
                code = code_of(error)
                if code == "RestoreAlreadyInProgress":
                    return False
                if code == "GlacierExpeditedRetrievalNotAvailable":
                    msg = f"restore {key}: no capacity for tier {tier} at the moment"
                    raise StorageError(msg, hint="take --tier Standard, or try later") from error
                raise
            return True

        sent: bool = self._send(f"restore {key}", ask)
        return sent

    def _head(self, key: str) -> Foreign:
        request = self._object(key)
        return self._send(f"stat {key}", lambda calls: calls.call("head_object", request))


def _state(head: Mapping[str, Any]) -> ObjectState:
    """Return class and state from the answer to a HEAD."""
    name = head.get("StorageClass") or STANDARD
    access, until = _access(name, head)
    return ObjectState(
        storage_class=name,
        size_bytes=head["ContentLength"],
        modified_at=head["LastModified"].timestamp(),
        access=access,
        restored_until=None if until is None else until.timestamp(),
    )


def _access(name: str, head: Mapping[str, Any]) -> tuple[Access, datetime | None]:
    if not (class_named(name).is_archive or head.get("ArchiveStatus")):
        return "readable", None
    told = _RESTORE.search(head.get("Restore") or "")
    if told is None:
        return "cold", None
    if told[1] == "true":
        return "restoring", None
    return "restored", parsedate_to_datetime(told[2]) if told[2] else None
