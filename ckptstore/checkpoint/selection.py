"""Which part of a version is taken over, and under which names; reads no tensor, needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ckptstore.checkpoint.content import Content, logical_bytes, read_content
from ckptstore.checkpoint.subset_manifest import part_of
from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.format.manifest import Manifest
from ckptstore.format.paths import Path, PathFilter, Pattern
from ckptstore.format.renames import Renames, rename
from ckptstore.format.roles import ROLES, RoleRules
from ckptstore.format.skeleton import prune
from ckptstore.model import RoleBytes

BESIDE: Final = "pretrained"
"""Key of the state for configuration and tokenizer of its weights, which come along with these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is wanted of a version; nothing given: all of it."""

    include: Sequence[Pattern] | None = None
    """Patterns of which a leaf must match one."""
    exclude: Sequence[Pattern] | None = None
    """Patterns of which it must match none."""
    roles: Sequence[str] | None = None
    """Roles of which it must have one; values that are no tensors have one by convention."""
    rename: Mapping[Pattern, Pattern] | None = None
    """Prefix to replacement; see :mod:`ckptstore.format.renames`."""

    @property
    def is_everything(self) -> bool:
        """Whether all of a version is taken, as it is."""
        return self.include is None and not self.exclude and self.roles is None and not self.rename


def select(manifest: Manifest, selection: Selection, *, version: str) -> Manifest:
    """Return the manifest of `version`, which holds a selection of another and shares its chunks.

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
    has_role = _role_filter(content, selection.roles)
    along = _comes_along(content, wanted, has_role, PathFilter(None, selection.exclude))
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
    wanted: Callable[[Path], bool],
    has_role: Callable[[Path], bool],
    kept: Callable[[Path], bool],
) -> Callable[[Path], bool]:
    """Return which leaves are taken besides: what is at BESIDE and not excluded, with weights."""
    records = content.manifest.tensors
    weights = any(
        records[leaf.index].role == "weights" and wanted(leaf.path) and has_role(leaf.path)
        for leaf in content.leaves
        if leaf.path[:1] != (BESIDE,)
    )
    return lambda path: weights and path[:1] == (BESIDE,) and kept(path)


def _role_filter(content: Content, roles: Sequence[str] | None) -> Callable[[Path], bool]:
    if roles is None:
        return lambda path: True
    if isinstance(roles, str) or not roles or not set(roles) <= set(ROLES):
        msg = f"{roles!r} is not a list of roles"
        raise InvalidInputError(msg, hint="roles are " + ", ".join(ROLES))
    records = content.manifest.tensors
    known = {leaf.path: records[leaf.index].role for leaf in content.leaves}
    by_convention = RoleRules(flat=RoleRules.is_flat(leaf.path for leaf in content.leaves))
    chosen = frozenset(roles)
    return lambda path: (known.get(path) or by_convention(path)) in chosen


def logical_roles(manifest: Manifest) -> dict[str, RoleBytes]:
    """Return the bytes by role of a version that shares all its pieces: none of them is new."""
    return {
        role: RoleBytes(logical=size, new=0, stored=0)
        for role, size in logical_bytes(manifest).items()
    }
