"""Storage with classes, in memory: it refuses to read archived objects until they are restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.storage_classes import STANDARD, ColdStorage, ObjectState, class_named
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import ColdObjectError

__all__ = ["ColdBackend", "Shelf"]


@dataclass(slots=True)
class Shelf:
    """Classes and restores of objects; several backends may share one."""

    classes: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Keys whose restore was asked for, in order."""
    moved: list[tuple[str, str]] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    """Keys whose state was asked for."""
    restored: set[str] = field(default_factory=set)
    after: int = 0
    """Number of looks at a restoring object before it is restored."""
    left: dict[str, int] = field(default_factory=dict)
    days: dict[str, int] = field(default_factory=dict)
    until: float | None = None
    """Time when restored objects are cold again, as reported."""
    before_move: Callable[[str], None] = lambda _key: None

    def state(self, info: ObjectInfo) -> ObjectState:
        """Return the state of an object; each call advances its restore."""
        key, name = info.key, self.classes.get(info.key, STANDARD)
        state = ObjectState(
            storage_class=name,
            size_bytes=info.size_bytes,
            modified_at=info.modified_at,
            access="readable",
        )
        if not class_named(name).is_archive:
            return state
        if key in self.left:
            self.left[key] -= 1
            if self.left[key] > 0:
                return replace(state, access="restoring")
            del self.left[key]
            self.restored.add(key)
        if key in self.restored:
            return replace(state, access="restored", restored_until=self.until)
        return replace(state, access="cold")


class ColdBackend(WrapperBackend):
    """Refuses reads of cold objects, and has storage classes."""

    def __init__(self, inner: Backend, shelf: Shelf) -> None:
        super().__init__(inner)
        self.shelf = shelf

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Refuse cold objects."""
        self._check(key)
        return self.inner.get(key, bytes_max=bytes_max)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Refuse cold objects."""
        self._check(key)
        self.inner.read_into(key, offset, buffers)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List with the classes."""
        for info in self.inner.list(prefix, after=after):
            yield replace(info, storage_class=self.shelf.classes.get(info.key, STANDARD))

    def cold_storage(self) -> ColdStorage:
        """Return access to the storage classes."""
        return _Cold(self)

    def _check(self, key: str) -> None:
        name = self.shelf.classes.get(key, STANDARD)
        if class_named(name).is_archive and key not in self.shelf.restored:
            msg = f"get {key}: HTTP 403 InvalidObjectState"
            raise ColdObjectError(msg, hint="ckptstore thaw restores it")


class _Cold:
    def __init__(self, backend: ColdBackend) -> None:
        self._backend = backend
        self._shelf = backend.shelf

    def restore_state(self, key: str) -> ObjectState:
        self._shelf.looked.append(key)
        return self._shelf.state(self._backend.inner.stat(key))

    def set_class(self, key: str, name: str) -> bool:
        self._shelf.before_move(key)
        if self._shelf.classes.get(key, STANDARD) == name:
            return False
        self._backend.inner.stat(key)
        self._backend._check(key)
        self._shelf.classes[key] = name
        self._shelf.restored.discard(key)
        self._shelf.moved.append((key, name))
        return True

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        self._shelf.asked.append(key)
        self._shelf.days[key] = days
        if key in self._shelf.left:
            return False
        if key not in self._shelf.restored:
            self._shelf.left[key] = self._shelf.after
        return True
