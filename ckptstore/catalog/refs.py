"""Refs: text that names a version.

::

    ref      = run [ "@" relative ] | "#" id        id: 4 to 32 hex digits, a unique beginning
    relative = "latest"                              the head of the run; also what `run` alone is
             | "latest-valid"                        the newest of its line that is sound
             | digits                                the version of this step, the newest of several
             | "best" { bound } ":" metric           by the metric's direction in the run
             | "~" digits                            so many parents before the head
             | tag
    bound    = ( "<" | "<=" | ">" | ">=" ) digits    of the step: best<9000:val_loss

Inside a run the relative part stands alone (``run.load("best:val_loss")``), and ``#id`` is
accepted too. Names cannot hold what the grammar needs (:mod:`ckptstore.format.names`), so every
text has one reading. Parsing is pure; resolving looks at one catalog.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, NoReturn

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import best
from ckptstore.errors import InvalidInputError, InvalidRefError, VersionNotFoundError
from ckptstore.format.fields import Direction
from ckptstore.format.names import check_metric_name, check_run_name, check_tag
from ckptstore.model import Ref, Version
from ckptstore.suggestions import did_you_mean

ID_PREFIX_CHARS_MIN: Final = 4
"""Shortest beginning of an id. Source: of 100 versions two share three digits in 70% of stores."""

_TEXT_CHARS_MAX: Final = limits.RUN_NAME_CHARS_MAX + limits.METRIC_NAME_CHARS_MAX + 60
_DIGITS: Final = re.compile(r"[0-9]+\Z")
_BOUNDED: Final = re.compile(r"best[<>]")
_BOUND: Final = re.compile(r"([<>]=?)([0-9]{1,19})")
_HEX: Final = re.compile(r"[0-9a-f]*")
_FORMS: Final = "latest, a step, best:METRIC, ~N or a tag"


def parse_ref(text: object, *, run: str = "") -> Ref:
    """Parse a ref; with `run`, a relative one.

    Raises
    ------
    InvalidRefError
        If the text does not follow the grammar; the message has the position, from 1.
    """
    if not isinstance(text, str):
        step = isinstance(text, int) and not isinstance(text, bool)
        msg = f"{text!r:.60} is not a ref: it must be text"
        raise InvalidRefError(msg, hint=f"write run@{text if step else 'STEP'}")
    if not text or len(text) > _TEXT_CHARS_MAX:
        what = f"a ref has 1 to {_TEXT_CHARS_MAX} characters"
        _refuse(text[:40], 0, what, f"write {'' if run else 'run, run@'}{_FORMS}")
    if text[0] == "#":
        return _parse_id(text, run)
    if run:
        return _parse_relative(text, run, 0)
    name, at, _ = text.partition("@")
    try:
        check_run_name(name)
    except InvalidInputError as error:
        _refuse(text, 0, error.message, "write run, run@STEP, run@TAG, run@best:METRIC or #ID")
    if not at:
        return Ref(text=text, run=name, kind="latest")
    return _parse_relative(text, name, len(name) + 1)


def resolve(
    catalog: Catalog, ref: Ref, *, directions: Mapping[str, Direction] | None = None
) -> Version:
    """Return the version that `ref` names in `catalog`.

    Parameters
    ----------
    directions
        Directions of metrics that the caller knows besides those the run has declared.

    Raises
    ------
    RunNotFoundError
        If there is no such run; the hint names similar ones.
    VersionNotFoundError
        If the run has no such version; the hint names what it has.
    InvalidRefError
        If an id is not unique, or the direction of a metric is not known.
    """
    if ref.kind == "id":
        return _by_id(catalog, ref)
    if ref.kind == "valid":
        msg = f"{ref.text!r}: what is valid cannot be known from the catalog alone"
        raise InvalidRefError(msg, hint="resolve it with Store.resolve, which reads the version")
    info = catalog.run(ref.run)
    if not info.versions_count:
        _missing(ref, f"run {ref.run!r} has no version yet", "")
    if ref.kind == "step":
        found = catalog.by_step(ref.run, ref.number)
        what = f"run {ref.run!r} has no step {ref.number}"
        return found or _missing(ref, what, _nearest(catalog, ref))
    if ref.kind == "tag":
        meant = get_close_matches(ref.value, ["latest", "latest-valid"], 1, 0.8) or info.tags
        found = catalog.by_tag(ref.run, ref.value)
        what = f"run {ref.run!r} has no tag {ref.value!r}"
        return found or _missing(ref, what, did_you_mean(ref.value, meant))
    if ref.kind == "best":
        return _best(catalog, ref, {**(directions or {}), **info.metrics})
    if not info.head:
        what = f"run {ref.run!r} has no head here: only records, or what a rollback abandoned"
        _missing(ref, what, "name a step")
    return _back(catalog, ref, info.head)


def _parse_id(text: str, run: str) -> Ref:
    digits = text[1:].lower()
    end = 1 + len(_HEX.match(digits)[0])  # type: ignore[index]  # matches the empty text too
    if end < len(text):
        _refuse(text, end, f"{text[end]!r} is not a hex digit", "an id looks like #3fa9c1")
    if not ID_PREFIX_CHARS_MIN <= len(digits) <= 32:
        what = f"an id has {ID_PREFIX_CHARS_MIN} to 32 hex digits, not {len(digits)}"
        _refuse(text, 1, what, "")
    return Ref(text=text, run=run, kind="id", value=digits)


def _parse_relative(text: str, run: str, start: int) -> Ref:
    """Parse what follows the ``@``, which begins at `start` of the whole text."""
    part = text[start:]
    if not part:
        _refuse(text, start, "nothing follows the @", f"write {_FORMS}")
    if part in ("latest", "latest-valid"):
        return Ref(text=text, run=run, kind="latest" if part == "latest" else "valid")
    if part[0] == "~":
        if not _DIGITS.match(part[1:]):
            _refuse(text, start + 1, "~ wants a number of versions", "~1 is the one before")
        return Ref(text=text, run=run, kind="back", number=_number(text, start + 1))
    if _DIGITS.match(part):
        return Ref(text=text, run=run, kind="step", number=_number(text, start))
    if part.partition(":")[0] == "best" or _BOUNDED.match(part):
        return _parse_best(text, run, start)
    return _parse_tag(text, run, start)


def _parse_best(text: str, run: str, start: int) -> Ref:
    """Parse ``best``, the bounds, a colon and the metric, which begin at `start`."""
    at = start + len("best")
    step_min, step_max = 0, limits.STEP_MAX
    while text[at : at + 1] in ("<", ">"):
        bound = _BOUND.match(text, at)
        if bound is None:
            _refuse(text, at, "a bound is <, <=, > or >= and a step", "write best<9000:val_loss")
        number = int(bound[2])
        if bound[1][0] == "<":
            step_max = min(step_max, number - (bound[1] == "<"))
        else:
            step_min = max(step_min, number + (bound[1] == ">"))
        at = bound.end()
    if text[at : at + 1] != ":" and at > start + len("best"):
        _refuse(text, at, "a colon and the metric must follow", "write best<9000:val_loss")
    if step_min > step_max:
        _refuse(text, start + len("best"), "no step is within these bounds", "")
    metric = text[at + 1 :]
    try:
        check_metric_name(metric)
    except InvalidInputError as error:
        _refuse(text, min(at + 1, len(text)), error.message, "write best:val_loss")
    top = None if step_max == limits.STEP_MAX else step_max
    return Ref(text=text, run=run, kind="best", value=metric, step_min=step_min, step_max=top)


def _parse_tag(text: str, run: str, start: int) -> Ref:
    part = text[start:]
    if "@" in part:
        hint = "inside a run, leave out its name" if start == 0 else ""
        _refuse(text, text.index("@", start), "a second @" if start else "an @", hint)
    if part[0] == "#":
        _refuse(text, start, "an id stands alone", f"write {part}")
    if part[0] == "-" and part[1:].isdigit():
        _refuse(text, start, "no step is negative", f"~{part[1:]} counts back from the head")
    try:
        check_tag(part)
    except InvalidInputError as error:
        _refuse(text, start, error.message, f"after the @ write {_FORMS}")
    return Ref(text=text, run=run, kind="tag", value=part)


def _number(text: str, start: int) -> int:
    digits = text[start:]
    if len(digits) > 19 or int(digits) > limits.STEP_MAX:
        _refuse(text, start, f"the number is above {limits.STEP_MAX}", "")
    return int(digits)


def _refuse(text: str, position: int, what: str, hint: str) -> NoReturn:
    raise InvalidRefError(f"{text!r} is not a ref: at character {position + 1}: {what}", hint=hint)


def _missing(ref: Ref, what: str, hint: str) -> NoReturn:
    raise VersionNotFoundError(f"{ref.text!r} names no version: {what}", hint=hint)


def _by_id(catalog: Catalog, ref: Ref) -> Version:
    found = catalog.by_prefix(ref.value)
    if not found:
        _missing(ref, "no id begins so", "")
    if len(found) == 1 and found[0].deleted:
        _missing(ref, "it was deleted", f"ckptstore undelete {found[0].id[:12]}")
    if len(found) > 1:
        msg = f"{ref.text!r} is not unique: {len(found)} or more versions begin so"
        raise InvalidRefError(msg, hint="such as " + ", ".join(f"#{v.id[:16]}" for v in found[:3]))
    if ref.run and found[0].run != ref.run:
        _missing(ref, f"it is of run {found[0].run!r}, not {ref.run!r}", "ask the store for it")
    return found[0]


def _best(catalog: Catalog, ref: Ref, directions: Mapping[str, Direction]) -> Version:
    every = list(catalog.metric_values(ref.run, ref.value))
    high = limits.STEP_MAX if ref.step_max is None else ref.step_max
    values = [each for each in every if ref.step_min <= each[1] <= high]
    if every and not values:
        steps = sorted(step for _, step, _ in every)
        hint = f"those with {ref.value!r} have steps {steps[0]} to {steps[-1]}"
        _missing(ref, "no version is within the bounds", hint)
    if not values:
        names = sorted(catalog.metric_names(ref.run))
        what = f"no version of run {ref.run!r} has the metric {ref.value!r}"
        _missing(ref, what, did_you_mean(ref.value, names))
    direction = directions.get(ref.value)
    if direction is None:
        msg = f"{ref.text!r}: it is not known whether {ref.value!r} is better low or high"
        fix = f"store.run({ref.run!r}, metrics={{{ref.value!r}: 'min'}}) or 'max'"
        raise InvalidRefError(msg, hint=fix)
    winner = best(values, direction)
    if winner is None:
        _missing(ref, f"every value of {ref.value!r} is NaN", "")
    return catalog.version(winner)


def _back(catalog: Catalog, ref: Ref, head: str) -> Version:
    line = (version for version in catalog.ancestors(head) if not version.deleted)
    for distance, version in enumerate(line):
        if distance == ref.number:
            return version
    return _missing(ref, f"only {distance} versions come before the head", "")


def _nearest(catalog: Catalog, ref: Ref) -> str:
    steps = catalog.steps(ref.run)
    position = bisect_left(steps, ref.number)
    near = steps[max(0, position - 1) : position + 1]
    return f"the nearest {'are' if len(near) > 1 else 'is'} {' and '.join(map(str, near))}"
