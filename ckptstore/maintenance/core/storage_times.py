"""Ages of versions by the storage's clock: no decision depends on the clocks of machines."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from ckptstore import limits
from ckptstore.committing import on_reserve
from ckptstore.errors import ReadOnlyError, StoragePermissionError
from ckptstore.format.keys import COMMITS_PREFIX, commit_key, commit_number
from ckptstore.model import Version
from ckptstore.repo import Repo

Clock = Literal["", "storage", "machine"]


class StorageTimes:
    """Times of one operation, asked for when a rule needs them. Owned by one thread.

    A commit's time is when the storage has stored it; one listing tells those of a thousand. The
    time now is that of an object made for the purpose. Where none may be made, it is this
    machine's, but no earlier than that of the newest commit.

    Parameters
    ----------
    strict
        Never go by this machine's clock: versions are deleted by what this says.
    """

    def __init__(self, repo: Repo, *, strict: bool = False) -> None:
        self._repo = repo
        self._strict = strict
        self._now_s: float | None = None
        self._stored_s: dict[int, float] = {}
        self._folders: set[int] = set()
        self.clock: Clock = ""
        """The clock that ages are by; empty as long as nothing was asked."""

    def now_s(self) -> float:
        """Return the time when it was first asked for, in seconds since 1970.

        Raises
        ------
        StorageError
            The storage's clock could not be read.
        """
        if self._now_s is None:
            self._now_s, self.clock = self._read_clock()
        return self._now_s

    def seen_until_s(self) -> float:
        """Return a time of the storage before which the catalog lacks no commit; as :meth:`now_s`.

        Where now is this machine's time, it is that of the newest commit; 0 without any.
        """
        now_s, newest = self.now_s(), self._repo.catalog.number
        if self.clock == "machine":
            return self._stored_at(newest) if newest else 0.0
        return now_s

    def saved_s(self, version: Version) -> float:
        """Return when a version was saved here, or came from another store, in seconds since 1970.

        Raises
        ------
        StorageError
            The storage failed.
        """
        self.clock = self.clock or "storage"
        return self._stored_at(version.commit)

    def age_s(self, version: Version) -> float:
        """Return the age of a version in seconds; as :meth:`now_s` and :meth:`saved_s`."""
        return self.now_s() - self.saved_s(version)

    def _read_clock(self) -> tuple[float, Clock]:
        repo = self._repo
        if not repo.options.read_only:
            try:
                return storage_now(repo), "storage"
            except (StoragePermissionError, ReadOnlyError):
                if self._strict:
                    raise
        newest = repo.catalog.number
        least_s = self._stored_at(newest) if newest else 0.0
        return max(repo.environment.now_ms() / 1000, least_s), "machine"

    def _stored_at(self, number: int) -> float:
        folder = number // limits.COMMITS_PER_FOLDER
        backend = self._repo.backend
        unseen = number not in self._stored_s and folder not in self._folders
        if unseen and backend.capabilities.lists:
            self._folders.add(folder)
            for info in backend.list(f"{COMMITS_PREFIX}{folder:06d}/"):
                if (listed := commit_number(info.key)) is not None:
                    self._stored_s[listed] = info.modified_at
        if number not in self._stored_s:  # it came after the listing, or there is none
            self._stored_s[number] = backend.stat(commit_key(number)).modified_at
        return self._stored_s[number]


def storage_now(repo: Repo) -> float:
    """Return the storage's clock: that of an object made for the purpose, and removed again.

    Raises
    ------
    StorageError
        It could not be written.
    """
    key = f"probe/{repo.environment.random_hex(8)}-clock"
    try:
        # Empty: most file systems have room for its name when they are full.
        on_reserve(repo.backend, lambda: repo.backend.put(key, b""))
        return repo.backend.stat(key).modified_at
    finally:
        with suppress(StoragePermissionError):  # those who may not delete can still retain
            repo.backend.delete(key)
