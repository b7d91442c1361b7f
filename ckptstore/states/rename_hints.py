"""The renaming by which the names of a version fit those of a target, for messages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

from ckptstore.format.paths import Pattern, path_text
from ckptstore.format.renames import Renames
from ckptstore.format.skeleton import Leaf

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Names that torch.compile, FSDP1, checkpoint wrappers and DDP put into the names of modules."""

_WRAPPED_MAX = 8
"""Kinds of places of wrappers in a target, of which a message names patterns."""

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
        Such as ``rename={'model': ''}``. Empty where one prefix in place of another, and patterns
        that take wrappers out of names or put them in, do not make half of the target's names fit,
        or no more than fit already.
    """
    names = sorted(targets)
    paths = [leaf.path for leaf in sources.values()]
    best, fits = "", max(len(sources.keys() & names), (len(names) - 1) // 2)
    for patterns in _wrappers(list(map(path_text, paths)), names):
        moved = [*map(Renames(patterns).text, paths)]
        for old, new in _candidates(moved, names[:: len(names) // _NAMES_MAX + 1]):
            rename: dict[Pattern, Pattern] = {old: new} if old != new else {}
            rename.update(patterns)
            count = len({*map(Renames(rename).text, paths)}.intersection(names))
            if count > fits:
                best, fits = f"{rename=}", count
    return best


def _wrappers(paths: Iterable[str], names: Iterable[str]) -> list[dict[Pattern, Pattern]]:
    """Return patterns that take wrappers of modules out of paths, or put those of names in."""
    ours, theirs = (
        {part for text in texts for part in text.split(".") if part in _WRAPPERS}
        for texts in (paths, names)
    )
    taken: dict[Pattern, Pattern] = {f"*.{part}.*": "*.*" for part in sorted(ours - theirs)}
    put: dict[Pattern, Pattern] = {}
    for name, part in itertools.product(names, sorted(theirs - ours)):
        before, found, _ = f".{name}".partition(f".{part}.")
        if found and before:
            where = ".".join("*" if one.isdecimal() else one for one in before[1:].split("."))
            put[f"{where}.*"] = f"{where}.{part}.*"
    return [
        {},
        *filter(None, ({**taken, **put}, taken, put) if len(put) < _WRAPPED_MAX else (taken,)),
    ]


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
