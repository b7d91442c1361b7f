"""The renaming by which the names of a version fit those of a target, for messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ckptstore.format.paths import path_text
from ckptstore.format.renames import Renames
from ckptstore.format.skeleton import Leaf

_CANDIDATES_MAX = 8
"""Renamings that are tried. Source: copies of one model in a state, such as averaged weights."""

_NAMES_MAX = 16
"""Names of the target that renamings are made from. Source: one name may be of a new layer."""


def fitting_rename(sources: Mapping[str, Leaf], targets: Iterable[str]) -> str:
    """Return the argument that makes most names of a target fit, as one writes it; or nothing.

    Parameters
    ----------
    sources
        Leaves of the version by the names that the current renaming gives them.
    targets
        Names of the target.

    Returns
    -------
    str
        Such as ``rename={'model': ''}``. Empty where one prefix in place of another does not make
        half of the target's names fit, or no more than fit already.
    """
    names = sorted(targets)
    paths = {path_text(leaf.path): leaf.path for leaf in sources.values()}
    best, fits = "", max(len(sources.keys() & names), (len(names) - 1) // 2)
    for old, new in _candidates(paths, names[:: len(names) // _NAMES_MAX + 1]):
        count = len({*map(Renames({old: new}).text, paths.values())}.intersection(names))
        if count > fits:
            best, fits = f"rename={{{old!r}: {new!r}}}", count
    return best


def _candidates(paths: Iterable[str], names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the prefixes to exchange where a path ends like a name, longest endings first."""
    wanted = [name.split(".") for name in names]
    found: Counter[tuple[str, str]] = Counter()
    for parts in (path.split(".") for path in paths):
        for name in wanted:
            same = 0
            while same < min(len(parts), len(name)) and parts[-1 - same] == name[-1 - same]:
                same += 1
            if same:
                old, new = parts[: len(parts) - same], name[: len(name) - same]
                found[".".join(old), ".".join(new)] += same
    return sorted(found, key=lambda pair: (-found[pair], pair))[:_CANDIDATES_MAX]
