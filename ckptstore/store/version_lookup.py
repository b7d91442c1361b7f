"""Finds versions by refs in an open store, one whose log is damaged too."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError
from ckptstore.format.names import check_listed
from ckptstore.model import Ref, Version
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")


def named_version(repo: Repo, ref: str) -> Version:
    """Return the version that a ref names; see :meth:`ckptstore.Store.resolve`."""
    return named_versions(repo, [ref])[0]


def named_versions(repo: Repo, refs: Sequence[str]) -> list[Version]:
    """Return the versions that refs name, in their order; the log is read once for all."""
    parsed = [parse_ref(ref) for ref in check_listed(refs, "refs")]
    if not parsed:
        return []
    try:
        catalog = repo.refresh()
    except (IntegrityError, FormatError) as error:
        catalog = repo.log.catalog
        if not all(one.kind == "id" and _knows(catalog, one) for one in parsed):
            raise
        named = ", ".join(refs)
        _log.warning("%s is read from what the log held before its damage: %s", named, error)
    return [_found(repo, catalog, one) for one in parsed]


def _found(repo: Repo, catalog: Catalog, ref: Ref) -> Version:
    if ref.kind == "valid":
        from ckptstore.maintenance.check.latest_valid import latest_valid

        return latest_valid(repo, ref.run).version
    return resolve(catalog, ref)


def known(repo: Repo) -> Catalog:
    """Return the catalog as last read; where the log is damaged, its state before the damage."""
    try:
        return repo.catalog
    except (IntegrityError, FormatError):
        return repo.log.catalog


def _knows(catalog: Catalog, ref: Ref) -> bool:
    try:
        resolve(catalog, ref)
    except CkptStoreError:
        return False
    return True
