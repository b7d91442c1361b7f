"""A read that fails tells why: a cold object, or a version that was deleted or moved meanwhile."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptstore import errors
from ckptstore.format.paths import Pattern
from ckptstore.model import Version
from ckptstore.repo import Repo

_ID_CHARS = 12
"""Of an id in a command: two versions of one store that have them in common are not met."""


@contextmanager
def naming_cold(
    version: str,
    url: str,
    *,
    shown: str = "",
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
) -> Iterator[None]:
    """Let a ColdObjectError of the block name the version and the command that thaws it.

    Parameters
    ----------
    version
        Its id.
    url
        The store's location, without credentials.
    shown
        What people call it: ``run@step``.
    include, exclude
        Which part was asked for.
    """
    try:
        yield
    except errors.ColdObjectError as error:
        first = error.__cause__ if isinstance(error.__cause__, errors.ColdObjectError) else error
        name = shown or f"version {version[:_ID_CHARS]}"
        msg = f"{name} lies in an archive class, and must be thawed first ({first.message})"
        hint = thaw_command(version, url, include=include, exclude=exclude)
        named = errors.ColdObjectError(msg, hint=hint)
        named.version = version
        raise named from first


@contextmanager
def naming_change(repo: Repo, version: Version | None) -> Iterator[None]:
    """Let damage that the block meets be told as what became of the version since, if anything.

    Raises
    ------
    VersionNotFoundError
        It was deleted, or only its record is kept.
    ConflictError
        It lies elsewhere now.
    """
    try:
        yield
    except errors.IntegrityError as error:
        if version is None:
            raise
        try:
            newest = repo.refresh().find(version.id) or version
        except errors.CkptStoreError:
            newest = version
        if newest.deleted or newest.level == "record" != version.level:
            became = "deleted" if newest.deleted else "reduced to its record"
            msg = f"{version.label} was {became} while it was read"
            raise errors.VersionNotFoundError(msg, hint="load another version") from error
        if newest.manifest_key != version.manifest_key:
            msg = f"{version.label} was moved while it was read"
            raise errors.ConflictError(msg, hint="load it again") from error
        raise


def thaw_command(
    version: str,
    url: str,
    *,
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
) -> str:
    """Return the command line that thaws a version, or the part of it that is asked for."""
    words = ["ckptstore", "thaw", version[:_ID_CHARS]]
    for option, patterns in (("--include", include), ("--exclude", exclude)):
        for pattern in patterns or ():
            if isinstance(pattern, str):  # what else there is has no form on a command line
                words += [option, pattern]
    return shlex.join([*words, "--store", url])
