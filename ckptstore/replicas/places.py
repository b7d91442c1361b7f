"""Names and locations of replicas: how they are written, and which of them mean one place."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from ckptstore.backends.registry import kind_of, scheme_of
from ckptstore.config import absolute_path
from ckptstore.model import ReplicaInfo

PREFIX: Final = "replica:"
"""Stands before the name of a replica where a location may stand too."""
PLACE: Final = "url"
"""The option that says for which place the others are."""


def name_in(text: object) -> str | None:
    """Return the name in ``replica:NAME``; None for anything else."""
    if isinstance(text, str) and text.startswith(PREFIX):
        return text.removeprefix(PREFIX)
    return None


def is_local(info: ReplicaInfo) -> bool:
    """Return whether a replica is on a mounted file system, or in memory."""
    return kind_of(info.url) in {"file", "memory"}


def same_place(one: str, other: str) -> bool:
    """Return whether two locations are one, by what they say; nothing is asked."""
    return _plain(one) == _plain(other)


def _plain(url: str) -> str:
    kind = kind_of(url)
    if kind == "file":
        path = url
        if "://" in url:
            path = unquote(url.partition("://")[2].removeprefix("localhost"))
        return f"file://{absolute_path(path)}"
    return kind + url[len(scheme_of(url)) :].rstrip("/")
