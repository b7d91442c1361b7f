"""Short texts and HTML tables of stores, versions and reports, for prompts and notebooks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, fields
from html import escape
from typing import Any, Final

from ckptstore.errors import CkptStoreError
from ckptstore.suggestions import Suggesting

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_ROWS_MAX: Final = 50
"""Rows of a table in a notebook; the caption says that there are more."""


_PLAIN: Final[dict[type, Callable[[Any], str | int | float | bytes]]] = {
    str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes.__bytes__
}  # fmt: skip


def shown(value: object, most: int = 60) -> str:
    """Return the ``repr`` of a value, shortened; or its class, where the value has no ``repr``."""
    try:
        return repr(value)[:most]
    except Exception:  # noqa: BLE001 - code of any class
        return f"a {type(value).__name__}"


def plain_value(value: object) -> str | int | float | bytes:
    """Return the value of an object that is a text, number or bytes and no more.

    The class may bring methods, such as ``torch.__version__``'s; enums, and what has attributes,
    are more.

    Raises
    ------
    TypeError
        It is something else.
    """
    kind = type(value)
    bases = [base for base in _PLAIN if issubclass(kind, base)]
    slots = any(vars(part).get("__slots__") for part in kind.__mro__)
    own: object = None if kind.__dictoffset__ else {}
    with suppress(Exception):
        own = object.__getattribute__(value, "__dict__")
    if not bases or slots or type(own) is not dict or own or issubclass(kind, enum.Enum):
        raise TypeError(f"a {kind.__name__} is more than its value")
    return _PLAIN[bases[0]](value)


def parts_text(parts: Mapping[str, int], *, most: int = 12) -> str:
    """Return parts of a state with their bytes, the largest first: ``optimizer (2.00 GiB)``."""
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    texts = [f"{name} ({bytes_text(size)})" for name, size in ranked[:most]]
    return ", ".join(texts + [f"{len(ranked) - most} more"] * (len(ranked) > most))


def bytes_text(size: float) -> str:
    """Return a number of bytes in binary units and three digits: ``1.50 GiB``, ``512 B``."""
    value = float(size)
    for unit in _UNITS:
        if abs(value) < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def count_text(count: int) -> str:
    """Return a count with commas: ``12,345``."""
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, given in the singular: ``1 pack``, ``1,200 packs``."""
    return f"{count_text(count)} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlTable:
    """A summary in one line, and its details as a table."""

    title: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()

    def html(self, *, most: int = _ROWS_MAX) -> str:
        """Return a table; everything in it is escaped, since names come from storage."""
        rows = [[escape(str(x)) for x in row] for row in self.rows[:most]]
        more = f" (the first {most} of {len(self.rows)} rows)" if len(self.rows) > most else ""
        head = "".join(f"<th>{escape(title)}</th>" for title in self.columns)
        body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
        caption = f"<caption>{escape(self.title)}{more}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Shown(Suggesting):
    """Base of records and reports: a short repr, and a table in notebooks, of one summary."""

    __slots__ = ()

    def _summary(self) -> HtmlTable:
        """Return the public fields: numbers and texts as they are, of collections the length."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name[0] != "_"}  # type: ignore[arg-type]  # a dataclass
        texts = {name: _brief(value) for name, value in found.items()}
        title = ", ".join(f"{name}={text}" for name, text in texts.items())
        return HtmlTable(title=title, columns=("FIELD", "VALUE"), rows=list(texts.items()))

    def __repr__(self) -> str:
        """Return the kind and the summary."""
        return f"<{type(self).__name__} {self._summary().title}>"

    def _repr_html_(self) -> str:
        """Return the table that notebooks show; of a closed store, why there is none."""
        try:
            return self._summary().html()
        except CkptStoreError as error:
            return HtmlTable(title=f"{self!r}: {error.message}").html()


def _brief(value: Any) -> str:  # noqa: ANN401 - a field of any report
    if isinstance(value, Sized) and not isinstance(value, str):
        return str(len(value))
    return repr(value)
