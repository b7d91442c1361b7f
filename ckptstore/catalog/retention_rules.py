"""The rules of retention policies, as text and by what they choose. Pure.

::

    rules    = rule { "," rule }                     one of them is enough
    rule     = "last" N                              the newest N
             | "every" N "steps"                     of each stretch of N steps the first
             | "every" DURATION                      of each stretch of time the first
             | "within" DURATION                     those younger than that
             | "best" N METRIC [ "missing" ( "keep" | "drop" ) ]
             | "tagged"
             | "abandoned" DURATION                  what a rollback left, while younger than that
             | "all"                                 every version, abandoned or not
    DURATION = N unit { N unit }                     units w d h m s: "1d12h"
    METRIC   = a word without space, comma or quote, or a JSON string
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn, Protocol

from ckptstore import limits
from ckptstore.catalog.metrics import no_direction, ranked
from ckptstore.errors import InvalidInputError
from ckptstore.format.fields import Direction
from ckptstore.format.names import check_metric_name
from ckptstore.model import Version

_UNITS_S: Final = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}
_DURATION: Final = re.compile(r"(?:[0-9]+[wdhms])+")
_TOKEN: Final = re.compile(r'\s*("(?:[^"\\]|\\.)*"|,|[^\s,"]+)')
_WORD: Final = re.compile(r'[^\s,"]+')
_DIGITS_MAX: Final = 18
RULES_HINT: Final = (
    "rules: last N, every N steps, every 6h, within 7d, best N METRIC, tagged, abandoned 7d, all"
)


class Times(Protocol):
    """The clock that ages are counted by; asked by rules of time alone."""

    def age_s(self, version: Version) -> float:
        """Return the age of a version in seconds."""

    def saved_s(self, version: Version) -> float:
        """Return when a version came to the store, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The run that rules are applied to, besides its versions."""

    directions: Mapping[str, Direction]
    """Direction in which each metric of the run gets better."""
    times: Times


@dataclass(frozen=True, slots=True)
class Last:
    """Keeps the newest versions on the line of the run."""

    count: int

    def __str__(self) -> str:
        """Return the rule as text."""
        return f"last {self.count}"

    def chosen(self, among: Sequence[Version], view: View) -> Iterable[str]:
        """Return the ids of the versions that the rule chooses; `among` is oldest first."""
        return [version.id for version in among[-self.count :]]


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Keeps the first version of each stretch of steps: from 0, from `steps`, from twice that."""

    steps: int

    def __str__(self) -> str:
        """Return the rule as text."""
        return f"every {self.steps} steps"

    def chosen(self, among: Sequence[Version], view: View) -> Iterable[str]:
        """Return the ids of the versions that the rule chooses; `among` is oldest first."""
        chosen: dict[int, Version] = {}
        for version in among:
            stretch = version.step // self.steps
            # Of one step that was saved twice the newer one, as for refs.
            if stretch not in chosen or version.step <= chosen[stretch].step:
                chosen[stretch] = version
        return [version.id for version in chosen.values()]


@dataclass(frozen=True, slots=True)
class EveryTime:
    """Keeps the first version of each stretch of time, from 1970 on.

    By the storage's clock, and also the first by the clocks of the writers: where a store was
    copied, or versions came from another one, the storage has one time for many.
    """

    seconds: int

    def __str__(self) -> str:
        """Return the rule as text."""
        return f"every {duration_text(self.seconds)}"

    def chosen(self, among: Sequence[Version], view: View) -> Iterable[str]:
        """Return the ids of the versions that the rule chooses; `among` is oldest first."""
        chosen: dict[tuple[str, int], str] = {}
        for version in among:
            times = (view.times.saved_s(version), version.created_at.timestamp())
            for clock, time_s in zip(("storage", "writer"), times, strict=True):
                chosen.setdefault((clock, math.floor(time_s / self.seconds)), version.id)
        return chosen.values()


@dataclass(frozen=True, slots=True)
class Best:
    """Keeps the best versions by a metric, in the direction that the run declared."""

    count: int
    metric: str
    missing: Literal["keep", "drop"] = "drop"
    """The fate of versions without the metric (yet). NaN counts as a value, and is never best."""

    def __str__(self) -> str:
        """Return the rule as text."""
        plain = _WORD.fullmatch(self.metric)
        name = self.metric if plain else json.dumps(self.metric, ensure_ascii=False)
        return f"best {self.count} {name}" + (" missing keep" if self.missing == "keep" else "")

    def chosen(self, among: Sequence[Version], view: View) -> Iterable[str]:
        """Return the ids of the versions that the rule chooses; `among` is oldest first."""
        direction = view.directions.get(self.metric)
        if direction is None:
            raise no_direction(self.metric, view.directions)
        values = [(v.id, v.step, v.metrics[self.metric]) for v in among if self.metric in v.metrics]
        chosen = ranked(values, direction)[: self.count]
        if self.missing == "keep":
            chosen += [v.id for v in among if self.metric not in v.metrics]
        return chosen


@dataclass(frozen=True, slots=True)
class All:
    """Keeps every version, abandoned ones too; the rules that look at each by itself follow it."""

    def __str__(self) -> str:
        """Return the rule as text."""
        name, seconds = type(self).__name__.lower(), getattr(self, "seconds", None)
        return name if seconds is None else f"{name} {duration_text(seconds)}"

    def chosen(self, among: Sequence[Version], view: View) -> Iterable[str]:
        """Return the ids of the versions that the rule chooses; `among` is oldest first."""
        return [version.id for version in among if self._keeps(version, view.times)]

    def _keeps(self, version: Version, times: Times) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Tagged(All):
    """Keeps versions that have a tag."""

    def _keeps(self, version: Version, times: Times) -> bool:
        return bool(version.tags)


@dataclass(frozen=True, slots=True)
class Within(All):
    """Keeps versions while they are younger than that."""

    seconds: int

    def _keeps(self, version: Version, times: Times) -> bool:
        return not version.abandoned and times.age_s(version) < self.seconds


@dataclass(frozen=True, slots=True)
class Abandoned(All):
    """Keeps versions that a rollback abandoned, while they are younger than that."""

    seconds: int

    def _keeps(self, version: Version, times: Times) -> bool:
        return version.abandoned and times.age_s(version) < self.seconds


CONTESTED: Final = (Last, EverySteps, EveryTime, Best)
"""Rules that choose between versions; the others look at each by itself."""

Rule = Last | EverySteps | EveryTime | Best | All


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules of a text.

    Raises
    ------
    InvalidInputError
        It does not follow the grammar; the message has the position, from 1.
    """
    reader = _Reader(text)
    rules = []
    while True:
        rules.append(_rule(reader))
        if len(rules) > limits.POLICY_RULES_MAX:
            reader.refuse(f"more than {limits.POLICY_RULES_MAX} rules")
        if reader.peek() is None:
            return tuple(rules)
        if reader.take("a comma") != ",":
            reader.refuse("a comma must follow", back=True)


def parse_duration(text: str) -> int:
    """Return the seconds of ``6h``, ``1d12h`` or ``90s``.

    Raises
    ------
    InvalidInputError
        It is no such text, or zero.
    """
    seconds = 0
    if _DURATION.fullmatch(text) and len(text) <= 2 * _DIGITS_MAX:
        parts = re.findall(r"([0-9]+)([wdhms])", text)
        seconds = sum(int(count) * _UNITS_S[unit] for count, unit in parts)
    if not 0 < seconds <= limits.TIME_MS_MAX // 1000:
        msg = f"{text[:40]!r} is not a duration"
        raise InvalidInputError(msg, hint="write 90s, 30m, 6h, 1d12h or 2w")
    return seconds


_SUFFIXES: Final = {"": 1, "K": limits.KIB, "M": limits.MIB, "G": limits.GIB}


def parse_bytes(text: str) -> int:
    """Return the bytes that ``4MiB``, ``4M`` or ``4194304`` stand for.

    Raises
    ------
    InvalidInputError
        If it is no such text.
    """
    number = text.strip().upper().rstrip("KMGIB")
    suffix = text.strip().upper()[len(number) :].strip()
    factor = _SUFFIXES.get(suffix[:1] if suffix[1:] in ("", "IB") else suffix)
    if factor is None or not number.strip().isdecimal():
        msg = f"{text!r} is not a number of bytes"
        raise InvalidInputError(msg, hint="write 4MiB, 512KiB or a plain number")
    return int(number) * factor


def duration_text(seconds: int) -> str:
    """Return a duration as :func:`parse_duration` reads it."""
    parts = []
    for unit, size in _UNITS_S.items():
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _rule(reader: _Reader) -> Rule:
    word = reader.take("a rule")
    if word not in _PARSERS:
        reader.refuse(f"{word!r} is not a rule", back=True)
    return _PARSERS[word](reader)


def _every(reader: _Reader) -> Rule:
    word = reader.peek() or ""
    if not word.isdigit():
        return EveryTime(reader.duration())
    steps = reader.number()
    if reader.peek() not in ("step", "steps"):
        reader.take("steps, or a unit of time as in 6h")
        reader.refuse("'steps' must follow, or the number a unit of time as in 6h", back=True)
    reader.take("steps")
    return EverySteps(steps)


def _best(reader: _Reader) -> Rule:
    count, word = reader.number(), reader.take("a metric")
    if word == ",":
        reader.refuse("a metric must follow", back=True)
    try:
        metric = check_metric_name(json.loads(word) if word[0] == '"' else word)
    except ValueError as error:  # InvalidInputError is one too
        reader.refuse(f"{word} is not the name of a metric: {error}", back=True)
    if reader.peek() != "missing":
        return Best(count, metric)
    reader.take("missing")
    choice = reader.take("keep or drop")
    if choice not in ("keep", "drop"):
        reader.refuse("missing is followed by keep or drop", back=True)
    return Best(count, metric, "keep" if choice == "keep" else "drop")


_PARSERS: Final[dict[str, Callable[[_Reader], Rule]]] = {
    "last": lambda reader: Last(reader.number()),
    "every": _every,
    "within": lambda reader: Within(reader.duration()),
    "abandoned": lambda reader: Abandoned(reader.duration()),
    "best": _best,
    "tagged": lambda _: Tagged(),
    "all": lambda _: All(),
}
"""By the first word of a rule, how the rest of it is read."""


class _Reader:
    """The words of a text, and where each begins."""

    def __init__(self, text: str) -> None:
        if len(text) > limits.POLICY_CHARS_MAX:
            msg = f"rules of {len(text)} characters; {limits.POLICY_CHARS_MAX} are allowed"
            raise InvalidInputError(msg)
        self._text = text
        self._words = list(self._split())
        self._at = 0

    def _split(self) -> Iterator[tuple[str, int]]:
        at, end = 0, len(self._text.rstrip())
        while at < end:
            found = _TOKEN.match(self._text, at)
            if found is None:
                start = len(self._text) - len(self._text[at:].lstrip())
                self._refuse_at(start, "a quote that does not end")
            yield found[1], found.start(1)
            at = found.end()

    def peek(self) -> str | None:
        """Return the next word; None at the end."""
        return self._words[self._at][0] if self._at < len(self._words) else None

    def take(self, what: str) -> str:
        """Return the next word and go on; `what` is wanted there."""
        word = self.peek()
        if word is None:
            self.refuse(f"{what} must follow")
        self._at += 1
        return word

    def number(self) -> int:
        """Return the number that is the next word, from 1 on."""
        word = self.take("a number")
        number = int(word) if re.fullmatch(f"[0-9]{{1,{_DIGITS_MAX}}}", word) else 0
        if number < 1:
            self.refuse(f"{word!r} is not a number from 1 on", back=True)
        return number

    def duration(self) -> int:
        """Return the seconds of the duration that is the next word."""
        word = self.take("a duration")
        try:
            return parse_duration(word)
        except InvalidInputError as error:
            self.refuse(f"{error.message}; {error.hint}", back=True)

    def refuse(self, what: str, *, back: bool = False) -> NoReturn:
        """Raise at the next word, or with `back` at the one just taken."""
        place = self._at - back
        at = self._words[place][1] if place < len(self._words) else len(self._text)
        self._refuse_at(at, what)

    def _refuse_at(self, at: int, what: str) -> NoReturn:
        msg = f"rules {self._text[:200]!r}: at character {at + 1}: {what}"
        raise InvalidInputError(msg, hint=RULES_HINT)
