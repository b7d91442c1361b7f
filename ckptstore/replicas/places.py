"""Names and locations of replicas: how they are written, and which of them mean one place."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote

from ckptstore.backends.registry import scheme_of
from ckptstore.model import ReplicaInfo

__all__ = ["PLACE", "PREFIX", "is_local", "name_in", "same_place"]

PREFIX: Final = "replica:"
"""Stands before the name of a replica where a location may stand too."""
PLACE: Final = "url"
"""The option that says for which place the others are."""
_MOUNTED: Final = frozenset({"", "file", "local"})
_SAME: Final = {"s3a": "s3", "gcs": "gs"}


def name_in(text: object) -> str | None:
    """Return the name in ``replica:NAME``; None for anything else."""
    if isinstance(text, str) and text.startswith(PREFIX):
        return text.removeprefix(PREFIX)
    return None


def is_local(info: ReplicaInfo) -> bool:
    """Return whether a replica is on a mounted file system, or in memory."""
    return scheme_of(info.url) in {*_MOUNTED, "memory"}


def same_place(one: str, other: str) -> bool:
    """Return whether two locations are one, by what they say; nothing is asked."""
    return _plain(one) == _plain(other)


def _plain(url: str) -> str:
    scheme = scheme_of(url)
    if scheme in _MOUNTED:
        path = url
        if "://" in url:
            path = unquote(url.partition("://")[2].removeprefix("localhost"))
        return f"file://{Path(path).expanduser().absolute()}"
    rest = url[len(scheme) :].rstrip("/")
    return f"{_SAME.get(scheme, scheme)}{rest}"
