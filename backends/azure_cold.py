"""Access tiers of Azure: Hot, Cool and Cold can be read, Archive must be rehydrated first.

``Hot`` is the tier that other storage calls ``STANDARD``, which is its name here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ckptstore.backends.bucket import Foreign
from ckptstore.backends.storage_classes import STANDARD, ObjectState
from ckptstore.errors import ColdObjectError, InvalidInputError, StorageError

_HOT: Final = "Hot"
_ARCHIVE: Final = "Archive"
_TIERS: Final = {STANDARD: _HOT, "Cool": "Cool", "Cold": "Cold", _ARCHIVE: _ARCHIVE}
"""Storage class -> access tier."""


def class_of(tier: str | None) -> str:
    """Return the storage class of an access tier; accounts without tiers tell none."""
    return STANDARD if tier in {None, "", _HOT} else str(getattr(tier, "value", tier))


def tier_of(name: str) -> str:
    """Return the access tier of a storage class.

    Raises
    ------
    InvalidInputError
        Azure has no such class.
    """
    if name not in _TIERS:
        msg = f"Azure has no access tier {name}"
        raise InvalidInputError(msg, hint="Hot (STANDARD), Cool, Cold or Archive")
    return _TIERS[name]


class AzureColdStorage:
    """The access tiers of the blobs below one prefix of a container.

    Parameters
    ----------
    properties
        Returns the properties of a key's blob, by a HEAD.
    set_tier
        Sends one Set Blob Tier: operation, key, tier, further options.
    """

    def __init__(
        self,
        properties: Callable[[str], Foreign],
        set_tier: Callable[[str, str, str, Mapping[str, str]], None],
    ) -> None:
        self._properties = properties
        self._set_tier = set_tier

    def restore_state(self, key: str) -> ObjectState:
        """Return class and state by a HEAD."""
        found = self._properties(key)
        name = class_of(found.blob_tier)
        pending = str(found.archive_status or "").startswith("rehydrate-pending")
        return ObjectState(
            storage_class=name,
            size_bytes=found.size,
            modified_at=found.last_modified.timestamp(),
            access="restoring" if pending else "cold" if name == _ARCHIVE else "readable",
        )

    def set_class(self, key: str, name: str) -> bool:
        """Set the tier, which moves no byte."""
        tier = tier_of(name)
        before = self.restore_state(key)
        if before.storage_class == name:
            return False
        if not before.is_readable:
            msg = f"{key} is in {before.storage_class}, and cannot be moved unless it is restored"
            raise ColdObjectError(msg, hint="ckptstore thaw brings it back to Hot, in hours")
        self._set_tier(f"move {key} to {name}", key, tier, {})
        after = self.restore_state(key).storage_class
        if after != name:
            msg = f"move {key} to {name}: the object is in {after} afterwards"
            raise StorageError(msg, hint="does this account have access tiers?")
        return True

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        """Rehydrate to Hot, for good; `tier` is the priority, ``Standard`` or ``High``."""
        if self.restore_state(key).access != "cold":
            return False
        try:
            self._set_tier(f"restore {key}", key, _HOT, {"rehydrate_priority": tier})
        except ColdObjectError:  # another request came first
            return False
        return True
