"""Locations and credentials of Azure Blob Storage.

Storage options have the names that adlfs gave them, variables of the environment those of Azure's
command line; an identity is found by ``azure-identity``.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import requests
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import ContainerClient
from requests.adapters import HTTPAdapter
from requests.utils import select_proxy
from urllib3.util import Retry, Timeout

from ckptstore import limits
from ckptstore.backends.bucket import BucketLocation, Foreign, parse_bucket_url
from ckptstore.config import variable
from ckptstore.errors import InvalidUrlError, MissingDependencyError, StoragePermissionError

_TEXTS: Final = {
    *("account_host", "account_key", "account_name", "api_version", "client_id"),
    *("client_secret", "connection_string", "sas_token", "tenant_id"),
}
_KNOWN: Final = _TEXTS | {"anon", "credential"}
_SECRETS: Final = ("account_key", "client_secret", "connection_string", "credential", "sas_token")
# adlfs's options for files, listings and transfers, which are not used here.
_WITHOUT_EFFECT: Final = {
    *("assume_container_exists", "asynchronous", "blocksize", "default_cache_type"),
    *("default_fill_cache", "listings_expiry_time", "loop", "max_concurrency", "max_paths"),
    *("skip_instance_cache", "use_listings_cache", "version_aware"),
}
_CONTAINER: Final = re.compile(r"(?=.{3,63}\Z)[a-z0-9]+(-[a-z0-9]+)*\Z|\$[a-z]{3,8}\Z")
_HOST: Final = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+\Z")
NO_CREDENTIALS: Final = (
    "set AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_KEY, give account_key=, sas_token= or"
    " credential=, or anon=True for a public container; with azure-identity installed, az login"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """A container, and the options for reaching it; these are never shown, as some are secret."""

    container: str
    host: str
    """Host of the account's blobs, if the URL names the account; else empty."""
    options: Mapping[str, Any] = field(repr=False)

    def text(self, name: str) -> str:
        """Return an option that is a text; empty if it is not given."""
        return self.options.get(name) or ""

    @property
    def has_credentials(self) -> bool:
        """Return whether the options alone say as whom to come."""
        return any(self.options.get(name) for name in (*_SECRETS, "anon"))


def read_settings(url: str, options: Mapping[str, object]) -> tuple[BucketLocation, AzureSettings]:
    """Return the place of a store and the settings of its client.

    Raises
    ------
    InvalidUrlError
        The URL is malformed or has credentials; or an option is unknown, or is no text.
    """
    scheme, _, rest = url.partition("://")
    netloc, slash, path = rest.partition("/")
    container, at, host = netloc.rpartition("@")
    if at and not _HOST.match(host):
        msg = f"a {scheme}:// URL with something else than an account's host after the @"
        raise InvalidUrlError(msg, hint=f"{scheme}://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH")
    location = parse_bucket_url(f"{scheme}://{container or netloc}{slash}{path}")
    if not _CONTAINER.match(location.bucket):
        msg = f"no container can be called {location.bucket!r:.80}"
        raise InvalidUrlError(msg, hint=f"{scheme}://CONTAINER/PATH; 3-63 of a-z, 0-9 and -")
    given = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    for name, value in given.items():
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, 1) or sorted(_KNOWN)
            msg = f"no option of {scheme}:// is called {name!r:.40}"
            raise InvalidUrlError(msg, hint="perhaps " + ", ".join(near))
        if name in _TEXTS and not isinstance(value, str | None):
            raise InvalidUrlError(f"the option {name} is a text, not {type(value).__name__}")
    if inspect.iscoroutinefunction(getattr(given.get("credential"), "get_token", None)):
        msg = "the credential is one for asyncio"
        raise InvalidUrlError(msg, hint="take the class of azure.identity, not azure.identity.aio")
    host = host.replace(".dfs.", ".blob.", 1) if at else ""
    settings = AzureSettings(container=location.bucket, host=host, options=given)
    return replace(location, url=url.rstrip("/")), settings


class _Adapter(HTTPAdapter):
    """Sends large bodies in parts, each within the timeout.

    Python counts the timeout of a connection for a whole body that is sent at once: a pack of 64
    MiB would have to arrive within ten seconds, and never would by a slow network.
    """

    direct: Foreign = None
    """Connections to the server, once a request went there by no proxy: for the short path."""

    def send(self, request: Foreign, *arguments: Foreign, **options: Foreign) -> Foreign:
        if isinstance(request.body, bytes) and len(request.body) > limits.STREAM_BYTES:
            view, step = memoryview(request.body), limits.STREAM_BYTES
            request.body = [view[start : start + step] for start in range(0, len(view), step)]
        answer = super().send(request, *arguments, **options)
        if self.direct is None and not select_proxy(request.url, options.get("proxies")):
            verify, cert = options["verify"], options["cert"]
            pool: Foreign = self.get_connection_with_tls_context(request, verify, cert=cert)
            pool.timeout = Timeout(connect=limits.CONNECT_TIMEOUT_S, read=limits.READ_TIMEOUT_S)
            self.direct = pool
        return answer


def open_container(settings: AzureSettings) -> Foreign:
    """Return a new client of a container.

    Raises
    ------
    InvalidUrlError
        No account is named, or an option is malformed.
    StoragePermissionError
        There are no credentials.
    MissingDependencyError
        An option needs azure-identity, which is not installed.
    """
    host = settings.host or settings.text("account_host")
    account = settings.text("account_name") or host.rpartition("://")[2].partition(".")[0]
    if (client := _by_line(settings, account)) is not None:
        return client
    of_environment = variable("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    ours = not settings.has_credentials and of_environment in {"", account or of_environment}
    account = account or of_environment
    if not account:
        msg = f"no account is named for the container {settings.container}"
        hint = "give account_name=, or set AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING"
        raise InvalidUrlError(msg, hint=hint)
    host = host or f"{account}.blob.core.windows.net"
    url = host if "://" in host else f"https://{host}"
    credential = _credential(settings, account, from_environment=ours)
    make = partial(ContainerClient, url, settings.container, credential=credential)
    return _client(settings, make)


def _by_line(settings: AzureSettings, account: str) -> Foreign:
    """Return a client by a connection string, or None if none is given for this account."""
    given = settings.text("connection_string")
    line = given
    if not line and not settings.has_credentials:
        line = variable("AZURE_STORAGE_CONNECTION_STRING")
    if not line:
        return None
    make = partial(ContainerClient.from_connection_string, line, settings.container)
    client = _client(settings, make)
    found = client.account_name
    if not account or found == account or (given and not found):
        return client
    client.close()
    if given:
        msg = f"the connection string is of the account {found!r:.40}, not of {account!r:.40}"
        raise InvalidUrlError(msg, hint="leave out the other account, or change one of them")
    return None


def _client(settings: AzureSettings, make: Callable[..., Foreign]) -> Foreign:
    """Return ``make(...)`` with everything that does not depend on the credentials."""
    session = requests.Session()
    # Without urllib3's retries, whose error has the URL in its text, and with it a SAS token.
    retries = Retry(total=False, redirect=False, raise_on_status=False)
    adapter = _Adapter(max_retries=retries, pool_maxsize=limits.CONNECTIONS_MAX)
    for protocol in ("https://", "http://"):
        session.mount(protocol, adapter)
    connect_s, read_s = limits.CONNECT_TIMEOUT_S, limits.READ_TIMEOUT_S
    transport = RequestsTransport(
        session=session, connection_timeout=connect_s, read_timeout=read_s
    )
    version = settings.text("api_version")
    try:
        return make(
            transport=transport,
            retry_total=0,
            max_single_put_size=limits.AZURE_PUT_BYTES_MAX,
            max_single_get_size=limits.AZURE_PUT_BYTES_MAX,
            **({"api_version": version} if version else {}),
        )
    except ValueError:  # its text may hold a part of an option
        raise InvalidUrlError(
            "the connection string, account_host or api_version is malformed, or an identity would"
            " have to come to a host without https",
            hint="AccountName=NAME;AccountKey=KEY, and BlobEndpoint=URL for another endpoint",
        ) from None


def _credential(settings: AzureSettings, account: str, *, from_environment: bool) -> Foreign:
    """Return the first credential of the options, then of the environment, then an identity's."""
    if settings.options.get("anon"):
        return None
    if (given := settings.options.get("credential")) is not None and not isinstance(given, str):
        return given
    key = settings.text("account_key") or (given if isinstance(given, str) else "")
    token = settings.text("sas_token")
    if from_environment:
        key = variable("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY")
        token = variable("AZURE_STORAGE_SAS_TOKEN")
    if key:
        return AzureNamedKeyCredential(account, key)
    if token:
        return AzureSasCredential(token.lstrip("?"))
    return _identity(settings, account)


def _identity(settings: AzureSettings, account: str) -> Foreign:
    """Return the credential of a service principal, or that of this machine or its user."""
    names = ("tenant_id", "client_id", "client_secret")
    principal = [settings.text(name) for name in names]
    try:
        from azure.identity import ClientSecretCredential, DefaultAzureCredential
    except ImportError as error:
        if settings.text("client_secret"):
            msg = "client_secret= needs a package that is not installed (azure.identity)"
            raise MissingDependencyError(msg, hint="pip install azure-identity") from error
        msg = f"no credentials for the account {account}"
        raise StoragePermissionError(msg, hint=NO_CREDENTIALS) from error
    if settings.text("client_secret"):
        if not all(principal):
            msg = "client_secret= is given without tenant_id= or client_id="
            raise InvalidUrlError(msg, hint="a service principal takes all three")
        return ClientSecretCredential(*principal)
    client_id = settings.text("client_id")
    more = {"managed_identity_client_id": client_id} if client_id else {}
    return DefaultAzureCredential(**more)
