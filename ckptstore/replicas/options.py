"""Names, locations and options of replicas: which place each means, and how it is opened.

The log says where a replica is, and who can write the log can change that. Options of the storage
library (an endpoint, credentials) come from the user, for a place that the user knows. So they say
for which, and are given to no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable
from urllib.parse import unquote

from ckptstore import errors
from ckptstore.backends.base import Backend
from ckptstore.backends.key_sources import KeyInput, hidden, is_key_spec
from ckptstore.backends.registry import kind_of, open_backend, scheme_of
from ckptstore.config import SYSTEM, Options, absolute_path
from ckptstore.model import ReplicaInfo
from ckptstore.repo import Repo, open_repo


@runtime_checkable
class HasRepo(Protocol):
    """An open store, by what replicas need of it."""

    @property
    def repo(self) -> Repo:
        """The opened location."""


ReplicaOptions: TypeAlias = Mapping[str, Mapping[str, Any] | HasRepo]
"""By the name of a replica: what :func:`ckptstore.open` takes for it, with its ``url`` if any of
that goes to a storage library; or an open store."""

_OF_PROCESS: Final = frozenset(one.name for one in fields(Options))
_OF_OPENING: Final = frozenset({"create", "chunk_bytes"})
_OWN: Final = _OF_PROCESS | _OF_OPENING | {"encryption_key", "replicas"}
"""Options that ckptstore itself takes, and hands to no storage library."""


def open_place(url: str | os.PathLike[str], given: Mapping[str, Any]) -> Repo:
    """Open a location with options as :func:`ckptstore.open` takes them, ``replicas`` aside.

    Raises
    ------
    CkptStoreError
        As :func:`ckptstore.open`.
    """
    key = hidden(given.get("encryption_key"))
    check_given(given.get("replicas"))
    storage = {name: value for name, value in given.items() if name not in _OWN}
    if is_key_spec(storage.get("key")):
        msg = "key is an option of the storage library, and not the key of an encrypted store"
        raise errors.InvalidInputError(msg, hint="give encryption_key=")
    limits = {name: given[name] for name in _OF_PROCESS if name in given}
    for name in ("workers", "cache_folder"):
        if limits.get(name, 0) is None:
            del limits[name]
    return open_repo(
        url,
        options=Options(**limits),
        key=key,
        storage_options=storage,
        **{name: given[name] for name in _OF_OPENING if name in given},
    )


def inherited(repo: Repo) -> dict[str, Any]:
    """Return the options that a store takes over from the one beside which it is opened."""
    own = repo.options
    return {"host_bytes": own.host_bytes, "workers": own.workers, "chunk_bytes": repo.chunk_bytes}


@contextmanager
def open_target(
    source: Repo,
    url: str | os.PathLike[str],
    check: Callable[[Backend], None] | None = None,
    /,
    *,
    dry_run: bool,
    single_writer: bool = False,
    encryption_key: KeyInput | None = None,
    **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
) -> Iterator[Repo]:
    """Open the store that versions are to come to; make it if there is none.

    For a dry run nothing is made: where there is no store, an empty one in memory stands in. If
    the source is encrypted, no store without encryption is made for it.

    Parameters
    ----------
    source
        The store that they come from.
    check
        Called with the location's storage before anything is made there; raises to refuse it.

    Raises
    ------
    MissingKeyError
        There is no store yet, no key for one, and the source is encrypted.
    CkptStoreError
        As :func:`ckptstore.open`.
    """
    encryption_key = hidden(encryption_key)
    if check is not None:
        sent = {name: value for name, value in storage_options.items() if name not in _OWN}
        with closing(open_backend(url, **sent)) as backend:
            check(backend)
    keyless = source.superblock.encryption is not None and encryption_key is None
    new: Mapping[str, Any] = {"create": True, **inherited(source)}
    wanted = {
        **new,
        **storage_options,
        "create": not dry_run and not keyless,
        "read_only": dry_run or storage_options.get("read_only", False),
        "single_writer": single_writer,
        "encryption_key": encryption_key,
    }
    try:
        repo = open_place(url, wanted)
    except errors.StoreNotFoundError as error:
        if keyless:
            msg = f"{error.message}, and what is to come is encrypted where it is"
            hint = "give it a key (to_key=, --to-key); or make it without, by ckptstore init"
            raise errors.MissingKeyError(msg, hint=hint) from error
        if not dry_run:
            raise
        repo = open_place(f"memory://stand-in-{SYSTEM.random_hex(8)}", new)
    with repo:
        yield repo


def check_given(replicas: object) -> None:
    """Raise unless options of replicas are a mapping."""
    if replicas is not None and not isinstance(replicas, Mapping):
        msg = f"replicas is a mapping of names to options, not {type(replicas).__name__}"
        hint = "replicas={'cold': {'url': 's3://...', 'endpoint_url': ...}}"
        raise errors.InvalidInputError(msg, hint=hint)


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
        raise errors.InvalidInputError(msg, hint=_hint(name, "s3://BUCKET/PREFIX"))
    sent = sorted(set(options) - _OWN - {PLACE})
    if sent and place is None:
        msg = (
            f"the options of the replica {name!r} ({', '.join(sent)}) do not say for which place "
            "they are: who can write to the log can name another"
        )
        raise errors.InvalidInputError(msg, hint=_hint(name, "s3://BUCKET/PREFIX"))


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
            raise errors.InvalidUrlError(msg, hint=_hint(info.name, info.url))
    elif not same_place(place, info.url):
        raise errors.ReplicaChangedError(
            f"the options of the replica {info.name!r} are for {place}, and the log says that it "
            f"is at {info.url}",
            hint=f"if it moved there: {_hint(info.name, info.url)}",
        )


def _hint(name: str, url: str) -> str:
    return (
        f"say where it is, beside them: replicas={{{name!r}: {{'{PLACE}': {url!r}, ...}}}}; "
        f"on the command line --to-option {PLACE}={url}"
    )


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
