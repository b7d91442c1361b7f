"""Locations, options and credentials of Azure: which account is asked, and as whom."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.identity import ClientSecretCredential, DefaultAzureCredential
from azure.identity.aio import DefaultAzureCredential as OfAsyncio

from ckptstore import limits
from ckptstore.backends.azure import AzureBackend, open_azure
from ckptstore.backends.azure_settings import AzureSettings, open_container, read_settings
from ckptstore.errors import (
    InvalidInputError,
    InvalidUrlError,
    MissingDependencyError,
    StoragePermissionError,
)
from ckptstore.replicas.options import same_place

KEY = "c3VwM3JzZWNyZXRzdXAzcnNlY3JldA=="
LINE = f"AccountName=acc;AccountKey={KEY};EndpointSuffix=core.windows.net"
VARIABLES = (
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"),
    *("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def settings(url: str = "az://container/p", **options: object) -> AzureSettings:
    """Return the settings of a location."""
    return read_settings(url, options)[1]


def client(url: str = "az://container/p", **options: object) -> Any:  # noqa: ANN401 - azure's
    """Return the client that a location leads to."""
    return open_container(settings(url, **options))


@pytest.mark.parametrize(
    ("url", "endpoint", "prefix"),
    [
        ("az://container/p", "https://acc.blob.core.windows.net", "p/"),
        ("abfs://container", "https://acc.blob.core.windows.net", ""),
        ("abfss://container@acc.dfs.core.windows.net/a/b/", "https://acc.blob.core.windows.net",
         "a/b/"),
        ("az://container@other.blob.core.windows.net/p", "https://other.blob.core.windows.net",
         "p/"),
        ("abfs://container@gov.dfs.core.usgovcloudapi.net/p",
         "https://gov.blob.core.usgovcloudapi.net", "p/"),
    ],
)  # fmt: skip
def test_urls(url: str, endpoint: str, prefix: str) -> None:
    """The account stands in the URL, as the host of its files or blobs, or in an option."""
    location, found = read_settings(url, {"account_key": KEY})
    named = {} if "@" in url else {"account_name": "acc"}
    made = client(url, account_key=KEY, **named)
    assert made.url.partition("?")[0] == f"{endpoint}/container"
    assert (location.bucket, location.prefix) == ("container", prefix)
    assert location.url == url.rstrip("/")
    assert found.container == "container"


def test_urls_of_one_place_are_one() -> None:
    """The three schemes mean the same."""
    assert same_place("az://container/p", "abfs://container/p/")
    assert same_place("abfss://c@a.dfs.core.windows.net/p", "abfs://c@a.dfs.core.windows.net/p")
    assert not same_place("az://container/p", "az://container/q")


def test_a_misspelt_option_is_named() -> None:
    """With the name that was meant, and without its value."""
    with pytest.raises(InvalidUrlError, match="acount_key") as caught:
        open_azure("az://container/p", acount_key=KEY)
    assert "account_key" in caught.value.hint
    assert KEY not in str(caught.value)
    with pytest.raises(InvalidUrlError, match="account_key is a text, not int"):
        open_azure("az://container/p", account_key=3)
    open_azure("az://container/p", default_cache_type="none", use_listings_cache=False)


def test_the_class_of_packs_is_checked() -> None:
    """Before anything is sent: a tier of Azure, and one that can be read."""
    assert isinstance(open_azure("az://container/p", pack_class="Hot"), AzureBackend)
    assert isinstance(open_azure("az://container/p", pack_class="Cold"), AzureBackend)
    for wrong in ("Archive", "ARCHIVE", "NEARLINE", "cool"):
        with pytest.raises(InvalidInputError):
            open_azure("az://container/p", pack_class=wrong)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"account_key": KEY}, AzureNamedKeyCredential),
        ({"sas_token": "?sv=1&sig=x"}, AzureSasCredential),
        ({"credential": KEY}, AzureNamedKeyCredential),
        ({"credential": AzureSasCredential("x")}, AzureSasCredential),
        ({"tenant_id": "t", "client_id": "i", "client_secret": "s"}, ClientSecretCredential),
        ({"client_id": "i"}, DefaultAzureCredential),
        ({}, DefaultAzureCredential),
        ({"anon": True}, type(None)),
    ],
)
def test_credentials_of_options(options: dict[str, Any], kind: type) -> None:
    """An option says as whom to come; without one it is whoever this machine is."""
    from ckptstore.backends.azure_settings import _credential

    found = _credential(settings(**options), "acc", from_environment=False)
    assert type(found) is kind


@pytest.mark.parametrize(
    ("variables", "url", "account", "signed"),
    [
        ({"CONNECTION_STRING": LINE}, "az://container/p", "acc", True),
        ({"CONNECTION_STRING": LINE}, "abfs://container@acc.dfs.core.windows.net", "acc", True),
        ({"CONNECTION_STRING": LINE}, "abfs://container@other.dfs.core.windows.net", "other",
         False),
        ({"ACCOUNT": "acc", "KEY": KEY}, "az://container/p", "acc", True),
        ({"ACCOUNT_NAME": "acc", "ACCOUNT_KEY": KEY}, "az://container/p", "acc", True),
        ({"KEY": KEY}, "abfs://container@acc.dfs.core.windows.net", "acc", True),
        ({"ACCOUNT": "other", "KEY": KEY}, "abfs://container@acc.dfs.core.windows.net", "acc",
         False),
    ],
)  # fmt: skip
def test_credentials_of_the_environment(
    variables: dict[str, str], url: str, account: str, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables are used as Azure's command line uses them, and for no account but theirs."""
    for name, value in variables.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    made = client(url)
    assert made.account_name == account
    assert hasattr(made.credential, "account_key") is signed


def test_options_go_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A credential that is given is never replaced or completed by one that lies around."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", LINE)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=other")
    assert client(account_name="mine", account_key=KEY).account_name == "mine"
    assert client(account_name="acc", anon=True).credential is None
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    assert client(account_name="acc").credential.signature == "sig=other"


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("az://container/p", {}, "no account is named"),
        ("az://container/p", {"connection_string": "nonsense"}, "malformed"),
        ("abfs://container@other.dfs.core.windows.net/p", {"connection_string": LINE},
         "of the account 'acc', not of 'other'"),
        ("az://container/p", {"account_name": "acc", "client_secret": "sup3rsecret"}, "tenant_id"),
        ("az://container/p", {"account_name": "acc", "credential": OfAsyncio()}, "asyncio"),
        ("az://container/p", {"account_host": "http://127.0.0.1:1/a", "account_name": "a",
         "credential": DefaultAzureCredential()}, "https"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_told(url: str, options: dict[str, Any], said: str) -> None:
    """As an error of the location with the next step; no secret is in it."""
    with pytest.raises(InvalidUrlError, match=said) as caught:
        client(url, **options)
    assert caught.value.hint
    assert not any(secret in repr(caught.value) for secret in ("sup3rsecret", KEY))


def test_without_azure_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and tokens work; where nothing else is given the error lists what can be."""
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    assert client(account_name="acc", account_key=KEY).account_name == "acc"
    with pytest.raises(StoragePermissionError, match="no credentials") as caught:
        client(account_name="acc")
    assert "AZURE_STORAGE_KEY" in caught.value.hint
    with pytest.raises(MissingDependencyError, match="client_secret"):
        client(account_name="acc", client_secret="s")  # noqa: S106 - of no one


def test_an_older_server_and_the_largest_pack() -> None:
    """The version of the API can be chosen; one Put Blob takes the largest pack."""
    made = client(account_name="acc", account_key=KEY, api_version="2021-12-02")
    assert made.api_version == "2021-12-02"
    assert limits.PACK_BYTES_MAX < limits.AZURE_PUT_BYTES_MAX


def test_settings_show_no_secret_and_survive_a_pickle() -> None:
    """A backend goes to other processes with its options, and shows none of them."""
    backend = open_azure("az://container/p", connection_string=LINE)
    again: AzureBackend = pickle.loads(pickle.dumps(backend))  # noqa: S301 - our own
    assert again._client.get().account_name == "acc"
    shown = (repr(backend), repr(again), str(again.url), repr(settings(connection_string=LINE)))
    assert not any(KEY in text for text in shown)
    again.close()
