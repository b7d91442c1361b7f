"""The catalog as readers see it: runs, versions, tags and metrics after some commit.

A catalog is immutable: it never changes under its reader, may be kept and shared between
threads, and is answered from memory. Listing is lazy: of 100,000 versions a page of 50 builds 50
``Version`` objects.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ckptstore import errors
from ckptstore.catalog import rows
from ckptstore.catalog.state import RunState, State
from ckptstore.format import snapshot
from ckptstore.format.snapshot import Details, Flag, VersionRow
from ckptstore.model import ReplicaInfo, RunInfo, Version
from ckptstore.suggestions import did_you_mean


class Catalog:
    """The state of a store after the commits 1 to ``number``."""

    __slots__ = ("state",)

    def __init__(self, state: State | None = None) -> None:
        self.state: State = State() if state is None else state
        """The catalog as data, for the fold."""

    @property
    def number(self) -> int:
        """The last commit folded; 0 for an empty log."""
        return self.state.number

    @property
    def digest(self) -> str:
        """Digest of that commit's body, which the next commit must name; empty before the first."""
        return self.state.digest

    @property
    def versions_count(self) -> int:
        """Number of versions of all runs, without deleted ones."""
        return sum(not row.flags & Flag.DELETED for row in self.state.versions.values())

    # --- runs ---------------------------------------------------------------------------------

    def has_run(self, name: str) -> bool:
        """Return whether there is a run of this name."""
        return name in self.state.runs

    def runs(self) -> list[RunInfo]:
        """Return all runs in the order of their creation."""
        return [rows.build_run(run, self.state.versions) for run in self.state.runs.values()]

    def run(self, name: str) -> RunInfo:
        """Return one run.

        Raises
        ------
        RunNotFoundError
            If there is none of this name; the hint names similar ones.
        """
        return rows.build_run(self._run(name), self.state.versions)

    # --- versions -----------------------------------------------------------------------------

    def version(self, version_id: str) -> Version:
        """Return the version of exactly this id.

        Raises
        ------
        VersionNotFoundError
            If there is none.
        """
        found = self.find(version_id)
        if found is None:
            raise errors.VersionNotFoundError(f"there is no version {version_id[:40]!r}")
        return found

    def versions(
        self, run: str | None = None, *, newest_first: bool = False, deleted: bool = False
    ) -> Iterator[Version]:
        """Yield the versions of a run, or of all, in the order of their commits.

        Each ``Version`` is built when it is asked for. With `deleted`, those that were deleted,
        and no others.

        Raises
        ------
        RunNotFoundError
            If there is no such run (at the call, not at the first version).
        """
        ids = self.state.versions if run is None else self._run(run).versions
        order = reversed(ids) if newest_first else iter(ids)
        tags = rows.tags_by_version(self.state.runs.values() if run is None else [self._run(run)])
        table = self.state.versions
        wanted = Flag.DELETED if deleted else 0
        return (
            rows.build_version(table[version_id], tags.get(version_id, ()))
            for version_id in order
            if table[version_id].flags & Flag.DELETED == wanted
        )

    def head(self, run: str) -> Version | None:
        """Return the version that the run's next save continues, None before the first.

        Raises
        ------
        RunNotFoundError
            If there is no such run.
        """
        head = self._run(run).head
        return self.version(head) if head else None

    def head_id(self, run: str) -> str:
        """Return the id of the run's head; empty before the first save, and for no run at all."""
        found = self.state.runs.get(run)
        return found.head if found else ""

    def by_step(self, run: str, step: int) -> Version | None:
        """Return the run's version of this step.

        The newest on the line of the run, if it was saved more than once; else the newest that a
        rollback abandoned.
        """
        found = rows.newest(row for row in self._rows(run) if row.step == step)
        return None if found is None else self._version(found)

    def by_tag(self, run: str, tag: str) -> Version | None:
        """Return the version that the run's tag points to."""
        version_id = self._run(run).tags.get(tag)
        if version_id is None or self.state.versions[version_id].flags & Flag.DELETED:
            return None
        return self.version(version_id)

    def ids(self, run: str) -> Sequence[str]:
        """Return the ids of all versions of a run, deleted ones too, in the order of their commits.

        Raises
        ------
        RunNotFoundError
            If there is no such run.
        """
        return tuple(self._run(run).versions)

    def way(self, version_id: str, ancestor: str) -> list[str] | None:
        """Return the ids from a version that is here back to another, without that one.

        None if the version does not descend from it.
        """
        table = self.state.versions
        last = table.get(ancestor)
        found: list[str] = []
        while last is not None and version_id and table[version_id].commit >= last.commit:
            if version_id == ancestor:
                return found
            found.append(version_id)
            version_id = table[version_id].parent
        return None

    def any_abandoned(self, ids: Iterable[str]) -> bool:
        """Return whether a rollback abandoned one of some versions here."""
        table = (self.state.versions.get(version_id) for version_id in ids)
        return any(row is not None and row.flags & Flag.ABANDONED for row in table)

    def holds_head(self, run: str) -> bool:
        """Return whether the head of a run was last moved by a rollback decided in this store."""
        found = self.state.runs.get(run)
        return found is not None and found.held

    def other_metrics(
        self, other: Catalog, run: str
    ) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
        """Yield id, metrics here and metrics there of versions that say different things of them.

        Of a run that both have, those that neither has deleted; as fast as bytes can be compared.
        """
        here, there = self.state.versions, other.state.versions
        for version_id in self._run(run).versions:
            row, twin = here[version_id], there.get(version_id)
            if twin is None or row.metrics == twin.metrics:
                continue
            if not (row.flags | twin.flags) & Flag.DELETED:
                yield version_id, snapshot.decode_metrics(row), snapshot.decode_metrics(twin)

    def find(self, version_id: str) -> Version | None:
        """Return the version of exactly this id; None if there is none."""
        row = self.state.versions.get(version_id)
        return None if row is None else self._version(row)

    def has_version(self, version_id: str) -> bool:
        """Return whether there is a version of exactly this id."""
        return version_id in self.state.versions

    def by_prefix(self, prefix: str) -> list[Version]:
        """Return the versions whose id begins with `prefix`, at most 10."""
        exact = self.state.versions.get(prefix)
        if exact is not None:
            return [self._version(exact)]
        found = (row for row in self.state.versions.values() if row.id.startswith(prefix))
        return [self._version(row) for row in islice(found, 10)]

    def pinned(self) -> list[Version]:
        """Return the versions that are pinned, for any store, in the order of their commits."""
        table = [row for row in self.state.versions.values() if row.flags & Flag.PINNED]
        return [self._version(row) for row in table]

    def pins(self, version_id: str) -> tuple[str, ...]:
        """Return the stores that a version here is pinned for; for this one stands nothing."""
        return rows.pins_of(self.state.versions[version_id])

    def ancestors(self, version_id: str) -> Iterator[Version]:
        """Yield a version, its parent, the parent's parent ..., across runs.

        Raises
        ------
        VersionNotFoundError
            If there is no such version.
        """
        yield self.version(version_id)
        row = self.state.versions[version_id]
        while row.parent:
            row = self.state.versions[row.parent]
            yield self._version(row)

    def steps(self, run: str) -> list[int]:
        """Return the steps that the run has versions of, ascending."""
        return sorted({row.step for row in self._rows(run) if not row.flags & Flag.DELETED})

    def metric_values(self, run: str, metric: str) -> Iterator[tuple[str, int, float]]:
        """Yield (version id, step, value) of those that have the metric, oldest first.

        Of those that can be loaded and are on the line of the run: not deleted, not abandoned,
        and more than a record.
        """
        out = Flag.DELETED | Flag.ABANDONED | Flag.RECORD_ONLY
        for row in self._rows(run):
            value = None if row.flags & out else snapshot.decode_metrics(row).get(metric)
            if value is not None:
                yield row.id, row.step, value

    def metric_names(self, run: str) -> set[str]:
        """Return the names of all metrics that versions of the run have."""
        return {name for row in self._rows(run) for name in snapshot.decode_metrics(row)}

    # --- replicas -----------------------------------------------------------------------------

    @property
    def replicas(self) -> Mapping[str, ReplicaInfo]:
        """Other stores that have a name here, by it, in the order of their naming."""
        return self.state.replicas

    # --- collection and retention -------------------------------------------------------------

    @property
    def condemned(self) -> Mapping[str, int]:
        """Objects that are to be deleted: key to the number of the commit that says so."""
        return self.state.condemned

    def gone(self, keys: Iterable[str]) -> set[str]:
        """Return those of `keys` that were condemned, deleted since or not.

        Complete for every object that this process can have looked at, not for those that another
        found earlier: see
        :attr:`ckptstore.catalog.state.State.gone`.
        """
        return {key for key in keys if key in self.state.gone}

    def contents(self, *, known: dict[bytes, Details]) -> Iterator[tuple[str, Details]]:
        """Yield id and details of each version that has more than its record.

        For those who ask again and again, for one catalog after another: a hundred times as fast
        as to build the versions. What was deleted costs a few nanoseconds each.

        Parameters
        ----------
        known
            The caller's memory of what was decoded before; is added to.
        """
        gone = Flag.DELETED | Flag.RECORD_ONLY
        for row in [row for row in self.state.versions.values() if not row.flags & gone]:
            details = known.get(row.details)
            if details is None:
                details = known[row.details] = snapshot.decode_details(row)
            yield row.id, details

    def deleted_manifests(self, *, without: Container[str] = ()) -> list[tuple[str, str]]:
        """Return id and key of the manifest of each deleted version that had content.

        Parameters
        ----------
        without
            Ids that are left out.
        """
        gone = Flag.DELETED | Flag.RECORD_ONLY
        return [
            (row.id, snapshot.decode_manifest_key(row))
            for row in self.state.versions.values()
            if row.flags & gone == Flag.DELETED and row.id not in without
        ]

    def own_policy(self, run: str) -> bytes:
        """Return the policy of a run, or the store's if `run` is empty: JSON, or empty."""
        if not run:
            return self.state.policy
        return self.state.runs[run].policy if run in self.state.runs else b""

    def policies(self, run: str) -> list[bytes]:
        """Return the policies that hold for a run, JSON: its own, then the store's; if any."""
        return [text for text in (self.own_policy(run), self.state.policy) if text]

    # --- snapshots ----------------------------------------------------------------------------

    def to_snapshot(self) -> snapshot.SnapshotBody:
        """Return the content of a snapshot of this catalog.

        Raises
        ------
        InvalidInputError
            If the log is empty: there is nothing to fold to.
        """
        if not self.number:
            raise errors.InvalidInputError("an empty log has no snapshot")
        return rows.snapshot_of(self.state)

    @classmethod
    def from_snapshot(cls, body: snapshot.SnapshotBody, *, where: str) -> Catalog:
        """Return the catalog of a snapshot, checked in itself.

        That it belongs to this log (number and digest) is for the log to check.

        Raises
        ------
        CorruptObjectError
            If rows name runs or versions that are not there, or names break the rules.
        """
        try:
            return cls(rows.state_of(body))
        except (errors.InvalidInputError, KeyError, ValueError) as error:
            raise errors.CorruptObjectError(f"{where} contradicts itself: {error}") from error

    # --- inside -------------------------------------------------------------------------------

    def _run(self, name: str) -> RunState:
        found = self.state.runs.get(name)
        if found is None:
            msg = f"there is no run {name!r}"
            raise errors.RunNotFoundError(msg, hint=did_you_mean(name, self.state.runs))
        return found

    def _rows(self, run: str) -> Iterator[VersionRow]:
        return (self.state.versions[version_id] for version_id in self._run(run).versions)

    def _version(self, row: VersionRow) -> Version:
        tags = self.state.runs[row.run].tags.items()
        return rows.build_version(row, tuple(sorted(tag for tag, to in tags if to == row.id)))
