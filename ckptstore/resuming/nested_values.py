"""Nested containers of plain values: their leaves, the same in every process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

SCALARS: Final = (str, int, float, bool, bytes, type(None))
_ADDRESS: Final = re.compile(" at 0x[0-9a-fA-F]+")
"""Of an object in this process, as ``repr`` shows it."""

Leaf = tuple[str, Any]
"""Path, and a tensor or a plain value."""


def is_list(value: object) -> bool:
    """Return whether a value is a list, a tuple or a set."""
    return isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes)


def walk(path: str, value: object) -> Iterator[Leaf]:
    """Yield the leaves of nested containers."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from walk(f"{path}.{key}", one)
    elif isinstance(value, AbstractSet):
        yield path, sorted(text_of(one) for one in value)
    elif is_list(value) and not all(isinstance(one, SCALARS) for one in value):  # type: ignore[attr-defined]
        for place, one in enumerate(value):  # type: ignore[arg-type]
            yield from walk(f"{path}.{place}", one)
    elif isinstance(value, np.ndarray):
        yield path, _array(value)
    else:
        yield path, value


def text_of(value: object) -> str:
    """Return a plain value as text that is the same in every process."""
    if isinstance(value, AbstractSet):  # in another set
        return repr(sorted(text_of(one) for one in value))
    return _ADDRESS.sub("", repr(value))


def _array(value: npt.NDArray[Any]) -> object:
    """Return an array as a tensor; as a list, where torch has no such type."""
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError):
        return value.tolist()
