"""Skeletons made from skeletons: the same leaves at other paths. Pure; inputs are validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptstore.errors import InvalidInputError
from ckptstore.format.paths import Key, Path, path_text
from ckptstore.format.renames import Renames
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, decode_key, pairs

_INT64_MAX = (1 << 63) - 1


def rename(node: Node, renames: Renames) -> Node:
    """Return the skeleton with what lies in its dicts moved to where `renames` says.

    Lists, tuples and objects move whole. A dict keeps its kind wherever it goes; where new ones
    are needed they are plain. Dicts that come to lie in one place become one.

    Raises
    ------
    InvalidInputError
        Two things would lie in one place, or one inside of another; or a key is not valid.
    TensorNotFoundError
        A prefix leads nowhere.
    """
    items: list[_Item] = []
    _explode(node, (), items)
    root = _Map()
    kinds: dict[Path, list[Node]] = {}
    for item in items:
        if item.kind is not None:
            target = renames.path(item.path, container=True, counts=False)
            if target == item.path:  # who stays where they are come first
                kinds[target] = item.kind
            else:
                kinds.setdefault(target, item.kind)
    for item in items:
        if item.kind is not None and not item.empty:
            continue
        inside = isinstance(item.node, list) and item.node[0] in SEQUENCES
        target = renames.path(item.path, container=inside or item.kind is not None)
        if not target and item.kind is None:
            if not item.path:
                return node  # the state is one leaf or list, and stays one
            msg = f"nothing would be left of the path {path_text(item.path)!r}"
            raise InvalidInputError(msg)
        _put(root, target, item)
    renames.check_all_used()
    return _built(root, (), kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A dict (its kind alone), or anything else with all that is in it."""

    path: Path
    node: Node
    kind: list[Node] | None = None
    """How the node of a dict begins, before its keys."""
    empty: bool = False


@dataclass(slots=True)
class _Map:
    """A dict in the making."""

    entries: dict[Key, _Map | _Item] = field(default_factory=dict)


def _explode(node: Node, path: Path, items: list[_Item]) -> None:
    tag = str(node[0]) if isinstance(node, list) else ""
    if not isinstance(node, list) or tag not in MAPS:
        items.append(_Item(path=path, node=node))
        return
    start = MAPS[tag]
    items.append(_Item(path=path, node=None, kind=node[:start], empty=len(node) == start))
    for key, value in pairs(node):
        _explode(value, (*path, decode_key(key)), items)


def _put(root: _Map, target: Path, item: _Item) -> None:
    place = root
    depth = target if item.kind is not None else target[:-1]
    for key in depth:
        below = place.entries.setdefault(key, _Map())
        if not isinstance(below, _Map):
            raise _collision(target, item, below)
        place = below
    if item.kind is None:
        there = place.entries.setdefault(target[-1], item)
        if there is not item:
            raise _collision(target, item, there)


def _collision(target: Path, item: _Item, there: _Map | _Item) -> InvalidInputError:
    while isinstance(there, _Map):  # name something that is in it
        there = next(iter(there.entries.values()), item)
    both = sorted(path_text(each.path) for each in (item, there))
    return InvalidInputError(
        f"{both[0]!r} and {both[1]!r} would get into each other's way at {path_text(target)!r}",
        hint="leave one of them out (exclude), or rename it too",
    )


def _built(part: _Map | _Item, path: Path, kinds: Mapping[Path, list[Node]]) -> Node:
    if isinstance(part, _Item):
        return part.node
    body: list[Node] = []
    for key, below in part.entries.items():
        body += [encode_key(key), _built(below, (*path, key), kinds)]
    return [*kinds.get(path, ["d"]), *body]


def encode_key(key: Key) -> Node:
    """Return the node that stands for a dict key.

    Raises
    ------
    InvalidInputError
        It is not a key that a skeleton can hold.
    """
    if key is None or isinstance(key, bool | float | bytes):
        return key
    if isinstance(key, int):
        return key if -_INT64_MAX - 1 <= key <= _INT64_MAX else ["i", str(key)]
    if isinstance(key, tuple):
        return ["t", *(encode_key(part) for part in key)]
    if isinstance(key, str):
        try:
            key.encode()
        except UnicodeEncodeError:
            return ["u", key.encode("utf-8", "surrogatepass")]
        return key
    raise InvalidInputError(f"{key!r} cannot be a key of a state")
