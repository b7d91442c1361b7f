"""Refuses every write."""

from __future__ import annotations

from ckptstore.backends.base import Buffer, Leftovers, ObjectWriter, check_key
from ckptstore.backends.cold import ColdStorage, ObjectState
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import ReadOnlyError


class ReadOnlyBackend(WrapperBackend):
    """Passes reads on; raises ``ReadOnlyError`` for writes, before the storage sees them."""

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

    def cold_storage(self) -> ColdStorage | None:
        """Return access that reads the classes of objects, and changes none."""
        cold = self.inner.cold_storage()
        return None if cold is None else _ReadOnlyCold(cold)

    def remove_leftovers(self, *, modified_before: float, dry_run: bool = False) -> Leftovers:
        """Count with `dry_run`, otherwise refuse."""
        if not dry_run:
            raise ReadOnlyError("nothing is removed: opened read-only")
        return self.inner.remove_leftovers(modified_before=modified_before, dry_run=True)


class _ReadOnlyCold:
    """Reports classes and states; refuses moves and restores."""

    def __init__(self, inner: ColdStorage) -> None:
        self._inner = inner

    @property
    def classes(self) -> tuple[str, ...]:
        return self._inner.classes

    def class_of(self, key: str) -> str:
        return self._inner.class_of(key)

    def restore_state(self, key: str) -> ObjectState:
        return self._inner.restore_state(key)

    def set_class(self, key: str, name: str) -> bool:
        raise _refusal(key)

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        raise _refusal(key)


def _refusal(key: str) -> ReadOnlyError:
    return ReadOnlyError(
        f"{check_key(key)} was not written: opened read-only", hint="open without read_only=True"
    )
