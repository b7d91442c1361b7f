"""Rules for names of runs, tags, metrics and roles, and for user metadata.

The rules make the ref grammar (:mod:`ckptstore.catalog.refs`) free of ambiguity, keep control
characters away from terminals, and bound what a hostile record can ask for. Each ``check_``
function returns its argument or raises ``InvalidInputError``; a record that breaks a rule when
it is *read* is reported as corrupt by the decoder, which names its key.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from ckptstore import limits
from ckptstore.errors import InvalidInputError, LimitError
from ckptstore.shown import plain_value, shown

T = TypeVar("T")

RESERVED_TAGS: Final = frozenset({"best", "head", "latest", "latest-valid"})
"""Words that a ref uses, or may come to use, for something else."""

# Letters, digits and _ of any script, then also . + = : , / - as experiments are named in practice
# (lr=1e-4, 2024/07/a). No @ and no leading # or ~, which the ref grammar needs.
_NAME = re.compile(r"\w[\w.+=:,/-]*\Z")
# No colon and no slash: a replica's name is never taken for a location.
_REPLICA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def check_run_name(name: str) -> str:
    """Return `name` if a run may be called so.

    Letters, digits and ``_`` of any script, then also ``. + = : , / -``; at most
    ``RUN_NAME_CHARS_MAX`` characters; parts between slashes are neither empty nor ``.``/``..``.

    Raises
    ------
    InvalidInputError
        If it breaks a rule; the message says which.
    """
    _check_name(name, "run name", limits.RUN_NAME_CHARS_MAX)
    if any(part in {"", ".", ".."} for part in name.split("/")):
        raise InvalidInputError(f"run name {name!r} has an empty, '.' or '..' part between slashes")
    return name


def check_tag(tag: str) -> str:
    """Return `tag` if a version may be tagged so: the characters of run names, and no other ref.

    Raises
    ------
    InvalidInputError
        If it breaks a rule, is all digits (a step), reserved, or begins with ``best:``.
    """
    _check_name(tag, "tag", limits.TAG_CHARS_MAX)
    if tag.isdigit():
        msg = f"tag {tag!r} is all digits, which a ref reads as a step"
        raise InvalidInputError(msg, hint=f"try v{tag}")
    if tag in RESERVED_TAGS or tag.startswith("best:"):
        msg = f"tag {tag!r} has a meaning of its own in refs"
        raise InvalidInputError(msg, hint="choose another name for it")
    return tag


def check_replica_name(name: str) -> str:
    """Return `name` if a replica may be called so: ASCII letters and digits, then ``. _ -`` too.

    Raises
    ------
    InvalidInputError
        If it breaks a rule, or is longer than ``REPLICA_NAME_CHARS_MAX``.
    """
    most = limits.REPLICA_NAME_CHARS_MAX
    if type(name) is not str or len(name) > most or not _REPLICA_NAME.match(name):
        msg = f"a replica's name is 1 to {most} of A-Z a-z 0-9 . _ -, not {shown(name, 80)}"
        raise InvalidInputError(msg, hint="such as cold, s3 or tape-2")
    return name


def check_replica_url(url: str) -> str:
    """Return the location of a replica if the log may hold it.

    Raises
    ------
    InvalidInputError
        It is empty, too long, does not print, or has a user, a password or a query in it.
    """
    if type(url) is not str or not url or len(url) > limits.REPLICA_URL_CHARS_MAX:
        most = limits.REPLICA_URL_CHARS_MAX
        raise InvalidInputError(f"the location of a replica is text of 1 to {most} characters")
    if not url.isprintable() or url != url.strip():
        msg = f"the location {url[:80]!r} holds what does not print, or begins or ends in a space"
        raise InvalidInputError(msg)
    _, mark, rest = url.rpartition("://")
    if not mark:
        return url
    try:
        parts = urlsplit("x://" + rest)
    except ValueError as error:
        raise InvalidInputError(f"the location {url[:80]!r} is no URL: {error}") from error
    if "@" in parts.netloc or parts.query:
        msg = "the location of a replica has a user, a password or a query in it"
        raise InvalidInputError(msg, hint="credentials belong into their usual chains")
    return url


def entries_of(value: Any, what: str) -> dict[Any, Any]:  # noqa: ANN401 - a mapping of any class
    """Return a mapping as a dict; InvalidInputError names one that cannot be read by `what`."""
    try:
        return dict(value)
    except Exception as error:
        raise InvalidInputError(f"{what} cannot be read: {shown(error, 200)}") from error


def check_listed(values: Iterable[T], name: str) -> list[T]:
    """Return several texts as a list; a single one would be taken letter by letter.

    Raises
    ------
    InvalidInputError
        They are one text, or bytes, or cannot be read; the hint says how `name` is written.
    """
    with suppress(Exception):
        if not issubclass(type(values), str | bytes | bytearray):
            return list(values)
    one = shown(values).removeprefix("b")
    msg = f"{name} must be a list of texts, not {shown(values)}"
    raise InvalidInputError(msg, hint=f"write {name}=[{one}]")


def check_metric_name(name: str) -> str:
    """Return `name` if a metric may be called so: printable, no space at either end.

    Raises
    ------
    InvalidInputError
        If it breaks a rule.
    """
    return _check_printable(name, "metric name", limits.METRIC_NAME_CHARS_MAX)


def check_role(role: str) -> str:
    """Return `role` if tensors may have it (``weights``, ``optimizer``, ...).

    Raises
    ------
    InvalidInputError
        If it breaks a rule.
    """
    return _check_printable(role, "role", limits.ROLE_CHARS_MAX)


def encode_metadata(metadata: Mapping[str, object]) -> bytes:
    """Return user metadata as canonical JSON.

    Raises
    ------
    InvalidInputError
        If it holds what JSON cannot (NaN, objects, keys that are not text); the path is named.
    LimitError
        If it is nested deeper than ``METADATA_DEPTH_MAX`` or larger than ``METADATA_BYTES_MAX``.
    """
    metadata = entries_of(metadata, "metadata")
    _check_json(metadata, "metadata", 0)
    try:
        data = msgspec.json.encode(metadata, enc_hook=plain_value, order="sorted")
    except Exception as error:
        msg = f"metadata cannot be written as JSON: {shown(error, 200)}"
        raise InvalidInputError(msg) from error
    if len(data) > limits.METADATA_BYTES_MAX:
        msg = f"metadata takes {len(data)} bytes as JSON, more than {limits.METADATA_BYTES_MAX}"
        raise LimitError(msg, hint="save large things as part of the state")
    return data


def check_metadata_json(data: bytes) -> None:
    """Check metadata that was read: size, depth, and that it is a JSON object.

    Raises
    ------
    InvalidInputError
        If it breaks a rule.
    """
    if len(data) > limits.METADATA_BYTES_MAX:
        raise InvalidInputError(f"metadata of {len(data)} bytes")
    if not data.lstrip(b" \t\r\n").startswith(b"{"):
        raise InvalidInputError("metadata is not a JSON object")
    if data.count(b"{") + data.count(b"[") > limits.METADATA_DEPTH_MAX:
        _check_json(msgspec.json.decode(data), "metadata", 0)


def _check_name(name: str, what: str, chars_max: int) -> None:
    if type(name) is not str or not name:
        raise InvalidInputError(f"{what} must be text that is not empty, not {shown(name)}")
    if len(name) > chars_max:
        msg = f"{what} of {len(name)} characters: {name[:40]!r}...; {chars_max} are allowed"
        raise InvalidInputError(msg)
    if not _NAME.match(name):
        msg = f"{what} {name!r} may hold letters, digits, _ and (not at the start) . + = : , / -"
        fixed = re.sub(r"[^\w.+=:,/-]", "-", name).lstrip(".+=:,/-")
        ref = "; store.load() and store[...] take refs" if "@" in name else ""
        raise InvalidInputError(msg, hint=f"such as {fixed or 'gpt'!r}{ref}")
    if not name.isascii() and unicodedata.normalize("NFC", name) != name:
        raise InvalidInputError(f"{what} {name!r} is not in Unicode's composed form (NFC)")


def _check_printable(name: str, what: str, chars_max: int) -> str:
    if type(name) is not str or not name or len(name) > chars_max:
        msg = f"{what} must be text of 1 to {chars_max} characters, not {shown(name, 40)}"
        raise InvalidInputError(msg)
    if not name.isprintable() or name != name.strip():
        msg = f"{what} {name!r} holds characters that do not print, or begins or ends in a space"
        raise InvalidInputError(msg)
    return name


def _check_json(value: object, path: str, depth: int) -> None:
    """Walk `value`, bounded in depth, and refuse what JSON would lose."""
    if depth > limits.METADATA_DEPTH_MAX:
        raise LimitError(f"{path[:200]} is nested deeper than {limits.METADATA_DEPTH_MAX}")
    kind = type(value)
    if issubclass(kind, Mapping):
        for key, item in entries_of(value, path).items():
            if not issubclass(type(key), str):
                raise InvalidInputError(f"{path}: the key {shown(key)} is not text")
            _check_json(item, f"{path}.{str.__str__(key)}", depth + 1)
    elif issubclass(kind, list | tuple):
        base = list if issubclass(kind, list) else tuple
        for index, item in enumerate(base.__iter__(value)):  # type: ignore[arg-type]
            _check_json(item, f"{path}[{index}]", depth + 1)
    elif issubclass(kind, float):
        if not math.isfinite(value):  # type: ignore[arg-type]
            msg = f"{path} is {shown(value)}, which JSON cannot hold"
            raise InvalidInputError(msg, hint="write it as text")
    elif not (value is None or issubclass(kind, str | int)):
        msg = f"{path} is a {kind.__name__}, which JSON cannot hold"
        raise InvalidInputError(msg, hint=_instead(kind))


def _instead(kind: type) -> str:
    """Return what to write instead of something that JSON cannot hold."""
    if hasattr(kind, "__fspath__"):
        return "write str(path)"
    if issubclass(kind, set | frozenset):
        return "write sorted(...)"
    if hasattr(kind, "item"):
        return "write a plain number: .item(); or save it as part of the state"
    return "text, numbers, lists and dicts with text keys; or save it as part of the state"
