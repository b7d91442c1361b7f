"""For which place the options of a replica are: what is secret goes nowhere else.

The log says where a replica is, and who can write the log can change that. Options of the storage
library (an endpoint, credentials) come from the user, for a place that the user knows. So they say
for which, and are given to no other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from ckptstore.errors import InvalidInputError, InvalidUrlError, ReplicaChangedError
from ckptstore.model import ReplicaInfo

__all__ = ["PLACE", "check_bound", "check_meant", "same_place"]

PLACE: Final = "url"
"""The option that says for which place the others are."""


def same_place(one: str, other: str) -> bool:
    """Return whether two locations are one, by what they say; nothing is asked."""
    return _plain(one) == _plain(other)


def _plain(url: str) -> str:
    from ckptstore.backends.registry import kind_of, scheme_of

    kind = kind_of(url)
    if kind == "file":
        path = url
        if "://" in url:
            path = unquote(url.partition("://")[2].removeprefix("localhost"))
        return f"file://{Path(path).expanduser().absolute()}"
    return kind + url[len(scheme_of(url)) :].rstrip("/")


def check_bound(name: str, options: Mapping[str, Any]) -> None:
    """Return if options say for which place they are, or none of them goes to a storage.

    What opens an encrypted store is sent to none, nor are limits of this process.

    Raises
    ------
    InvalidInputError
        They do not, or say it as no text.
    """
    place = options.get(PLACE)
    if place is not None and (not isinstance(place, str) or not place):
        msg = f"the {PLACE} among the options of the replica {name!r} is no text"
        raise InvalidInputError(msg, hint=_hint(name, "s3://BUCKET/PREFIX"))
    sent = sorted(set(options) - _own() - {PLACE})
    if sent and place is None:
        msg = (
            f"the options of the replica {name!r} ({', '.join(sent)}) do not say for which place "
            "they are: who can write to the log can name another"
        )
        raise InvalidInputError(msg, hint=_hint(name, "s3://BUCKET/PREFIX"))


def check_meant(info: ReplicaInfo, options: Mapping[str, Any]) -> None:
    """Return if options may be given to the place that the log names.

    Raises
    ------
    ReplicaChangedError
        They are for another place.
    InvalidUrlError
        It is a chain of file systems, which may fetch from anywhere, and no option says that this
        is meant.
    """
    place = options.get(PLACE)
    if place is None:
        if "://" in info.url and "::" in info.url:
            msg = f"{info.url} is a chain of file systems, and only the log says that it is meant"
            raise InvalidUrlError(msg, hint=_hint(info.name, info.url))
    elif not same_place(place, info.url):
        msg = (
            f"the options of the replica {info.name!r} are for {place}, and the log says that it "
            f"is at {info.url}"
        )
        raise ReplicaChangedError(msg, hint=f"if it moved there: {_hint(info.name, info.url)}")


def _hint(name: str, url: str) -> str:
    return (
        f"say where it is, beside them: replicas={{{name!r}: {{'{PLACE}': {url!r}, ...}}}}; "
        f"on the command line --to-option {PLACE}={url}"
    )


@cache
def _own() -> frozenset[str]:
    """Return the options that ckptstore itself takes, and hands to no storage library."""
    from ckptstore.store.opening import open_store

    parameters = inspect.signature(open_store).parameters.values()
    return frozenset(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
