"""Storage classes of GCS: an object is rewritten in place; all can be read at any time.

The colder classes charge for reading and for a minimum storage duration. No object ever needs a
restore, so a request for one does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from ckptstore.backends.base import ObjectInfo
from ckptstore.backends.cold import ObjectState
from ckptstore.backends.storage_classes import STANDARD
from ckptstore.errors import StorageError

_CLASSES: Final = (STANDARD, "NEARLINE", "COLDLINE", "ARCHIVE")


class Stat(Protocol):
    """``Backend.stat``."""

    def __call__(self, key: str) -> ObjectInfo:
        """Return size, time and class of an object."""


class Rewriter(Protocol):
    """The backend's function for one request of a rewrite, whose answer is JSON."""

    def __call__(self, key: str, name: str, token: str) -> Mapping[str, Any]:
        """Rewrite `key` into the class `name`, or continue the rewrite that gave `token`."""


class GcsColdStorage:
    """The classes of the objects below one prefix of a bucket.

    Parameters
    ----------
    stat
        The backend's ``stat``.
    rewrite
        The backend's function for one request of a rewrite.
    """

    def __init__(self, stat: Stat, rewrite: Rewriter) -> None:
        self._stat = stat
        self._rewrite = rewrite

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the four classes of GCS."""
        return _CLASSES

    def class_of(self, key: str) -> str:
        """Return the class of an object."""
        return self.restore_state(key).storage_class

    def restore_state(self, key: str) -> ObjectState:
        """Return the class; it can be read at any time."""
        info = self._stat(key)
        return ObjectState(
            storage_class=info.storage_class or STANDARD,
            size_bytes=info.size_bytes,
            modified_at=info.modified_at,
            access="readable",
        )

    def set_class(self, key: str, name: str) -> bool:
        """Rewrite an object in place; a large one takes several requests."""
        if self.class_of(key) == name:
            return False
        token = ""
        while True:
            answer = self._rewrite(key, name, token)
            token = answer.get("rewriteToken", "")
            if answer.get("done", True) or not token:
                break
        after = self.class_of(key)
        if after != name:
            msg = f"move {key} to {name}: the object is in {after} afterwards"
            raise StorageError(msg, hint="does this storage have the class?")
        return True

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        """Do nothing, since every object can be read already; returns False."""
        return False
