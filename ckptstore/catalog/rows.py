"""Rows of the catalog: as the objects that users see, and to and from a snapshot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from sys import intern
from typing import Final

import msgspec

from ckptstore.catalog.levels import level_of
from ckptstore.catalog.state import RunState, State
from ckptstore.errors import InvalidInputError
from ckptstore.format import names, snapshot
from ckptstore.format.snapshot import Flag, VersionRow
from ckptstore.model import ReplicaInfo, RoleBytes, RunInfo, Version

_HEX: Final = re.compile(r"[0-9a-f]*")
_ID_CHARS: Final = 32
_METADATA: Final = msgspec.json.Decoder(dict[str, object])


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
        versions_count=sum(not flag & Flag.DELETED for flag in flags) if any(flags) else len(flags),
        tags={
            tag: target for tag, target in run.tags.items() if not rows[target].flags & Flag.DELETED
        },
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
    details = snapshot.decode_details(row)
    return Version(
        id=row.id,
        run=row.run,
        step=row.step,
        metrics=snapshot.decode_metrics(row),
        tags=tags,
        parent=row.parent,
        created_at=datetime.fromtimestamp(row.at_ms / 1000, UTC),
        metadata=snapshot.decoded(_METADATA.decode, details.metadata, "metadata", row),
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
        abandoned=bool(row.flags & Flag.ABANDONED),
        pinned=bool(row.flags & Flag.PINNED),
        verified=bool(row.flags & Flag.VERIFIED),
        damaged=bool(row.flags & Flag.DAMAGED),
        deleted=bool(row.flags & Flag.DELETED),
        origin=details.origin,
        replicas=details.replicas,
        pinned_for=tuple(filter(None, details.pinned_by)),
    )


def tags_by_version(runs: Iterable[RunState]) -> dict[str, tuple[str, ...]]:
    """Return the tags of runs by the id of the version that they name, in alphabetical order."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for tag, version_id in run.tags.items():
            found.setdefault(version_id, []).append(tag)
    return {version_id: tuple(sorted(tags)) for version_id, tags in found.items()}


def newest(rows: Iterable[VersionRow]) -> VersionRow | None:
    """Return the newest row that is not deleted, an abandoned one only where all are."""
    left = [row for row in rows if not row.flags & Flag.DELETED]
    left.reverse()  # of records that came in one commit the last is the newest
    return max(left, key=lambda row: (not row.flags & Flag.ABANDONED, row.commit), default=None)


def pins_of(row: VersionRow) -> tuple[str, ...]:
    """Return the stores that a version is pinned for; the own one is empty."""
    return (snapshot.decode_details(row).pinned_by or ("",)) if row.flags & Flag.PINNED else ()


def snapshot_of(state: State) -> snapshot.SnapshotBody:
    """Return the content of a snapshot of a state."""
    fields = snapshot.RunRow.__struct_fields__
    runs = [
        snapshot.RunRow(*(getattr(run, name) for name in fields)) for run in state.runs.values()
    ]
    return snapshot.SnapshotBody(
        state.number,
        state.digest,
        runs,
        list(state.versions.values()),
        state.condemned,
        state.policy,
        {one.name: (one.url, one.store) for one in state.replicas.values()},
    )


def state_of(body: snapshot.SnapshotBody) -> State:
    """Return the state in a snapshot, checked in itself; its rows become the state's.

    Raises
    ------
    InvalidInputError, KeyError, ValueError
        Rows name runs or versions that are not there, or names break the rules.
    """
    runs: dict[str, RunState] = {}
    for row in body.runs:
        run = RunState(*msgspec.structs.astuple(row))
        run.name = intern(names.check_run_name(run.name))
        for tag in run.tags:
            names.check_tag(tag)
        runs[run.name] = run
    versions = _placed(body.versions, runs)
    if len(versions) != len(body.versions) or len(runs) != len(body.runs):
        raise InvalidInputError("a run or a version is there twice")
    for run in runs.values():
        _check_run(run, versions)
    names.check_metadata_json(body.policy or b"{}")
    for name, (url, _) in body.replicas.items():
        names.check_replica_name(name)
        names.check_replica_url(url)
    return State(
        number=body.number,
        digest=body.digest,
        versions=versions,
        runs=runs,
        condemned=body.condemned,
        gone=frozenset(body.condemned),
        policy=body.policy,
        replicas={
            name: ReplicaInfo(name=name, url=url, store=store)
            for name, (url, store) in body.replicas.items()
        },
    )


def _placed(rows: Sequence[VersionRow], runs: Mapping[str, RunState]) -> dict[str, VersionRow]:
    """Return the rows by their ids, and note in each run which are its own."""
    ids = "".join([row.id for row in rows])
    if not _HEX.fullmatch(ids) or any(len(row.id) != _ID_CHARS for row in rows):
        raise InvalidInputError("a version's id is not 32 hex digits")
    versions: dict[str, VersionRow] = {}
    for row in rows:
        run = runs[row.run]
        # Strings are shared between rows, and a parent comes before its child.
        msgspec.structs.force_setattr(row, "run", run.name)
        if row.parent:
            msgspec.structs.force_setattr(row, "parent", versions[row.parent].id)
        versions[row.id] = row
        run.versions.append(row.id)
    return versions


def _check_run(run: RunState, versions: Mapping[str, VersionRow]) -> None:
    """Raise for a run that names versions which are not there, or not its own."""
    for version_id in (*run.tags.values(), *([run.head] if run.head else [])):
        if versions[version_id].run != run.name:
            raise InvalidInputError(f"run {run.name!r} points to a version of another")
    if run.origin and run.origin not in versions:
        raise InvalidInputError(f"run {run.name!r} was forked from a version that is not there")
    names.check_metadata_json(run.policy or b"{}")
