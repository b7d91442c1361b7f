"""The state of a catalog as the rows of a snapshot, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from sys import intern
from typing import Final

import msgspec

from ckptstore.catalog.state import RunState, State
from ckptstore.errors import InvalidInputError
from ckptstore.format.names import (
    check_metadata_json,
    check_replica_name,
    check_replica_url,
    check_run_name,
    check_tag,
)
from ckptstore.format.snapshot import RunRow, SnapshotBody, VersionRow
from ckptstore.model import ReplicaInfo

_HEX: Final = re.compile(r"[0-9a-f]*")
_ID_CHARS: Final = 32


def snapshot_of(state: State) -> SnapshotBody:
    """Return what a snapshot of a state holds."""
    return SnapshotBody(
        state.number,
        state.digest,
        [
            RunRow(
                run.name,
                run.created_at_ms,
                run.metrics,
                run.head,
                run.tags,
                run.origin,
                run.policy,
                run.held,
            )
            for run in state.runs.values()
        ],
        list(state.versions.values()),
        state.condemned,
        state.policy,
        {one.name: (one.url, one.store) for one in state.replicas.values()},
    )


def state_of(body: SnapshotBody) -> State:
    """Return the state that a snapshot holds, checked in itself; its rows become the state's.

    Raises
    ------
    InvalidInputError, KeyError, ValueError
        Rows name runs or versions that are not there, or names break the rules.
    """
    runs = {
        row.name: RunState(
            name=intern(check_run_name(row.name)),
            created_at_ms=row.created_at_ms,
            metrics=row.metrics,
            head=row.head,
            tags={check_tag(tag): version_id for tag, version_id in row.tags.items()},
            origin=row.origin,
            policy=row.policy,
            held=row.held,
        )
        for row in body.runs
    }
    versions = _placed(body.versions, runs)
    if len(versions) != len(body.versions) or len(runs) != len(body.runs):
        msg = "a run or a version is there twice"
        raise InvalidInputError(msg)
    for run in runs.values():
        _check_run(run, versions)
    check_metadata_json(body.policy or b"{}")
    return State(
        number=body.number,
        digest=body.digest,
        versions=versions,
        runs=runs,
        condemned=body.condemned,
        gone=frozenset(body.condemned),
        policy=body.policy,
        replicas={
            check_replica_name(name): ReplicaInfo(
                name=name, url=check_replica_url(url), store=store
            )
            for name, (url, store) in body.replicas.items()
        },
    )


def _placed(rows: Sequence[VersionRow], runs: Mapping[str, RunState]) -> dict[str, VersionRow]:
    """Return the rows by their ids, and note in each run which are its own."""
    ids = "".join([row.id for row in rows])
    if not _HEX.fullmatch(ids) or any(len(row.id) != _ID_CHARS for row in rows):
        msg = "a version's id is not 32 hex digits"
        raise InvalidInputError(msg)
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
            msg = f"run {run.name!r} points to a version of another"
            raise InvalidInputError(msg)
    if run.origin and run.origin not in versions:
        msg = f"run {run.name!r} was forked from a version that is not there"
        raise InvalidInputError(msg)
    check_metadata_json(run.policy or b"{}")
