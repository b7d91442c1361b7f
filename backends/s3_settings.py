"""Translates the storage options of S3, which are those of s3fs, to botocore's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from botocore.config import Config
from fsspec.config import apply_config

from ckptstore import limits

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
