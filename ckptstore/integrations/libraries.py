"""Imports of libraries that not every user has."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptstore.errors import MissingDependencyError


@contextmanager
def library(name: str, install: str) -> Iterator[None]:
    """Name a library that the imports of a block lack.

    Parameters
    ----------
    name
        Of the library; empty for the module that is not found.
    install
        Arguments of pip, and what else there is to say.

    Raises
    ------
    MissingDependencyError
        A module is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"{name or error.name} is not installed"
        raise MissingDependencyError(msg, hint=f"pip install {install}") from error


def on_first_use(module: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module (PEP 562) that imports what its names stand for.

    Parameters
    ----------
    module
        Name of the module.
    places
        The modules that have the names.
    """

    def found(name: str) -> object:
        if name in places:
            return getattr(importlib.import_module(places[name]), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return found


def needed(name: str, what: str = "'ckptstore[transformers]'") -> Any:  # a module
    """Return a module that an export needs.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    with library(name, what):
        return importlib.import_module(name)
