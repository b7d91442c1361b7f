"""What a repair works on: damaged versions, and which of their pieces must lie elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptstore.checkpoint.content import Content
from ckptstore.format.manifest import Manifest
from ckptstore.maintenance.check.integrity_scan import Survey
from ckptstore.maintenance.repair.repair_report import Lost
from ckptstore.model import Version


@dataclass(slots=True, kw_only=True)
class Item:
    """One version to be mended."""

    version: Version
    content: Content
    rebuilt: bool
    """Its own manifest is lost: this is what another version says that holds the same."""


def needed(survey: Survey, content: Content) -> list[int]:
    """Return the rows that must lie elsewhere."""
    table = content.manifest.pieces
    if not survey.bad and not survey.broken_packs:
        return []
    places = [place for place, pack in enumerate(table.packs) if pack in survey.broken_packs]
    rows = set(np.nonzero(np.isin(table.pack, places))[0].tolist())
    if survey.bad:
        rows.update(row for row in range(len(table)) if survey.why(table, row))
    return sorted(rows)


def is_unlike(survey: Survey, content: Content) -> bool:
    """Return whether a tensor does not follow from others as it should; nothing mends that."""
    records = content.manifest.tensors
    made = [place for place, record in enumerate(records) if record.recipe is not None]
    return any(survey.wrong(content, place) for place in made)


class RowDtype:
    """Tells the dtype of the tensor that a row belongs to, or the first delta to what is in it."""

    def __init__(self, manifest: Manifest) -> None:
        self._records = manifest.tensors
        self._first = np.asarray(manifest.first)
        self._base = manifest.pieces.base

    def __call__(self, row: int) -> str:
        """Return the dtype of one row."""
        if row >= self._first[-1] and self._base is not None:
            row = int(np.flatnonzero(self._base == row)[0])
        return self._records[int(np.searchsorted(self._first, row, "right")) - 1].dtype


def lost_of(version: Version, tensors: tuple[str, ...], why: str) -> Lost:
    """Return that tensors of a version are lost; all of them, if none is named."""
    return Lost(version=version.id, run=version.run, step=version.step, tensors=tensors, why=why)
