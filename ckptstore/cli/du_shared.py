"""``ckptstore du --shared``: what is held alone, and what with whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptstore.catalog.catalog import Catalog
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.text import bytes_text, count_text, counted, version_text
from ckptstore.events import ProgressCallback
from ckptstore.maintenance.reports.sharing import HeldBytes, SharedUsage, VersionSharing
from ckptstore.model import Version
from ckptstore.store import Store

_VERSIONS = 10
"""Versions with which one shares that the text lists."""
_HELD = (
    Column(title="HELD", right=True, wrap=False),
    Column(title="ALONE", right=True, wrap=False),
    Column(title="SHARED", right=True, wrap=False),
)


class Holding(Protocol):
    """Who holds what, to be shown."""

    @property
    def skipped(self) -> Sequence[str]:
        """Return why versions were left out."""

    def document(self, runs: Collection[str]) -> dict[str, Any]:
        """Return it, as far as it concerns some runs."""

    def draw(
        self, screen: Screen, groups: Mapping[str, Sequence[Version]], *, one_run: bool
    ) -> None:
        """Draw it: the versions of one run, or runs."""


def holding_of(store: Store, version: Version | None, progress: ProgressCallback) -> Holding:
    """Return who holds what in a store, or what one version holds and with whom.

    Raises
    ------
    CorruptObjectError
        The manifest of that version is damaged; others are left out.
    """
    if version is None:
        return _OfStore(usage=store.sharing(progress=progress))
    found = store.sharing_of(f"#{version.id}", progress=progress)
    return _OfVersion(found=found, catalog=store.repo.catalog)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfStore:
    usage: SharedUsage

    @property
    def skipped(self) -> Sequence[str]:
        """Return why versions were left out."""
        return self.usage.skipped

    def document(self, runs: Collection[str]) -> dict[str, Any]:
        """Return runs, versions, and what several runs need."""
        usage = self.usage
        return {
            "stored_bytes": usage.stored_bytes,
            "chunks_count": usage.chunks_count,
            "runs": {name: _held(part) for name, part in usage.runs.items() if name in runs},
            "versions": {version: _held(part) for version, part in usage.versions.items()}
            if len(runs) == 1
            else None,
            "shares": [
                {"runs": share.runs, "bytes": share.size_bytes}
                for share in usage.shares
                if set(share.runs) & set(runs)
            ],
            "skipped": usage.skipped,
        }

    def draw(
        self, screen: Screen, groups: Mapping[str, Sequence[Version]], *, one_run: bool
    ) -> None:
        """Draw what each holds, then what several runs need."""
        usage = self.usage
        if one_run:
            rows = [
                (str(version.step), version.id[:8], *_cells(part))
                for versions in groups.values()
                for version in reversed(versions)
                if (part := usage.versions.get(version.id))
            ]
            screen.table((Column(title="STEP", right=True), Column(title="ID"), *_HELD), rows)
        else:
            runs = [(name, *_cells(part)) for name, part in usage.runs.items()]
            screen.table((Column(title="RUN"), *_HELD), runs)
            chunks = counted(usage.chunks_count, "chunk")
            screen.line(f"in all {bytes_text(usage.stored_bytes)} in {chunks}")
        shares = [share for share in usage.shares if set(share.runs) & set(groups)]
        if shares:
            screen.line()
            cells = [(" ".join(share.runs), bytes_text(share.size_bytes)) for share in shares]
            screen.table((Column(title="SHARED BY"), Column(title="BYTES", right=True)), cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfVersion:
    found: VersionSharing
    catalog: Catalog

    @property
    def skipped(self) -> Sequence[str]:
        """Return why other versions were left out."""
        return self.found.skipped

    def document(self, runs: Collection[str]) -> dict[str, Any]:
        """Return what the version holds, and with whom."""
        found = self.found
        return {
            "version": found.version.id,
            **_held(found.bytes),
            "roles": {role: _held(part) for role, part in found.roles.items()},
            "runs": found.runs,
            "versions": found.versions,
            "skipped": found.skipped,
        }

    def draw(
        self,
        screen: Screen,
        groups: Mapping[str, Sequence[Version]],
        *,
        one_run: bool,
    ) -> None:
        """Draw it by role, then the runs and the versions that need the same."""
        found = self.found
        rows = [(role, *_cells(part)) for role, part in found.roles.items()]
        rows.append(("total", *_cells(found.bytes)))
        screen.table((Column(title="ROLE"), *_HELD), rows)
        if not found.versions:
            return
        screen.line()
        cells = [(run, bytes_text(size)) for run, size in found.runs.items()]
        screen.table((Column(title="SHARED WITH RUN"), Column(title="BYTES", right=True)), cells)
        screen.line()
        most = sorted(found.versions.items(), key=lambda item: -item[1])
        named = []
        for version_id, size in most[:_VERSIONS]:
            other = self.catalog.version(version_id)
            named.append((version_text(other), bytes_text(size)))
        columns = (Column(title="SHARED WITH VERSION"), Column(title="BYTES", right=True))
        screen.table(columns, named)
        if len(most) > _VERSIONS:
            screen.line(f"and {count_text(len(most) - _VERSIONS)} more; --json lists all")


def _held(part: HeldBytes) -> dict[str, int]:
    return {
        "held_bytes": part.held,
        "exclusive_bytes": part.exclusive,
        "shared_bytes": part.shared,
    }


def _cells(part: HeldBytes) -> tuple[str, str, str]:
    return (bytes_text(part.held), bytes_text(part.exclusive), bytes_text(part.shared))
