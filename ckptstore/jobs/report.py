"""Report of a job: one JSON document, one text for Prometheus, one exit code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ckptstore import errors
from ckptstore.maintenance.reports.prometheus_text import metric

StepName: TypeAlias = Literal[
    "scrub-source",
    "replicate",
    "scrub-target",
    "retain-target",
    "archive-target",
    "evict",
    "retain-source",
    "gc-target",
    "gc-source",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step of a job."""

    name: StepName
    ok: bool
    seconds: float
    result: Mapping[str, Any]
    """Figures of the step: the API's report of the same name in short."""
    error: str = ""
    """The error; empty for a step that did everything."""
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A late version: the target should hold it, and does not."""

    version: str
    run: str
    step: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One run of a job."""

    name: str
    source: str
    """Location, as that of the target without credentials."""
    target: str
    target_id: str
    """Id of the target store."""
    dry_run: bool
    began_at: str
    """UTC, ISO 8601."""
    covered_until: str
    """The same; versions saved before this time were old enough for the selection."""
    seconds: float
    steps: tuple[StepReport, ...]
    overdue: tuple[Overdue, ...]
    """Late versions after the steps."""

    @property
    def ok(self) -> bool:
        """True if every step did everything and no version is late."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """Code of the first step that failed; 7 if only a version is late; else 0."""
        for step in self.steps:
            if not step.ok:
                return step.exit_code or errors.CkptStoreError.exit_code
        return errors.PolicyError.exit_code if self.overdue else 0


def exposition(name: str, report: JobReport | None, *, now_s: float) -> str:
    """Return the figures of a run for a text file that Prometheus's node exporter collects.

    Parameters
    ----------
    name
        Name of the job.
    report
        None for a run that could do nothing: it has only its failure and its time.
    now_s
        Seconds since 1970.
    """
    figures: list[tuple[str, str, float]] = [
        ("ok", "Whether the last run did all it should.", report is not None and report.ok),
        ("end_timestamp_seconds", "When it ended.", now_s),
    ]
    if report is not None:
        figures += _figures(report)
    labels = {"job_name": name}
    return "".join(
        metric(f"job_{each}", "gauge", text, [(labels, value)]) for each, text, value in figures
    )


def _figures(report: JobReport) -> list[tuple[str, str, float]]:
    """Return name, text and value of each figure of a report."""
    replicated = next((step for step in report.steps if step.name == "replicate"), None)
    result: Mapping[str, Any] = {} if replicated is None else replicated.result
    late, oldest_s = len(report.overdue), max((one.age_s for one in report.overdue), default=0.0)
    return [
        ("seconds", "What it took.", report.seconds),
        ("overdue_versions", "Versions that should be in the target and are not.", late),
        ("overdue_seconds", "Age of the oldest of them.", oldest_s),
        ("replicated_versions", "Versions that the last run copied.", result.get("copied", 0)),
        ("replicated_bytes", "Bytes that travelled.", result.get("chunk_bytes", 0)),
    ]


def problem_of(result: Mapping[str, Any]) -> tuple[str, int]:
    """Return the failure that a step's figures report, with its exit code; empty and 0 for none."""
    failures, skipped = result.get("failures"), result.get("skipped")
    if failures and all(one.get("kind") == errors.ColdObjectError.kind for one in failures):
        return f"{len(failures)} versions are cold: thaw them", errors.ColdObjectError.exit_code
    if failures:
        return f"{len(failures)} versions are damaged", errors.IntegrityError.exit_code
    if skipped:
        return f"{len(skipped)} packs could not be moved", errors.PolicyError.exit_code
    return "", 0
