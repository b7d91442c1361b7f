"""Rows of the catalog as the objects that users see: ``Version`` and ``RunInfo``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from ckptstore.catalog.levels import level_of
from ckptstore.catalog.state import RunState
from ckptstore.errors import CorruptObjectError
from ckptstore.format.snapshot import (
    ABANDONED,
    DAMAGED,
    DELETED,
    PINNED,
    VERIFIED,
    VersionRow,
    decode_details,
    decode_metrics,
)
from ckptstore.model import RoleBytes, RunInfo, Version


def build_run(run: RunState, rows: Mapping[str, VersionRow]) -> RunInfo:
    """Return a run as users see it.

    Parameters
    ----------
    rows
        Of all versions, by their ids.
    """
    flags = [rows[version_id].flags for version_id in run.versions]
    return RunInfo(
        name=run.name,
        metrics=dict(run.metrics),
        head=run.head,
        created_at=datetime.fromtimestamp(run.created_at_ms / 1000, UTC),
        versions_count=sum(not flag & DELETED for flag in flags) if any(flags) else len(flags),
        tags={tag: target for tag, target in run.tags.items() if not rows[target].flags & DELETED},
        origin=run.origin,
        policy=msgspec.json.decode(run.policy) if run.policy else None,
    )


def build_version(row: VersionRow, tags: tuple[str, ...]) -> Version:
    """Return the version of a row, with these tags.

    Raises
    ------
    CorruptObjectError
        The snapshot that the row came from is damaged.
    """
    details = decode_details(row)
    return Version(
        id=row.id,
        run=row.run,
        step=row.step,
        metrics=decode_metrics(row),
        tags=tags,
        parent=row.parent,
        created_at=datetime.fromtimestamp(row.at_ms / 1000, UTC),
        metadata=_metadata(row, details.metadata),
        roles={
            role: RoleBytes(logical=logical, new=new, stored=stored)
            for role, (logical, new, stored) in details.roles.items()
        },
        content=details.content.hex(),
        manifest_key=details.manifest_key,
        manifest_digest=details.manifest_digest.hex(),
        manifest_bytes=details.manifest_bytes,
        receipt=details.receipt,
        commit=row.commit,
        level=level_of(row),
        abandoned=bool(row.flags & ABANDONED),
        pinned=bool(row.flags & PINNED),
        verified=bool(row.flags & VERIFIED),
        damaged=bool(row.flags & DAMAGED),
        deleted=bool(row.flags & DELETED),
        origin=details.origin,
        replicas=details.replicas,
        pinned_for=tuple(filter(None, details.pinned_by)),
    )


def _metadata(row: VersionRow, data: bytes) -> dict[str, object]:
    try:
        return {} if data == b"{}" else msgspec.json.decode(data, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        msg = f"the catalog snapshot has damaged metadata for version {row.id}: {error}"
        raise CorruptObjectError(msg) from error


def tags_by_version(runs: Iterable[RunState]) -> dict[str, tuple[str, ...]]:
    """Return the tags of runs by the id of the version that they name, in alphabetical order."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for tag, version_id in run.tags.items():
            found.setdefault(version_id, []).append(tag)
    return {version_id: tuple(sorted(tags)) for version_id, tags in found.items()}


def pins_of(row: VersionRow) -> tuple[str, ...]:
    """Return the stores that a version is pinned for; the own one is empty."""
    return (decode_details(row).pinned_by or ("",)) if row.flags & PINNED else ()
