"""Paths of leaves: their text, patterns over them, and finding one leaf.

A path is the tuple of dict keys and sequence positions that lead to a leaf. Its text joins them
with dots: ``("optimizer", "state", 0, "exp_avg")`` is ``optimizer.state.0.exp_avg``. The text is
for people and patterns. Keys that hold dots, or a key ``0`` beside a key ``"0"``, can give two
leaves one text; a lookup by that text is refused and lists the tuples, one by tuple always works.

A pattern is text or a tuple. Text is matched as in a shell, case-sensitively: ``*`` any characters
(dots too), ``?`` one, ``[ab]`` a choice. A pattern also takes everything below what it names:
``model`` is ``model`` and ``model.*``. A tuple takes the leaf of that path and everything below it.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.suggestions import listed

Key: TypeAlias = "str | int | float | bool | bytes | tuple[Key, ...] | None"
Path: TypeAlias = "tuple[Key, ...]"
Pattern: TypeAlias = "str | tuple[Key, ...]"

_SEEN_MAX = 10_000
"""Names kept to say what a pattern may have meant. Source: close matches take 0.1 s among them."""


def path_text(path: Path) -> str:
    """Return the dotted text of a path; the root's is empty."""
    return ".".join([key if type(key) is str else _key_text(key) for key in path])


def _key_text(key: Key) -> str:
    return repr(key) if isinstance(key, bytes | tuple) else str(key)


def _matcher(pattern: Pattern) -> Callable[[Path, str], bool]:
    if isinstance(pattern, tuple):
        size = len(pattern)
        return lambda path, text: path[:size] == pattern
    if not isinstance(pattern, str):
        raise InvalidInputError(
            f"a pattern must be a string or a tuple of keys, not {type(pattern).__name__}"
        )
    below = pattern + "."
    if {*"*?["}.isdisjoint(pattern):
        return lambda path, text: text == pattern or text.startswith(below)
    shell = fnmatch.translate(pattern)
    found = re.compile(f"{shell}|{fnmatch.translate(pattern + '.*')}").match
    return lambda path, text: text == pattern or text.startswith(below) or found(text) is not None


class PathFilter:
    """Decides which leaves are wanted; counts what each pattern took.

    Parameters
    ----------
    include
        A leaf must match one of these; None lets every leaf pass.
    exclude
        A leaf that matches one of these is dropped, whatever `include` says.

    Raises
    ------
    InvalidInputError
        A pattern is neither a string nor a tuple, or a single string was given for a list.
    """

    def __init__(
        self, include: Sequence[Pattern] | None = None, exclude: Sequence[Pattern] | None = None
    ) -> None:
        for name, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                msg = f"{name} must be a list of patterns, not the string {patterns!r}"
                raise InvalidInputError(msg, hint=f"write {name}=[{patterns!r}]")
        self._include = None if include is None else [(p, _matcher(p)) for p in include]
        self._exclude = [_matcher(p) for p in exclude or ()]
        self.unused: set[Pattern] = {p for p, _ in self._include or ()}
        """Patterns of `include` that have taken nothing so far."""
        self._top: dict[str, None] = {}
        self._seen: dict[str, None] = {}

    def __call__(self, path: Path) -> bool:
        """Return whether the leaf at `path` is wanted."""
        text = path_text(path)
        if self._include is not None:
            if self.unused:
                self._remember(path)
            hits = [pattern for pattern, matches in self._include if matches(path, text)]
            if not hits:
                return False
            self.unused.difference_update(hits)
        return not any(matches(path, text) for matches in self._exclude)

    def keys_below(self, path: Path) -> tuple[set[str], tuple[str, ...]] | None:
        """Return the keys below `path` on the way to what is wanted, and how further ones start.

        None: any key may be.
        """
        start = path_text(path) + "." if path else ""
        keys: set[str] = set()
        starts = []
        for pattern in [pattern for pattern, _ in self._include or ()] or ["*"]:
            if not isinstance(pattern, str) or not {*"*?["}.isdisjoint(pattern):
                return None
            if start.startswith(pattern + "."):
                return None
            if pattern.startswith(start):
                below = pattern[len(start) :]
                keys.update(below[:at] for at, letter in enumerate(below) if letter == ".")
                keys.add(below)
                starts.append(below + ".")
        return keys, tuple(starts)

    def check_all_used(self) -> None:
        """Raise if a pattern of `include` has matched no leaf so far: it is likely misspelled.

        Raises
        ------
        TensorNotFoundError
            Names the patterns.
        """
        if self.unused:
            names = ", ".join(sorted(map(repr, self.unused)))
            raise TensorNotFoundError(f"nothing in the state matches {names}", hint=self._hint())

    def _remember(self, path: Path) -> None:
        """Keep what a pattern could have named: the path and everything that it lies below."""
        if len(self._seen) < _SEEN_MAX:
            self._top.setdefault(path_text(path[:1]))
            for end in range(1, len(path) + 1):
                self._seen.setdefault(path_text(path[:end]))

    def _hint(self) -> str:
        """Return what unused patterns may have meant, or what there is."""
        near: dict[str, None] = {}
        for pattern in sorted(self.unused, key=repr):
            text = (
                pattern.rstrip("*").rstrip(".") if isinstance(pattern, str) else path_text(pattern)
            )
            near.update(dict.fromkeys(difflib.get_close_matches(text, self._seen, n=2)))
        if near:
            return "did you mean " + " or ".join(map(repr, list(near)[:3])) + "?"
        top = [name for name in self._top if name]
        return "there is " + listed(list(map(repr, top)), most=5) if top else ""


def find_path(paths: Sequence[Path], key: Pattern) -> Path:
    """Return the one path that `key`, a dotted text or a tuple, names.

    Raises
    ------
    TensorNotFoundError
        No path is named so; similar ones are listed.
    InvalidInputError
        Several paths have this text; their tuples are listed.
    """
    if isinstance(key, tuple):
        found = [path for path in paths if path == key]
    else:
        found = [path for path in paths if path_text(path) == key]
    if len(found) == 1:
        return found[0]
    if found:
        msg = f"{key!r} names {len(found)} leaves"
        raise InvalidInputError(msg, hint=f"use one of the tuples {found!r}")
    text = path_text(key) if isinstance(key, tuple) else key
    near = difflib.get_close_matches(text, [path_text(path) for path in paths[:10_000]], n=3)
    hint = "did you mean " + " or ".join(map(repr, near)) + "?" if near else ""
    raise TensorNotFoundError(f"there is no tensor at {key!r}", hint=hint)
