"""The figures of a store in the text format of Prometheus, from the catalog alone.

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptstore.catalog.catalog import Catalog
from ckptstore.model import Receipt

_STAGES = ("blocked", "staging", "hashing", "encoding", "writing", "committing")
_KINDS = ("logical", "new", "shared", "stored")
_RECEIPT = (
    ("seconds", "s", "What it took, by stage.", "stage", _STAGES),
    ("bytes", "bytes", "Its bytes: in memory, new, shared, stored.", "kind", _KINDS),
)
"""Metrics of a receipt: name, suffix of its fields, text, label, and the values of that."""
_Row = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """Figures of the saves of one process."""

    outcomes: Mapping[str, int]
    """Number of occurrences of each event: ``durable``, ``failed``, ``skipped``, ``cancelled``."""
    in_flight: int
    """Saves in the background that are not over."""
    staging_bytes: int
    """Host memory that is held for staged states."""


def exposition(catalog: Catalog, process: ProcessFigures | None = None) -> str:
    """Return the text, which ends in a newline.

    Parameters
    ----------
    process
        Figures of this process, which no catalog has.
    """
    return "".join([*_of_store(catalog), *(() if process is None else _of_process(process))])


def _of_store(catalog: Catalog) -> Iterator[str]:
    versions = list(catalog.versions())
    heads = {version.run: version for version in versions}
    states = Counter((version.run, version.state) for version in versions)
    yield metric("commits", "gauge", "Commits in the log.", [({}, catalog.number)])
    rows: list[_Row] = [({"run": run, "state": one}, n) for (run, one), n in states.items()]
    yield metric("versions", "gauge", "Versions that can be loaded.", rows)
    rows = [({"run": run}, version.step) for run, version in heads.items()]
    yield metric("last_save_step", "gauge", "Step of the version that was saved last.", rows)
    rows = [({"run": run}, version.created_at.timestamp()) for run, version in heads.items()]
    yield metric("last_save_timestamp_seconds", "gauge", "When it was committed.", rows)
    receipts = {run: Receipt.of(one.receipt, one.state) for run, one in heads.items()}
    for name, suffix, text, label, values in _RECEIPT:
        rows = [
            ({"run": run, label: value}, getattr(receipt, f"{value}_{suffix}"))
            for run, receipt in receipts.items()
            for value in values
        ]
        yield metric(f"last_save_{name}", "gauge", text, rows)


def _of_process(process: ProcessFigures) -> Iterator[str]:
    rows: list[_Row] = [({"outcome": one}, count) for one, count in process.outcomes.items()]
    yield metric("saves_total", "counter", "Saves of this process that are over.", rows)
    yield metric("saves_in_flight", "gauge", "Saves under way.", [({}, process.in_flight)])
    rows = [({}, process.staging_bytes)]
    yield metric("staging_bytes", "gauge", "Host memory held for staged states.", rows)


def metric(name: str, kind: str, text: str, rows: Sequence[_Row]) -> str:
    """Return one metric with its values by labels; the name without the prefix ``ckptstore_``."""
    head = f"# HELP ckptstore_{name} {text}\n# TYPE ckptstore_{name} {kind}\n"
    return head + "".join(f"ckptstore_{name}{_labels(labels)} {_number(x)}\n" for labels, x in rows)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(int(value)) if float(value).is_integer() else repr(float(value))
