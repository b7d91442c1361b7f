"""Renaming by prefix and by pattern: where a leaf of one state goes in another.

A renaming maps prefixes to replacements. A leaf moves if a prefix is its path, or leads to it; the
longest such prefix counts, and it is applied once, so that two names can be swapped. The empty
prefix leads to every leaf; an empty replacement takes the prefix away.

Text is compared with the dotted text of paths, up to a dot or the end. The keys of the result:

- what both the prefix and its replacement begin with stays as it is;
- a prefix that leads to a dict or list gives a path of dicts: with ``{"model": "net.inner"}`` what
  was in ``model`` is in the dict ``inner`` of ``net``;
- a prefix that is a leaf, or ends inside of a key (``model.backbone``, where ``model`` is a state
  dict with keys such as ``backbone.0.weight``), renames inside of that key.

Tuples of keys say it exactly: ``{("model",): ("net", "inner")}``.

Text with ``*`` is a pattern: ``{"*._orig_mod.*": "*.*"}``. Each ``*`` of the replacement stands for
what the ``*`` at its place took: any text, dots included, as short as it can be. A first ``*.``
also takes nothing. Patterns apply after the prefixes, in their order; what is below a pattern moves
along; one that makes a name shorter applies as often as it fits.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.format.paths import Key, Path, Pattern, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, decode_key, pairs, text_node

_INT64_MAX = (1 << 63) - 1
_BESIDE_NONE = re.compile(r"\*\.|\.?\*")
"""The ``*`` that takes nothing, and the dot that goes with it."""


class Renames:
    """Applies a renaming; counts which prefixes led anywhere.

    Parameters
    ----------
    mapping
        Prefix to replacement: both texts, or both tuples of keys.

    Raises
    ------
    InvalidInputError
        A prefix or a replacement is of another type.
    """

    def __init__(self, mapping: Mapping[Pattern, Pattern]) -> None:
        if not isinstance(mapping, Mapping):
            raise InvalidInputError(
                f"rename must map prefixes to replacements, not be a {type(mapping).__name__}",
                hint="write rename={'model.backbone': 'model.encoder'}",
            )
        for old, new in mapping.items():
            texts = isinstance(old, str) and isinstance(new, str)
            if not texts and not (isinstance(old, tuple) and isinstance(new, tuple)):
                msg = f"a renaming has two texts or two tuples of keys, not {old!r} and {new!r}"
                raise InvalidInputError(msg)
            if texts and old.count("*") not in (0, new.count("*")):
                msg = f"{old!r} and {new!r} have different numbers of *"
                raise InvalidInputError(msg, hint="write rename={'*._orig_mod.*': '*.*'}")
        self._patterns = [
            (old, _regex(old), new)
            for old, new in mapping.items()
            if isinstance(old, str) and isinstance(new, str) and "*" in old
        ]
        patterns = {old for old, _, _ in self._patterns}
        # The longest first: it is the most specific.
        order = sorted(mapping.keys() - patterns, key=lambda old: -len(_text(old)))
        self._mapping = {old: mapping[old] for old in order}
        self._unused = {old for old, new in mapping.items() if old != new}

    def path(self, path: Path, *, container: bool = False, counts: bool = True) -> Path:
        """Return where what lies at `path` goes.

        Parameters
        ----------
        container
            It is a dict, list or tuple: it has no name of its own that ends in it.
        counts
            Whether this makes a prefix used.

        Raises
        ------
        InvalidInputError
            Nothing would be left of the path of a leaf.
        """
        moved = self._path(path, container=container, counts=counts)
        text = path_text(moved)
        new = self._by_patterns(text, counts=counts)
        if not (new and moved) and not container:
            raise InvalidInputError(f"nothing would be left of the path {path_text(path)!r}")
        return moved if new == text else _by_text(moved, text, new, container=container)

    def _path(self, path: Path, *, container: bool, counts: bool) -> Path:
        text = path_text(path)
        for old, new in self._mapping.items():
            if isinstance(old, tuple) and isinstance(new, tuple):
                if path[: len(old)] != old:
                    continue
                found = new + path[len(old) :]
            elif isinstance(old, str) and isinstance(new, str) and _leads(old, text):
                found = _by_text(path, old, new, container=container)
            else:
                continue
            if counts:
                self._unused.discard(old)
            return found
        return path

    def text(self, path: Path) -> str:
        """Return the dotted text of where the leaf at `path` goes."""
        text = path_text(path)
        for old, new in self._mapping.items():
            prefix = _text(old)
            if (not isinstance(old, tuple) or path[: len(old)] == old) and _leads(prefix, text):
                self._unused.discard(old)
                rest = text[len(prefix) :].removeprefix(".")
                text = ".".join(part for part in (_text(new), rest) if part)
                break
        return self._by_patterns(text)

    def _by_patterns(self, text: str, *, counts: bool = True) -> str:
        for old, regex, new in self._patterns:
            while found := regex.fullmatch(text):
                if counts:
                    self._unused.discard(old)
                before, parts, pieces = text, found.groups(""), new
                if not parts[0]:
                    parts, pieces = parts[1:], _BESIDE_NONE.sub("", new, count=1)
                first, *rest = pieces.split("*")
                text = first + "".join(map(operator.add, parts, [*rest, ""]))
                if not found[1]:
                    text = text.removeprefix(".")
                if len(text) >= len(before):
                    break
        return text

    def check_all_used(self) -> None:
        """Raise if a prefix has led to no leaf so far: it is likely misspelled.

        Raises
        ------
        TensorNotFoundError
            Names the prefixes.
        """
        if self._unused:
            names = ", ".join(sorted(map(repr, self._unused)))
            msg = f"there is nothing to rename at {names}"
            hint = "a renaming names dict keys, or whole parts of them between dots"
            raise TensorNotFoundError(msg, hint=hint)


def _regex(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern: a group for each ``*``, and one for what is below it."""
    text = "(.+?)".join(map(re.escape, pattern.split("*")))
    text = re.sub(r"^\(\.\+\?\)\\\.", r"(?:(.+?)\\.)?", text)
    return re.compile(
        text.removesuffix("(.+?)") + ("(.+)" if pattern.endswith("*") else r"(\..*)?"), re.DOTALL
    )


def _text(prefix: Pattern) -> str:
    return prefix if isinstance(prefix, str) else path_text(prefix)


def _leads(prefix: str, text: str) -> bool:
    return not prefix or text == prefix or text.startswith(prefix + ".")


def _by_text(path: Path, old: str, new: str, *, container: bool) -> Path:
    keys = [path_text((key,)) for key in path]
    at = 0
    while old and new and _leads(keys[at], old) and _leads(keys[at], new):
        if old == keys[at] and at + 1 == len(keys) and not container:
            break  # the leaf's own key
        old, new = _after(keys[at], old), _after(keys[at], new)
        at += 1
    end, rest, tail = at, old, ""
    while rest:  # up to the key in which the prefix ends
        if _leads(keys[end], rest):
            rest = _after(keys[end], rest)
        else:
            rest, tail = "", keys[end][len(rest) + 1 :]
        end += 1
    parts = new.split(".") if new else []
    found: list[Key] = list(parts)
    if tail or (end == len(path) and end > at and not container):
        found = list(_divided(parts, keys[at : end - 1], tail))
    if len(found) == end - at:
        found = [_like(key, text) for key, text in zip(path[at:end], found, strict=True)]
    return (*path[:at], *found, *path[end:])


def _after(key: str, text: str) -> str:
    return text[len(key) + 1 :]


def _divided(parts: list[str], before: list[str], tail: str) -> list[str]:
    """Divide `parts` as the keys `before` were; what is left goes before `tail`, in one key."""
    found = []
    for key in before:
        count = key.count(".") + 1
        if len(parts) <= count:
            break
        found.append(".".join(parts[:count]))
        parts = parts[count:]
    last = ".".join([*parts, tail] if tail else parts)
    return [*found, last] if last else found


def _like(key: Key, text: Key) -> Key:
    """Return `text` as a number where it stands for a number."""
    number = type(key) is int and isinstance(text, str) and text.isdecimal() and text.isascii()
    return int(str(text)) if number else text


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
            raise InvalidInputError(f"nothing would be left of the path {path_text(item.path)!r}")
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
    msg = f"{both[0]!r} and {both[1]!r} would get into each other's way at {path_text(target)!r}"
    return InvalidInputError(msg, hint="leave one of them out (exclude), or rename it too")


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
        return text_node(key)
    raise InvalidInputError(f"{key!r} cannot be a key of a state")
