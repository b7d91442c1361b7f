"""The catalog after further commits.

A fold takes the catalog after commit n and commits n+1, n+2 ..., and gives the catalog after them.
It is deterministic and depends on nothing else, so every client that has read the same log has
the same catalog. An operation that breaks an invariant is an error that names its commit: no
correct writer makes one, since a writer folds its own commit before it writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.state import Fold
from ckptstore.errors import CkptStoreError, CorruptObjectError, IntegrityError


def extended(catalog: Catalog, commits: Sequence[Commit]) -> tuple[Catalog, CkptStoreError | None]:
    """Fold `commits` onto a catalog, which stays as it is.

    Returns
    -------
    tuple
        The catalog as far as the commits can be folded, each wholly or not at all, and what is
        wrong with the first that cannot, or None.
    """
    fold = Fold(catalog.state)
    for index, commit in enumerate(commits):
        try:
            _apply(fold, commit)
        except IntegrityError as error:
            # The commit may have been applied in part: fold again up to the one before.
            return (extended(catalog, commits[:index])[0], error)
    return (Catalog(fold.state()) if commits else catalog, None)


def _apply(fold: Fold, commit: Commit) -> None:
    """Fold one commit.

    Raises
    ------
    CorruptObjectError
        If it does not follow the one before, or breaks an invariant of the catalog.
    """
    if commit.number != fold.number + 1:
        msg = f"{commit.key} follows commit {fold.number}, but {fold.number + 1} should"
        raise CorruptObjectError(msg)
    if commit.body.previous != fold.digest:
        msg = (
            f"the history was changed: {commit.key} says that the commit before it has the "
            f"digest {commit.body.previous!r}, but it has {fold.digest!r}"
        )
        raise CorruptObjectError(msg, hint="restore the log from a replica or a backup")
    fold.number, fold.at_ms = commit.number, commit.body.at_ms
    for op in commit.ops:
        op.apply(fold)
    fold.digest = commit.digest
