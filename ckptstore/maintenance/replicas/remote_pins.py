"""Pins that one store leaves in another: what it let go must not be let go there too.

Two stores have two logs, and no commit spans them. So whoever changes the one looks at the other
afterwards: an eviction pins there, lets go here, and looks whether the pins are still there;
whoever takes pins away looks whether this store needs them again. Whichever of two at once comes
last sees what the other did. A kill in between can only leave a pin that nobody needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.pin_ops import Pin, pin_for, unpin_for
from ckptstore.catalog.state import Op
from ckptstore.errors import ReadOnlyError, UnsafeBackendError
from ckptstore.model import Version
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The pins in one store for another."""

    here: Repo
    """The store that lets go."""
    there: Repo
    """The store that is to keep."""

    @property
    def store(self) -> str:
        """Id of the store that they are for."""
        return self.here.superblock.store_id

    def check_writable(self) -> None:
        """Return if pins can be left there.

        Raises
        ------
        ReadOnlyError, UnsafeBackendError
            They cannot; the hint says how to do without.
        """
        try:
            self.there.check_writable()
        except (ReadOnlyError, UnsafeBackendError) as error:
            msg = f"what is evicted is pinned in the other store, and {error.message}"
            hint = "if its own rules may delete what is evicted here: --no-pin, or pin=False"
            raise type(error)(msg, hint=hint) from error

    def has(self, version_id: str) -> bool:
        """Say whether a version is pinned there, by its log as it was last read."""
        catalog = self.there.catalog
        return (
            catalog.has_version(version_id) and self.store in catalog.version(version_id).pinned_for
        )

    def leave(self, versions: Sequence[Version]) -> set[str]:
        """Pin versions there that are not deleted, in one commit; return ids of the new pins."""
        fresh: set[str] = set()

        def build(now: Catalog) -> list[Op]:
            """Pin what is not pinned yet, and note which versions that are."""
            ops = pin_for(now, [one.id for one in versions], self.store)
            fresh.clear()
            fresh.update(op.version for op in ops if isinstance(op, Pin))
            return ops

        self.there.log.append_any(build)
        return fresh

    def take_away(self, version_ids: Iterable[str]) -> list[str]:
        """Take pins away of versions whose record is not all that is here; return their ids."""
        gone: list[str] = []
        wanted = [one for one in version_ids if self.has(one)]
        for start in range(0, len(wanted), limits.RELOCATES_PER_COMMIT):
            part = wanted[start : start + limits.RELOCATES_PER_COMMIT]
            now = self.here.refresh()
            free = [one for one in part if not _rests_on_record(now, one)]
            _unpin(self.there, free, self.store)
            now = self.here.refresh()
            again = [one for one in free if _rests_on_record(now, one)]
            _pin(self.there, again, self.store)
            gone += [one for one in free if one not in again]
        return gone

    def forgotten(self) -> list[str]:
        """Return the ids of versions that are pinned there, and whose record is deleted here."""
        now = self.here.catalog
        pinned = self.there.catalog.pinned()
        ids = [one.id for one in pinned if self.store in one.pinned_for]
        return [one for one in ids if now.has_version(one) and now.version(one).deleted]


def release(repo: Repo, store: str) -> list[str]:
    """Take all pins away that another store has in one; return the ids of the versions."""
    pinned = repo.refresh().pinned()
    ids = [one.id for one in pinned if store in one.pinned_for]
    for start in range(0, len(ids), limits.RELOCATES_PER_COMMIT):
        part = ids[start : start + limits.RELOCATES_PER_COMMIT]
        _unpin(repo, part, store)
    return ids


def _pin(repo: Repo, ids: Sequence[str], store: str) -> None:
    repo.log.append_any(lambda now: pin_for(now, ids, store))


def _unpin(repo: Repo, ids: Sequence[str], store: str) -> None:
    repo.log.append_any(lambda now: unpin_for(now, ids, store))


def _rests_on_record(now: Catalog, version_id: str) -> bool:
    if not now.has_version(version_id):
        return True  # this log was put back to an older state: it knows nothing about it
    version = now.version(version_id)
    return version.level == "record" and not version.deleted
