"""Plain values as nodes of a skeleton: those that cannot be stored as they are."""

from __future__ import annotations

import datetime as dt
import pathlib
from typing import Any

from ckptstore import limits
from ckptstore.errors import StateError
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Node


def int_node(value: int, path: Path) -> Node:
    """Return the node of an integer.

    Raises
    ------
    StateError
        It has more digits than the format allows.
    """
    if -(1 << 63) <= value < (1 << 63):
        return value
    if value.bit_length() > limits.INT_DIGITS_MAX * 3:
        raise StateError(
            f"{path_text(path)!r} is an integer of {value.bit_length()} bits",
            hint="keep it as bytes (int.to_bytes)",
        )
    return ["i", str(value)]


def str_node(value: str) -> Node:
    """Return the node of a string; lone surrogates (from file names, for example) are kept."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["u", value.encode("utf-8", "surrogatepass")]
    return value


def key_node(key: Any, path: Path, where: str = "a key of") -> Node:  # noqa: ANN401
    """Return the node of a dict key, or of an element of a set.

    Raises
    ------
    StateError
        It is not plain; names the path of the dict or set.
    """
    kind = type(key)
    if kind is str:
        return str_node(key)
    if kind is int:
        return int_node(key, path)
    if (kind is float and key == key) or kind is bool or kind is bytes or key is None:
        return key  # type: ignore[no-any-return]
    if kind is tuple:
        return ["t", *(key_node(item, path, where) for item in key)]
    raise StateError(
        f"{path_text(path)!r}: {where} it is {key!r}, a {kind.__module__}.{kind.__qualname__}",
        hint="keys and set elements are str, int, float (not NaN), bool, None, bytes or tuples",
    )


def file_path_node(value: pathlib.PurePath) -> Node:
    """Return the node of a file path."""
    kind = "purewindows" if isinstance(value, pathlib.PureWindowsPath) else "pureposix"
    return ["p", "path" if isinstance(value, pathlib.Path) else kind, str_node(str(value))]


def datetime_node(value: dt.datetime, path: Path) -> Node:
    """Return the node of a datetime.

    Raises
    ------
    StateError
        Its zone is more than an offset from UTC.
    """
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise StateError(
            f"{path_text(path)!r} is a datetime in the zone {value.tzinfo!r}",
            hint="convert it to UTC: value.astimezone(datetime.timezone.utc)",
        )
    return ["dm", value.isoformat(), value.fold]
