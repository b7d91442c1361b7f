"""The figures of a store in the text format of Prometheus, from the catalog alone.

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptstore.catalog.catalog import Catalog
from ckptstore.model import Receipt, Version

_STAGES = ("blocked", "staging", "hashing", "encoding", "writing", "committing")
_KINDS = ("logical", "new", "shared", "stored")
_Row = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """What one process knows of its own saves."""

    outcomes: Mapping[str, int]
    """How often each event occurred: ``durable``, ``failed``, ``skipped``, ``cancelled``."""
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
    parts = [*_of_store(catalog), *(_of_process(process) if process is not None else ())]
    return "".join(parts)


def _of_store(catalog: Catalog) -> Iterator[str]:
    heads: dict[str, Version] = {}
    states: dict[tuple[str, str], int] = {}
    for version in catalog.versions():
        heads[version.run] = version
        key = (version.run, version.state)
        states[key] = states.get(key, 0) + 1
    yield metric("commits", "gauge", "Commits in the log.", [({}, catalog.number)])
    rows: list[_Row] = [({"run": run, "state": one}, n) for (run, one), n in states.items()]
    yield metric("versions", "gauge", "Versions that can be loaded.", rows)
    rows = [({"run": run}, version.step) for run, version in heads.items()]
    yield metric("last_save_step", "gauge", "Step of the version that was saved last.", rows)
    rows = [({"run": run}, version.created_at.timestamp()) for run, version in heads.items()]
    yield metric("last_save_timestamp_seconds", "gauge", "When it was committed.", rows)
    receipts = {run: Receipt.of(one.receipt, one.state) for run, one in heads.items()}
    rows = [
        ({"run": run, "stage": stage}, getattr(receipt, f"{stage}_s"))
        for run, receipt in receipts.items()
        for stage in _STAGES
    ]
    yield metric("last_save_seconds", "gauge", "What it took, by stage.", rows)
    rows = [
        ({"run": run, "kind": kind}, getattr(receipt, f"{kind}_bytes"))
        for run, receipt in receipts.items()
        for kind in _KINDS
    ]
    yield metric("last_save_bytes", "gauge", "Its bytes: in memory, new, shared, stored.", rows)


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
