"""Which tensors of a save are those of the version before: what deltas are taken between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.format import skeleton
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.format.paths import Path, path_text
from ckptstore.model import Version
from ckptstore.objects.deltas import Older
from ckptstore.repo import Repo

__all__ = ["ancestors", "older_of"]

# Versions before the parent whose manifests are read to learn what the deltas to a keyframe took.
# Source: cycles of a GPT have up to 9 versions (docs/design/0012-deltas.md); of a longer one, a
# part tells too, and a new process asks once.
_ANCESTORS_MAX = 8

_DIGITS = re.compile(r"\d+")

_NO_TABLE = PieceTable(
    ids=np.zeros((0, 32), np.uint8),
    raw=np.zeros(0, np.uint32),
    pack=np.zeros(0, np.uint32),
    offset=np.zeros(0, np.uint64),
    stored=np.zeros(0, np.uint32),
    inner=np.zeros(0, np.uint32),
    slab=np.zeros(0, np.uint32),
    packs=(),
)


def older_of(
    records: Sequence[TensorRecord], frame: bytes, parent: Manifest | None, *, chunk_bytes: int
) -> Older:
    """Return where the tensors of a save have their places in the version before.

    A tensor has one if that version has a tensor of the same path, dtype, shape and order, cut on
    the same grid. Tensors that no path names, but the recipe of one, count by that one's path.

    Parameters
    ----------
    records, frame
        What is saved: its tensors, and the encoded skeleton.
    parent
        The version before; None if there is none.
    """
    names = _names(records, frame)
    kinds = tuple(map(_kind, names, records))
    if parent is None or parent.chunk_bytes != chunk_bytes:
        none = (None,) * len(records)
        return Older(table=_NO_TABLE, rows=none, counts=(0,) * len(records), kinds=kinds)
    old_names = _names(parent.tensors, parent.skeleton)
    there = {name: index for index, name in enumerate(old_names) if name}
    rows: list[int | None] = []
    counts: list[int] = []
    for record, name in zip(records, names, strict=True):
        index = None if name is None else there.get(name)
        same = index is not None and _is_same(record, parent.tensors[index])
        rows.append(parent.first[index] if same and index is not None else None)
        counts.append(parent.first[index + 1] - parent.first[index] if index is not None else 0)
    return Older(table=parent.pieces, rows=tuple(rows), counts=tuple(counts), kinds=kinds)


_Name = tuple[Path, int]
"""The first path of a tensor and -1; of a source of its recipe the place of that among them."""


def _names(records: Sequence[TensorRecord], frame: bytes) -> list[_Name | None]:
    found: list[_Name | None] = [None] * len(records)
    for leaf in skeleton.iter_leaves(skeleton.decode(frame)):
        if found[leaf.index] is None:
            found[leaf.index] = (leaf.path, -1)
    for record, name in zip(records, list(found), strict=True):
        for place, source in enumerate(record.recipe.sources if record.recipe and name else ()):
            if found[source] is None and name is not None:
                found[source] = (name[0], place)
    return found


def _text(name: _Name | None) -> str:
    return "" if name is None else f"{path_text(name[0])} {name[1]}"


def _kind(name: _Name | None, record: TensorRecord) -> str:
    """Return what tensors have in common that change alike: a path but for numbers, and a shape.

    An optimizer keeps its states under numbers alone: there it is the shape that tells the moments
    of an embedding from those of other weights.
    """
    return f"{_DIGITS.sub('#', _text(name))} {list(record.shape)}"


def _is_same(one: TensorRecord, two: TensorRecord) -> bool:
    plain = one.blocks is None and two.blocks is None and one.recipe is None and two.recipe is None
    return plain and one.identity == two.identity


def ancestors(repo: Repo, catalog: Catalog, version: Version) -> Iterator[PieceTable]:
    """Yield the tables of a version and of those before it, newest first, as far as can be read."""
    for _ in range(1 + _ANCESTORS_MAX):
        if version.level == "record":
            return
        try:
            yield repo.manifests.load(version).pieces
        except (IntegrityError, FormatError):
            return
        if not version.parent or not catalog.has_version(version.parent):
            return
        version = catalog.version(version.parent)
        if version.deleted:
            return
