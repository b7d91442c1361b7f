"""The values of a skeleton by name: a few of many are found without a look at the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckptstore.format.paths import Path, Pattern, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, decode_key, encode_key, pairs

_WILD = frozenset("*?[")
_FEW = 64
"""Values that are taken one by one; for more of them the whole skeleton is pruned."""


class NameIndex:
    """Paths of the values of a skeleton, in the order of their dotted texts."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._texts: list[str] = []
        self._paths: list[Path] = []

    def pruned(self, names: Sequence[Pattern]) -> Node:
        """Return what :func:`~ckptstore.format.skeleton.prune` leaves of the skeleton.

        None if one of `names` is a tuple or has a wildcard, or if they name nothing, or a lot.
        """
        texts = [name for name in names if isinstance(name, str) and not _WILD.intersection(name)]
        if len(texts) < len(names):
            return None
        if not self._texts:
            named = [
                (path_text(path), path) for path, _ in values_of(self._node, (), lambda _: False)
            ]
            named.sort(key=lambda one: one[0])
            self._texts, self._paths = [text for text, _ in named], [path for _, path in named]
        wanted: set[Path] = set()
        for name in texts:
            same = bisect_left(self._texts, name), bisect_right(self._texts, name)
            below = bisect_left(self._texts, name + "."), bisect_left(self._texts, name + "/")
            found = {path for low, high in (same, below) for path in self._paths[low:high][:_FEW]}
            wanted |= found
            if not found or len(wanted) >= _FEW:
                return None
        return _taken(self._node, sorted(wanted, key=repr))


def values_of(node: Node, path: Path, whole: Callable[[Path], bool]) -> Iterator[tuple[Path, Node]]:
    """Yield path and node of what is no container, of empty ones, and of `whole` ones."""
    tag = str(node[0]) if isinstance(node, list) else ""
    start = {**MAPS, **SEQUENCES}.get(tag, 0)
    if not isinstance(node, list) or not start or len(node) == start or whole(path):
        yield path, node
    elif tag in MAPS:
        for key, value in pairs(node):
            yield from values_of(value, (*path, decode_key(key)), whole)
    else:
        for at, item in enumerate(node[start:]):
            yield from values_of(item, (*path, at), whole)


def _taken(node: Node, paths: Sequence[Path]) -> Node:
    """Return the part of a skeleton at some paths below it."""
    tag = str(node[0]) if isinstance(node, list) else ""
    if not isinstance(node, list) or () in paths or tag not in {*MAPS, *SEQUENCES}:
        return node
    below: dict[Any, list[Path]] = {}
    for path in paths:
        below.setdefault(path[0], []).append(path[1:])
    if tag in SEQUENCES:
        start = SEQUENCES[tag]
        items: list[Node] = [["m"]] * (len(node) - start)
        for at, rest in below.items():
            items[at] = _taken(node[start + at], rest)
        return [*node[:start], *items]
    start = MAPS[tag]
    keys = node[start::2]
    places = {keys.index(encode_key(key)): rest for key, rest in below.items()}
    taken = [(keys[at], _taken(node[start + 2 * at + 1], places[at])) for at in sorted(places)]
    return [*node[:start], *(part for pair in taken for part in pair)]
