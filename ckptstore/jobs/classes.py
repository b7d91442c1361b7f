"""The step of a job that moves what is old in the target to a colder storage class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ckptstore.backends.cold import cold_storage
from ckptstore.catalog.retention_rules import parse_duration
from ckptstore.events import ProgressCallback
from ckptstore.jobs.job_file import Archive
from ckptstore.maintenance.cold.archive import ArchiveReport, archivable, archive
from ckptstore.maintenance.replicas.replication_context import read_back
from ckptstore.store import Store


def archive_target(
    target: Store,
    wanted: Archive,
    *,
    checked: bool,
    dry_run: bool,
    progress: ProgressCallback,
) -> Mapping[str, Any]:
    """Move what may get cold, and return the figures of it.

    Parameters
    ----------
    checked
        Only versions of which every byte was read back when they came.

    Raises
    ------
    CkptStoreError
        As :func:`ckptstore.maintenance.cold.archive.archive`.
    """
    backend = target.repo.backend
    if dry_run and backend.capabilities.private and cold_storage(backend) is None:
        # It stands for a target that is to be made.
        return _figures(ArchiveReport(dry_run=True, storage_class=wanted.storage_class))
    versions = archivable(
        target.repo,
        keep_hot=wanted.keep_hot,
        min_age_s=0.0 if wanted.min_age is None else float(parse_duration(wanted.min_age)),
    )
    report = archive(
        target.repo,
        [version for version in versions if read_back(version) or not checked],
        wanted.storage_class,
        dry_run=dry_run,
        progress=progress,
    )
    return _figures(report)


def _figures(report: ArchiveReport) -> dict[str, Any]:
    return {
        "class": report.storage_class,
        "versions": len(report.versions),
        "moved": report.moved.count,
        "moved_bytes": report.moved.size_bytes,
        "there": report.there.count,
        "left": len(report.left),
        "skipped": [asdict(one) for one in report.skipped],
        "cooled": list(report.cooled),
        "warnings": list(report.warnings),
    }
