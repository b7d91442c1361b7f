"""A part of a manifest as a manifest of its own: some leaves, their tensors, their pieces.

No tensor is read: what stays keeps its chunks where they lie. A tensor that stays and follows from
others (:mod:`ckptstore.format.tables`) brings these along: of bfloat16 weights that follow from
float32 ones of the optimizer, the float32 ones stay too, hidden. That may be more than the weights
themselves would take; whoever wants these alone must write them. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ckptstore.checkpoint.content import read_content
from ckptstore.format import skeleton
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node

_INDEXED = frozenset({"T", "V", "N", "B"})


def part_of(
    manifest: Manifest, node: Node, *, roles: Mapping[int, str] | None = None, version: str = ""
) -> Manifest:
    """Return the manifest of what a pruned skeleton still names.

    Parameters
    ----------
    node
        The skeleton of `manifest`, or a part of it as :func:`ckptstore.format.skeleton.prune`
        returns it; indices are those of `manifest`.
    roles
        Roles of tensors that change, by their index in `manifest`.
    version
        The version that it is to describe, if that is another one.
    """
    named = sorted({leaf.index for leaf in skeleton.iter_leaves(node)})
    changed = {index: manifest.tensors[index].role for index in named}
    changed.update((index, role) for index, role in (roles or {}).items() if index in changed)
    for index in named:  # what is hidden has the role of what follows from it
        recipe = manifest.tensors[index].recipe
        for source in recipe.sources if recipe else ():
            changed.setdefault(source, changed[index])
    kept = [*named, *sorted(changed.keys() - set(named))]
    places = {index: place for place, index in enumerate(kept)}
    records = tuple(_moved(manifest.tensors[n], changed[n], places) for n in kept)
    first = [0]
    for index in kept:
        first.append(first[-1] + manifest.first[index + 1] - manifest.first[index])
    rows = [np.arange(manifest.first[i], manifest.first[i + 1], dtype=np.int64) for i in kept]
    part = Manifest(
        version=version or manifest.version,
        chunk_bytes=manifest.chunk_bytes,
        skeleton=skeleton.encode(renumbered(node, places)),
        tensors=records,
        first=tuple(first),
        pieces=manifest.pieces.take(np.concatenate([np.zeros(0, np.int64), *rows])),
    )
    read_content(part)  # a part that would not load is never written
    return part


def _moved(record: TensorRecord, role: str, places: Mapping[int, int]) -> TensorRecord:
    """Return a record of another role, over sources at other places."""
    recipe = record.recipe.moved(places) if record.recipe else None
    return replace(record, role=role, recipe=recipe)


def renumbered(node: Node, places: Mapping[int, int]) -> Node:
    """Return a validated skeleton whose tensors have other indices."""
    if not isinstance(node, list):
        return node
    tag = str(node[0])
    if tag in _INDEXED:
        return [tag, places[int(node[1])], *node[2:]]  # type: ignore[arg-type]  # validated: an int
    if tag in MAPS:
        start = MAPS[tag]
        head = [renumbered(item, places) if tag == "o" else item for item in node[1:start]]
        tail = [
            renumbered(item, places) if (at - start) % 2 else item
            for at, item in enumerate(node[start:], start)
        ]
        return [tag, *head, *tail]
    if tag in SEQUENCES:
        start = SEQUENCES[tag]
        return [*node[:start], *(renumbered(item, places) for item in node[start:])]
    at = {"x": (2,), "Q": (1, 5), "G": (2,)}.get(tag, ())
    return [renumbered(item, places) if place in at else item for place, item in enumerate(node)]
