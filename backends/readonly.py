"""Refuses every write."""

from __future__ import annotations

from ckptstore.backends.base import Buffer, Leftovers, ObjectWriter, check_key
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import ReadOnlyError

__all__ = ["ReadOnlyBackend"]


class ReadOnlyBackend(WrapperBackend):
    """Passes reads on; raises ``ReadOnlyError`` for writes, before the storage hears of them."""

    def put(self, key: str, data: Buffer) -> None:
        """Refuse."""
        raise _refusal(key)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Refuse."""
        raise _refusal(key)

    def open_writer(self, key: str) -> ObjectWriter:
        """Refuse."""
        raise _refusal(key)

    def delete(self, key: str) -> None:
        """Refuse."""
        raise _refusal(key)

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> Leftovers:
        """Count, or refuse."""
        if not dry_run:
            raise ReadOnlyError("nothing is removed: opened read-only")
        return self.inner.remove_leftovers(modified_before=modified_before, dry_run=True)


def _refusal(key: str) -> ReadOnlyError:
    return ReadOnlyError(
        f"{check_key(key)} was not written: opened read-only", hint="open without read_only=True"
    )
