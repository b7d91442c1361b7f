"""Stores in pickles: the location and the arguments travel, and the other process opens it again.

Keys never travel, only where they come from (``file:PATH``, ``env:NAME``, ``command:CMD``). All
pickles of one opening give one store in each process that unpickles them.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ckptstore import limits
from ckptstore.config import absolute_path
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.replicas.options import HasRepo, ReplicaOptions

if TYPE_CHECKING:
    from ckptstore.backends.key_sources import KeyInput

_KEY: Final = "encryption_key"
_KEY_HINT: Final = "open it with the place of the key: file:PATH, env:NAME or command:CMD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Location and arguments of a call of :func:`ckptstore.open`; holds no key."""

    url: str
    reopen: Callable[..., HasRepo]
    """The function that is called with location and options; travels by its name."""
    options: Mapping[str, Any] = field(repr=False)
    obstacle: str = ""
    """Why it cannot be repeated in another process; empty if it can."""
    hint: str = ""

    @classmethod
    def of(
        cls,
        reopen: Callable[..., HasRepo],
        url: str | os.PathLike[str],
        key: KeyInput | None,
        options: Mapping[str, Any],
    ) -> Opening:
        """Return a call as another process can repeat it, in another working directory too."""
        from ckptstore.backends.registry import scheme_of

        text = os.fspath(url)
        scheme = scheme_of(text)
        place = text if scheme else str(absolute_path(text))
        obstacle = hint = ""
        if scheme == "memory":
            obstacle, hint = "it is in the memory of this process", "take a path or an object store"
            options = {}
        elif isinstance(key, str):
            options = {**options, _KEY: _placed(key)}
        elif key is not None:
            obstacle, hint, options = "its key stays here", _KEY_HINT, {}
        return cls(url=place, reopen=reopen, options=options, obstacle=obstacle, hint=hint)


def pickled(
    url: str, opening: Opening | None, replicas: ReplicaOptions, *, writes_back: bool
) -> bytes:
    """Return the argument of :func:`unpickled`.

    Raises
    ------
    InvalidInputError
        Another process could not open the store in the same way; the message says why.
    """
    obstacle = hint = ""
    if opening is None:
        obstacle, hint = "it was made on a backend of its own", "open it with ckptstore.open"
    elif opening.obstacle:
        obstacle, hint = opening.obstacle, opening.hint
    elif writes_back:
        obstacle = "it writes back to a replica, which one process does"
        hint = "pickle a store that was opened without, and start write_back in one process"
    else:
        given = {name: _portable(name, options) for name, options in replicas.items()}
        try:
            return pickle.dumps(replace(opening, options={**opening.options, "replicas": given}))
        except CkptStoreError:
            raise  # of an open store among the replicas
        except Exception as error:  # noqa: BLE001 - whatever an option of a storage library does
            obstacle = f"an option cannot be pickled ({type(error).__name__})"
            hint = "give storage options that are plain values"
    msg = f"the store {url} cannot be sent to another process: {obstacle}"
    raise InvalidInputError(msg, hint=hint)


_known: OrderedDict[bytes, HasRepo] = OrderedDict()
_lock = threading.Lock()


def unpickled(data: bytes) -> Any:  # noqa: ANN401 - what the function of the opening returns
    """Return the store of a pickle: the one that is open in this process, or opened now.

    Its ``close`` closes it for all who unpickled it; the next pickle opens it again.

    Raises
    ------
    CkptStoreError
        As :func:`ckptstore.open`.
    """
    with _lock:
        found = _known.get(data)
        if found is None or found.repo.is_closed:
            opening: Opening = pickle.loads(data)  # noqa: S301 - part of the pickle being read
            found = _known[data] = opening.reopen(opening.url, **opening.options)
        _known.move_to_end(data)
        while len(_known) > limits.ENGINE_SHARED_MAX:
            _known.popitem(last=False)
        return found


def _forget() -> None:
    """Let a forked child open its own: connections and locks are its parent's."""
    global _lock
    _lock = threading.Lock()
    _known.clear()


os.register_at_fork(after_in_child=_forget)


def _portable(name: str, options: Mapping[str, Any] | HasRepo) -> Mapping[str, Any] | HasRepo:
    """Return the options of a replica, its key as the place of one."""
    if not isinstance(options, Mapping) or options.get(_KEY) is None:
        return options
    if not isinstance(options[_KEY], str):
        msg = f"a store cannot be sent to another process: the key of its replica {name!r} stays"
        raise InvalidInputError(msg, hint=_KEY_HINT)
    return {**options, _KEY: _placed(options[_KEY])}


def _placed(spec: str) -> str:
    """Return the place of a key, that of a file from any working directory."""
    source, _, rest = spec.partition(":")
    return f"file:{absolute_path(rest)}" if source == "file" else spec
