"""Opens the backend of a URL or a path; the only module that knows all backends.

To add a backend: write its module, add its line to ``FACTORIES``, and give it a suite class in
tests/conformance. Third parties use the entry-point group ``ckptstore.backends`` instead, with
the URL scheme as name and ``module:factory`` as value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib import import_module
from typing import Final

from ckptstore.backends.base import Backend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import InvalidUrlError, MissingDependencyError

Factory = Callable[..., Backend]
"""``factory(url, **storage_options)``; raises InvalidUrlError or StorageError."""

ENTRY_POINTS: Final = "ckptstore.backends"

FACTORIES: Final[dict[str, str]] = {
    "file": "ckptstore.backends.posix:open_posix",
    "memory": "ckptstore.backends.memory:open_memory",
    "s3": "ckptstore.backends.s3:open_s3",
    "gs": "ckptstore.backends.gcs:open_gcs",
    "az": "ckptstore.backends.azure:open_azure",
    "http": "ckptstore.backends.web:open_web",
    "https": "ckptstore.backends.web:open_web",
}
"""URL scheme -> ``module:factory``. Any other scheme goes to fsspec."""
# "local" is fsspec's name for files; its own local files look before they create.
_ALIASES = {"": "file", "local": "file", "s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
# Which extra of ours brings the package that a scheme needs.
_EXTRAS: Final = {"s3": "s3", "gs": "gcs", "az": "azure"}

_FALLBACK: Final = "ckptstore.backends.fsspec_backend:open_fsspec"
# fsspec has schemes with an underscore, such as arrow_hdfs, which RFC 3986 does not allow.
_NAME: Final = r"[A-Za-z][A-Za-z0-9+._-]*(?:::[A-Za-z0-9+._-]+)*"
# Only a cache stands before a path without "://": a folder may be called a::b.
_SCHEME = re.compile(rf"(?:({_NAME})://|((?:simple|file|block)cache|cached)::)", re.IGNORECASE)
# A URL without its slashes, or with one; a single letter is a drive of Windows.
_SLIP = re.compile(r"([a-z0-9]+):([/\\]?)(?!/)", re.IGNORECASE)
_UNNAMEABLE = re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")


def scheme_of(location: str) -> str:
    """Return the URL scheme of a location in lower case, empty for a path."""
    match = _SCHEME.match(location)
    return (match[1] or match[2]).lower() if match else ""


def kind_of(location: str) -> str:
    """Return the scheme that a location's stands for: ``file`` for a path, ``s3`` for ``s3a``."""
    scheme = scheme_of(location)
    return _ALIASES.get(scheme, scheme)


def open_backend(
    location: str | os.PathLike[str],
    *,
    retry: bool = True,
    environment: Environment = SYSTEM,
    **storage_options: object,
) -> Backend:
    """Return the backend of a location, wrapped so that transient failures are retried.

    Sends nothing and creates nothing: a location that does not exist shows at the first
    call.

    Parameters
    ----------
    location
        A path, or any URL that fsspec knows.
    retry
        False for the bare backend, which raises transient failures.
    storage_options
        Options of the backend, as fsspec takes them (credentials, ``endpoint_url`` ...). They
        are never part of the URL, of a ``repr`` or of an error.

    Raises
    ------
    InvalidUrlError
        No backend serves this location, or it is no location.
    MissingDependencyError
        A backend serves it, but needs a package that is not installed; the hint names it.
    """
    text = _location_text(location)
    backend = _factory(scheme_of(text))(text, **storage_options)
    return RetryingBackend(backend, environment=environment) if retry else backend


def _location_text(location: object) -> str:
    """Return a location as text; refuse values that were surely meant as another argument."""
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(text, str):
        msg = f"a location must be a URL or a path, not {text!r:.60}"
        raise InvalidUrlError(msg, hint="such as /data/ckpts or s3://bucket/ckpts")
    if not text.strip():
        raise InvalidUrlError("the URL is empty", hint="is CKPTSTORE_URL set?")
    head, mark, rest = text.partition("://")
    if mark and "/" not in head and not _SCHEME.match(text):
        msg = f"{head[:80]!r} is no scheme of a URL"
        raise InvalidUrlError(msg, hint=f"a folder of this name is ./{head[:80]}:/...")
    kind, slip = kind_of(text), _SLIP.match(text)
    if kind != "file" and kind in FACTORIES:
        if _UNNAMEABLE.search(rest) or {".", ".."}.intersection(rest.split("/")):
            msg = f"a URL of {head}:// with . or .. in its path, or with a control character"
            raise InvalidUrlError(msg, hint=f"write it without them: {head}://host/path")
    elif slip and not os.path.isdir(text):  # noqa: PTH112 - a folder that is there is meant
        scheme = kind_of(f"{slip[1]}://")
        if slip[2] or scheme in FACTORIES:
            start = f"{slip[1]}:///..." if scheme == "file" else f"{slip[1]}://..."
            meant = start if slip[1][1:] else "a drive of Windows, which WSL has below /mnt"
            hint = f"did you mean {meant}? A folder of this name is ./{slip[0]}..."
            raise InvalidUrlError(f"{slip[0]}... is no URL", hint=hint)
    return text


def _factory(scheme: str) -> Factory:
    kind = _ALIASES.get(scheme, scheme)
    target = FACTORIES.get(kind)
    if target is None:
        # Slow to import, and needed for third parties' schemes only.
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS, name=scheme):
            try:
                found: Factory = point.load()
            except (ImportError, AttributeError) as error:
                msg = f"the backend {point.value} for {scheme}:// cannot be loaded: {error}"
                raise MissingDependencyError(msg, hint="reinstall its package") from error
            return found
        target = _FALLBACK
    module, _, name = target.partition(":")
    try:
        factory: Factory = getattr(import_module(module), name)
    except ImportError as error:
        extra = _EXTRAS.get(kind, "")
        msg = f"{scheme}:// needs a package that is not installed ({error.name})"
        hint = f"pip install 'ckptstore[{extra}]'" if extra else f"install {error.name}"
        raise MissingDependencyError(msg, hint=hint) from error
    return factory
