"""The skeleton of a state that is only known by the paths of its leaves. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Node

__all__ = ["nest"]


def nest(leaves: Sequence[tuple[Path, Node]]) -> Node:
    """Return the skeleton of a state whose leaves have these paths: dicts, and lists for ints."""
    root: dict[Any, Any] = {}
    for path, node in leaves:
        level = root
        for key, below in itertools.pairwise(path):
            level = level.setdefault((type(below) is int, key), {})
        last = (None, path[-1])
        if last in level:
            msg = f"there are two values at {path_text(path)!r}"
            raise InvalidInputError(msg)
        level[last] = [node]
    return _container(root, is_list=False)


def _container(level: Mapping[Any, Any], *, is_list: bool) -> Node:
    items: dict[Any, Node] = {}
    for (holds_list, key), below in level.items():
        if key in items:
            msg = f"{key!r} is the key of a value and of what holds others, or of two containers"
            raise InvalidInputError(msg)
        items[key] = below[0] if holds_list is None else _container(below, is_list=holds_list)
    if is_list:
        if not all(type(key) is int and 0 <= key < 1 << 24 for key in items):
            msg = f"a list has the keys {sorted(map(repr, items))[:5]}"
            raise InvalidInputError(msg)
        return ["l", *(items.get(place) for place in range(max(items) + 1))]
    flat: list[Node] = []
    for key, node in items.items():
        flat += [_key(key), node]
    return ["d", *flat]


def _key(key: object) -> Node:
    if not isinstance(key, str):
        msg = f"{key!r} is no key of a dict here"
        raise InvalidInputError(msg)
    try:
        key.encode()
    except UnicodeEncodeError:
        return ["u", key.encode("utf-8", "surrogatepass")]
    return key
