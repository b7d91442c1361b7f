"""``ckptstore du --shared``: data that runs and versions hold alone, and data that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptstore.catalog.catalog import Catalog
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.text import bytes_text, count_text, counted, version_text
from ckptstore.events import ProgressCallback
from ckptstore.model import Version
from ckptstore.store import Store

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.sharing import HeldBytes, Share, SharedUsage, VersionSharing

_VERSIONS = 10
"""Versions with which one shares that the text lists."""
_HELD = (
    Column("HELD", right=True, wrap=False),
    Column("ALONE", right=True, wrap=False),
    Column("SHARED", right=True, wrap=False),
)
_Groups = Mapping[str, Sequence[Version]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Shared and exclusive data of a store or of a version, ready to be shown."""

    document: Mapping[str, Any]
    draw: Callable[[Screen], None]
    skipped: Sequence[str]
    """Reasons why versions were left out."""


def holding_of(
    store: Store,
    version: Version | None,
    groups: _Groups,
    *,
    one_run: bool,
    progress: ProgressCallback,
) -> Holding:
    """Return what the runs or versions in `groups` hold, or what one version holds and with whom.

    Raises
    ------
    CorruptObjectError
        The manifest of that version is damaged; others are left out.
    """
    if version is not None:
        found = store.sharing_of(f"#{version.id}", progress=progress)
        return Holding(
            document=_version_document(found),
            draw=partial(_draw_version, found=found, catalog=store.repo.catalog),
            skipped=found.skipped,
        )
    usage = store.sharing(progress=progress)
    shares = [share for share in usage.shares if set(share.runs) & set(groups)]
    return Holding(
        document=_store_document(usage, shares, groups),
        draw=partial(_draw_store, usage=usage, shares=shares, groups=groups, one_run=one_run),
        skipped=usage.skipped,
    )


def shares_document(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """Return the data that several runs need together."""
    return [{"runs": share.runs, "bytes": share.size_bytes} for share in shares]


def draw_shares(screen: Screen, shares: Sequence[Share]) -> None:
    """Draw the data that several runs need together, if there is any."""
    if shares:
        screen.line()
        screen.listing(
            shares,
            Column("SHARED BY", lambda share: " ".join(share.runs)),
            Column("BYTES", lambda share: bytes_text(share.size_bytes), right=True),
        )


def _store_document(usage: SharedUsage, shares: Sequence[Share], groups: _Groups) -> dict[str, Any]:
    versions = {version: _held(part) for version, part in usage.versions.items()}
    return {
        "stored_bytes": usage.stored_bytes,
        "chunks_count": usage.chunks_count,
        "runs": {name: _held(part) for name, part in usage.runs.items() if name in groups},
        "versions": versions if len(groups) == 1 else None,
        "shares": shares_document(shares),
        "skipped": usage.skipped,
    }


def _draw_store(
    screen: Screen, *, usage: SharedUsage, shares: Sequence[Share], groups: _Groups, one_run: bool
) -> None:
    """Draw what each run or version holds, then what several runs need."""
    if one_run:
        rows = [
            (str(version.step), version.id[:8], *_cells(part))
            for versions in groups.values()
            for version in reversed(versions)
            if (part := usage.versions.get(version.id))
        ]
        screen.table((Column("STEP", right=True), Column("ID"), *_HELD), rows)
    else:
        runs = [(name, *_cells(part)) for name, part in usage.runs.items()]
        screen.table((Column("RUN"), *_HELD), runs)
        chunks = counted(usage.chunks_count, "chunk")
        screen.line(f"in all {bytes_text(usage.stored_bytes)} in {chunks}")
    draw_shares(screen, shares)


def _version_document(found: VersionSharing) -> dict[str, Any]:
    return {
        "version": found.version.id,
        **_held(found.bytes),
        "roles": {role: _held(part) for role, part in found.roles.items()},
        "runs": found.runs,
        "versions": found.versions,
        "skipped": found.skipped,
    }


def _draw_version(screen: Screen, *, found: VersionSharing, catalog: Catalog) -> None:
    """Draw what a version holds by role, then the runs and the versions that need the same."""
    rows = [(role, *_cells(part)) for role, part in [*found.roles.items(), ("total", found.bytes)]]
    screen.table((Column("ROLE"), *_HELD), rows)
    if not found.versions:
        return
    size = Column("BYTES", lambda item: bytes_text(item[1]), right=True)
    screen.line()
    screen.listing(found.runs.items(), Column("SHARED WITH RUN", lambda item: item[0]), size)
    screen.line()
    most = sorted(found.versions.items(), key=lambda item: -item[1])
    named = Column("SHARED WITH VERSION", lambda item: version_text(catalog.version(item[0])))
    screen.listing(most[:_VERSIONS], named, size)
    if len(most) > _VERSIONS:
        screen.line(f"and {count_text(len(most) - _VERSIONS)} more; --json lists all")


def _held(part: HeldBytes) -> dict[str, int]:
    return {"held_bytes": part.held, "exclusive_bytes": part.exclusive, "shared_bytes": part.shared}


def _cells(part: HeldBytes) -> tuple[str, str, str]:
    return (bytes_text(part.held), bytes_text(part.exclusive), bytes_text(part.shared))
