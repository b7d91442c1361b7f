"""Brings versions of an open store to another: replicas, and forks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from ckptstore.backends.key_sources import KeyInput, hidden
from ckptstore.errors import InvalidInputError
from ckptstore.format.names import check_listed
from ckptstore.replicas.options import HasRepo, open_target
from ckptstore.replicas.places import name_in
from ckptstore.repo import Repo
from ckptstore.store import resume_check
from ckptstore.store.refs import named_version, named_versions
from ckptstore.store.session import Session

if TYPE_CHECKING:
    from ckptstore.engine.engine import EngineSpec
    from ckptstore.maintenance.replicas.fork import ForkRequest
    from ckptstore.maintenance.replicas.replicate import ReplicateReport
    from ckptstore.maintenance.replicas.replicate_version import ReplicateRequest

__all__ = ["Chosen", "Place", "fork", "replicate"]


Place: TypeAlias = HasRepo | str | os.PathLike[str]
"""A second store, its location, or ``replica:NAME``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The versions that an operation is asked for."""

    refs: Sequence[str] | None = None
    runs: Sequence[str] | None = None
    """Runs of which all versions count."""
    keep: str | Sequence[str] | None = None
    """Rules as in a retention policy."""


def replicate(
    session: Session,
    to: Place,
    key: KeyInput | None,
    chosen: Chosen,
    request: ReplicateRequest,
    *,
    again: bool | None,
    executor: EngineSpec | None,
    workers: int | None,
) -> ReplicateReport:
    """Bring versions to another store; see :meth:`ckptstore.Store.replicate`."""
    from ckptstore.maintenance.core.select_versions import select_versions
    from ckptstore.maintenance.replicas.replicate import replicate

    key = hidden(key)
    target = _target(session, to, key, dry_run=request.dry_run)
    if request.bytes_per_s < 0:
        msg = f"bytes_per_s={request.bytes_per_s} must not be negative"
        raise InvalidInputError(msg)
    named = named_versions(session.repo, chosen.refs or ())
    of = check_listed(chosen.runs or (), "runs")
    versions = select_versions(session.repo, refs=named, runs=of, rules=chosen.keep)
    asked = {None: named, True: versions, False: ()}[again]
    request = replace(request, again=frozenset(version.id for version in asked))
    with target as there:
        return replicate(session.repo, there, versions, request, executor=executor, workers=workers)


def _target(
    session: Session, to: Place, key: KeyInput | None, *, dry_run: bool
) -> AbstractContextManager[Repo]:
    """Return what gives the other store: as it is open, or opened for the length of a block."""
    name = name_in(to)
    if name is None and not isinstance(to, HasRepo):
        return open_target(session.repo, to, dry_run=dry_run, encryption_key=key)
    there = to.repo if isinstance(to, HasRepo) else session.replicas.find(name or "")
    if key is not None:
        msg = "to_key is for the place of a store, not for one that is open"
        raise InvalidInputError(msg, hint="open it with its key")
    return nullcontext(there)


def fork(session: Session, ref: str, request: ForkRequest, target: Repo) -> None:
    """Begin a run at a version, in its own store or another; see :meth:`ckptstore.Store.fork`."""
    from ckptstore.maintenance.replicas.fork import fork

    source = named_version(session.repo, ref)
    session.replicas.lent(
        source, lambda lender: fork(target, session.repo, source, request, lender=lender)
    )
    resume_check.chosen(target, request.run)
