"""The calls that the S3 backend makes of a client library, and the errors of these libraries.

Two clients serve it: ``s3_direct`` (botocore, without an event loop) and ``s3_fsspec`` (s3fs).
Their errors, and those of urllib3, become errors of the tree by type, status and code.

Storage options, which are those of s3fs, become those of botocore.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import botocore.exceptions as boto
from botocore.config import Config
from fsspec.config import apply_config
from fsspec.exceptions import FSTimeoutError
from urllib3.exceptions import NewConnectionError

from ckptstore import errors, limits
from ckptstore.backends.base import Buffers
from ckptstore.backends.bucket import Foreign
from ckptstore.backends.httperrors import error_for_answer, error_for_silence

Request = dict[str, Any]
"""The parameters of one call of the S3 API, by their names there."""
Accept = Callable[[Mapping[str, Any]], None]
"""Looks at the head of an answer before its body is taken; raises to refuse it."""

_NO_CREDENTIALS: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
)
_WRONG_SETTINGS: Final = (boto.ParamValidationError, TypeError, ValueError, ImportError)
_CREDENTIALS_HINT: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or give key= and secret=;"
    " a public bucket is read with anon=True"
)
OWN_OPTIONS: Final = ("client", "pack_class", "requests")
"""Options of ckptstore's own, besides those of s3fs."""
_UNKNOWN_OPTION: Final = re.compile(r"unexpected keyword argument '(\w+)'")


class S3Calls(Protocol):
    """One client in one process; every method may be called from any thread.

    Each call sends one request, once, and raises its library's errors: ``translate`` knows them
    all.
    """

    def call(self, method: str, request: Request) -> Foreign:
        """Return the answer of a call without a body; `method` is its name in snake case."""

    def send(self, method: str, request: Request, body: Buffers) -> Foreign:
        """Send an object or a part of one; its memory is free again when this returns or raises."""

    def read(self, request: Request, accept: Accept) -> bytes:
        """Return the body of an object."""

    def read_into(
        self, request: Request, buffers: Buffers, accept: Accept, patience_s: float = 0.0
    ) -> int:
        """Fill `buffers` from the body; return the number of bytes that are missing.

        With `patience_s` it fails if the answer does not begin in time.
        """

    def close(self) -> None:
        """Close the connections."""


def translate(error: Exception, what: str, *, conditional: bool) -> errors.CkptStoreError:
    """Return the error of ckptstore's tree for an error of an S3 client.

    s3fs turns botocore's errors into Python's and loses their status; the cause still has it.
    """
    for cause in (error, error.__cause__):
        if isinstance(cause, boto.ClientError):
            status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return error_for_answer(status, code_of(cause), what, conditional=conditional)
    if isinstance(error, FSTimeoutError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec's wrapper of any timeout
    msg = f"{what}: {type(error).__name__}"
    if isinstance(error, _NO_CREDENTIALS):
        return errors.StoragePermissionError(msg, hint=_CREDENTIALS_HINT)
    if isinstance(error, boto.CredentialRetrievalError):  # their service may be busy
        return errors.TransientStorageError(msg, hint=_CREDENTIALS_HINT)
    if _not_sent(error):
        return errors.TransientStorageError(msg)
    if isinstance(error, _WRONG_SETTINGS):
        wrong = _UNKNOWN_OPTION.search(str(error))  # the rest of the text may hold a secret
        about = f": no option is called {wrong[1]!r}" if wrong else ""
        hint = "the storage options are those of s3fs.S3FileSystem"
        return errors.StorageError(msg + about, hint=f"{hint}, and {', '.join(OWN_OPTIONS)}")
    return error_for_silence(msg, conditional=conditional)


def code_of(error: Exception) -> str:
    """Return S3's code in an answer that is no success; empty without one."""
    for cause in (error, error.__cause__):
        if isinstance(cause, boto.ClientError):
            code = str(cause.response.get("Error", {}).get("Code", ""))
            # A HEAD has no body, and botocore uses the status as the code.
            return "" if code.isdigit() else code
    return ""


def _not_sent(error: Exception) -> bool:
    """Return whether no connection was made, so that the outcome is not even ambiguous.

    aiobotocore calls any broken connection an ``EndpointConnectionError``; its cause is the
    error of the library below.
    """
    if isinstance(error, boto.EndpointConnectionError):
        inner = error.kwargs.get("error")
        aiohttp = sys.modules.get("aiohttp")  # imported by s3fs, and nobody else
        theirs = (aiohttp.ClientConnectorError,) if aiohttp is not None else ()
        return isinstance(inner, (NewConnectionError, socket.gaierror, *theirs))
    return isinstance(error, boto.ConnectTimeoutError | boto.ProxyConnectionError)


# s3fs's options for files, listings and transfers, which are not used here.
_WITHOUT_EFFECT: Final = {
    *("default_block_size", "default_fill_cache", "default_cache_type", "fixed_upload_size"),
    *("listings_expiry_time", "max_concurrency", "max_paths", "skip_instance_cache"),
    *("use_listings_cache", "version_aware"),
}
_TEXTS: Final = {
    "key": "aws_access_key_id",
    "username": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "password": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "endpoint_url",
}
"""Options that are texts -> parameters of ``create_client``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Parameters for botocore; never shown, since they may hold credentials."""

    profile: str | None = field(default=None, repr=False)
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Parameters of ``Session.create_client``."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Parameters of ``botocore.config.Config``."""
    anonymous: bool = False
    """Whether requests are not signed."""
    request: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Goes with every request."""


class _OfS3:
    """Stands in for s3fs where fsspec looks up the configuration of a class."""

    protocol: Final = ("s3", "s3a")


def base_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of botocore's configuration: defaults, then the user's."""
    config: dict[str, Any] = {
        "connect_timeout": limits.CONNECT_TIMEOUT_S,
        "read_timeout": limits.READ_TIMEOUT_S,
        "max_pool_connections": limits.CONNECTIONS_MAX,
        "retries": {"total_max_attempts": 1},
    }
    # Trailing checksums, botocore's default since 1.36, break S3-compatible servers.
    for option in ("request_checksum_calculation", "response_checksum_validation"):
        if option in Config.OPTION_DEFAULTS:
            config[option] = "when_required"
    return config | dict(given)


def read_settings(options: Mapping[str, object]) -> Settings | None:
    """Return the options as botocore's parameters, or None if only s3fs knows one of them.

    fsspec's own configuration (files, ``FSSPEC_S3_...``) counts, as it does for s3fs.
    """
    rest: dict[str, Any] = apply_config(_OfS3, dict(options))
    for name in _WITHOUT_EFFECT:
        rest.pop(name, None)
    client_kwargs = rest.pop("client_kwargs", None) or {}
    config_kwargs = rest.pop("config_kwargs", None) or {}
    if not isinstance(client_kwargs, Mapping) or not isinstance(config_kwargs, Mapping):
        return None
    if {"config", "service_name"} & set(client_kwargs):
        return None
    client = dict(client_kwargs)
    for name, parameter in _TEXTS.items():
        value = rest.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, str) or parameter in client:
            return None
        client[parameter] = value
    profile = rest.pop("profile", None)
    anonymous = rest.pop("anon", False)
    tls = rest.pop("use_ssl", True)
    payer = rest.pop("requester_pays", False)
    flags = (anonymous, tls, payer)
    if rest or not isinstance(profile, str | None) or not all(isinstance(f, bool) for f in flags):
        return None
    return Settings(
        profile=profile,
        client={"use_ssl": tls} | client,
        config=base_config(config_kwargs),
        anonymous=anonymous,
        request={"RequestPayer": "requester"} if payer else {},
    )
