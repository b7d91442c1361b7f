"""Checks of arguments: each raises InvalidInputError, which names the argument and its bounds."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.shown import shown


def check_among(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless an argument is one of its choices."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInputError(f"{name} is one of {', '.join(choices)}, not {shown(value)}")


def check_between(
    name: str, value: object, low: float, high: float = math.inf, *, hint: str = ""
) -> None:
    """Raise unless an argument is a finite number of a range, both ends included."""
    number: Any = value if isinstance(value, Real) else math.nan
    if not low <= number <= high or number == math.inf:
        raise _outside(f"{name} is a number from {low}", high, value, hint)


def integer(name: str, value: object, low: int = 1, high: float = math.inf, hint: str = "") -> int:
    """Return an argument as a plain integer of a range, also one of NumPy's; a bool is none."""
    try:
        number = low - 1 if type(value) is bool else operator.index(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a float, a text, an object of any class
        number = low - 1
    if not low <= number <= high:
        raise _outside(f"{name} is an integer from {low}", high, value, hint)
    return number


def _outside(what: str, high: float, value: object, hint: str) -> InvalidInputError:
    to = "on" if high == math.inf else f"to {high}"
    return InvalidInputError(f"{what} {to}, not {shown(value)}", hint=hint)
