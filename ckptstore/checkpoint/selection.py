"""Selections of a version, as manifests of their own: some leaves, their tensors, their pieces.

No tensor is read: those that stay keep their chunks where they lie. A tensor that stays and follows
from others (:mod:`ckptstore.format.tables`) brings these along: of bfloat16 weights that follow
from float32 ones of the optimizer, the float32 ones stay too, hidden. That may be more than the
weights themselves would take; to keep these alone, write them. Needs no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ckptstore.checkpoint.content import Content, logical_bytes, read_content
from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.format import skeleton
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.paths import Path, PathFilter, Pattern
from ckptstore.format.renames import Renames, rename
from ckptstore.format.roles import ROLES, Judgement, RoleRules
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, prune
from ckptstore.model import RoleBytes

BESIDE: Final = "pretrained"
"""Key of the state for configuration and tokenizer of its weights, which come along with these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a version that is wanted; all of it by default."""

    include: Sequence[Pattern] | None = None
    """Patterns; a leaf must match one."""
    exclude: Sequence[Pattern] | None = None
    """Patterns; it must match none."""
    roles: Sequence[str] | None = None
    """It must have one of these roles; values that are no tensors have one by convention."""
    rename: Mapping[Pattern, Pattern] | None = None
    """Prefix to replacement; see :mod:`ckptstore.format.renames`."""

    @property
    def is_everything(self) -> bool:
        """Whether all of a version is taken, as it is."""
        return self.include is None and not self.exclude and self.roles is None and not self.rename


def select(
    manifest: Manifest,
    selection: Selection,
    *,
    version: str,
    fixed: Mapping[Pattern, str] | None = None,
) -> Manifest:
    """Return the manifest of `version`, which holds a selection of another and shares its chunks.

    Parameters
    ----------
    fixed
        Roles that are fixed for the run of the other one.

    Raises
    ------
    TensorNotFoundError
        A pattern or a prefix matches nothing, or nothing is left.
    InvalidInputError
        A role is none; or two leaves would come to lie in one place.
    LimitError, CorruptObjectError
        A name is too long, or nested too deep.
    """
    if selection.is_everything:
        return replace(manifest, version=version)
    content = read_content(manifest)
    node = content.node
    wanted = PathFilter(selection.include, selection.exclude)
    judged = content.judged(fixed)
    has_role = _role_filter(content, selection.roles, judged)
    along = _comes_along(content, judged, wanted, has_role, PathFilter(None, selection.exclude))
    node = prune(node, lambda path: (wanted(path) and has_role(path)) or along(path))
    wanted.check_all_used()
    if node == ["d"] and content.node != ["d"]:
        msg = "nothing of the version is left"
        raise TensorNotFoundError(msg, hint="include more, or exclude less")
    if selection.rename:
        node = rename(node, Renames(selection.rename))
    return part_of(manifest, node, version=version)


def _comes_along(
    content: Content,
    judged: Mapping[int, Judgement],
    wanted: Callable[[Path], bool],
    has_role: Callable[[Path], bool],
    kept: Callable[[Path], bool],
) -> Callable[[Path], bool]:
    """Return which leaves are taken besides: what is at BESIDE and not excluded, with weights."""
    weights = any(
        judged[leaf.index].role == "weights" and wanted(leaf.path) and has_role(leaf.path)
        for leaf in content.leaves
        if leaf.path[:1] != (BESIDE,)
    )
    return lambda path: weights and path[:1] == (BESIDE,) and kept(path)


def _role_filter(
    content: Content, roles: Sequence[str] | None, judged: Mapping[int, Judgement]
) -> Callable[[Path], bool]:
    if roles is None:
        return lambda path: True
    if isinstance(roles, str) or not roles or not set(roles) <= set(ROLES):
        msg = f"{roles!r} is not a list of roles"
        raise InvalidInputError(msg, hint="roles are " + ", ".join(ROLES))
    rules = RoleRules(node=content.node, records=content.manifest.tensors)
    by_path = {leaf.path: judged[leaf.index].role for leaf in content.leaves}
    chosen = frozenset(roles)
    return lambda path: (by_path.get(path) or rules.of_plain(path)) in chosen


def logical_roles(manifest: Manifest) -> dict[str, RoleBytes]:
    """Return the bytes by role of a version that shares all its pieces: none of them is new."""
    return {
        role: RoleBytes(logical=size, new=0, stored=0)
        for role, size in logical_bytes(manifest).items()
    }


# --- a part of a manifest as a manifest -----------------------------------------------------------

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
    rows = [np.arange(manifest.first[i], manifest.first[i + 1], dtype=np.int64) for i in kept]
    part = Manifest(
        version=version or manifest.version,
        chunk_bytes=manifest.chunk_bytes,
        skeleton=skeleton.encode(renumbered(node, places)),
        tensors=records,
        first=tuple(itertools.accumulate(map(len, rows), initial=0)),
        pieces=manifest.pieces.take(np.concatenate([np.zeros(0, np.int64), *rows])),
        rule=manifest.rule,
    )
    read_content(part)  # a part that would not load is never written
    return part


def _moved(record: TensorRecord, role: str, places: Mapping[int, int]) -> TensorRecord:
    """Return a record of another role, over sources at other places."""
    recipe = record.recipe.moved(places) if record.recipe else None
    return record.replace(role=role, recipe=recipe)


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
