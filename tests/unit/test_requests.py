"""Requests to buckets: settings of Azure, connections of S3, and what is counted."""

from __future__ import annotations

import pickle
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.identity import ClientSecretCredential, DefaultAzureCredential
from azure.identity.aio import DefaultAzureCredential as OfAsyncio
from buckets import S3Bucket
from faultkit.stores import memory_with, trusting
from faultproxy import Fault, FaultProxy, Kind
from gckit import delete
from metered import MeteredBackend
from shortening import is_short
from simulated_environment import SimulatedEnvironment
from webserver import Reply, WebServer

import ckptstore
from ckptstore import limits
from ckptstore.backends import s3_calls, s3_direct, wire
from ckptstore.backends.azure import AzureBackend, open_azure
from ckptstore.backends.azure_settings import AzureSettings, open_container, read_settings
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.s3_direct import direct_client
from ckptstore.cli.main import run as run_command
from ckptstore.config import Options
from ckptstore.errors import (
    InvalidInputError,
    InvalidUrlError,
    MissingDependencyError,
    StoragePermissionError,
)
from ckptstore.replicas.options import same_place
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store

SIZES = (10, 100) if is_short() else (10, 100, 1000)
PAGE = 1000
PAGE_OF_DOCS = Path(__file__).parents[2] / "docs/reference/requests.md"
Objects = dict[str, bytes]
Work = Callable[[Store], object]


class _Pages(MeteredBackend):
    """Counts a listing by its pages, as an object store does."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Pass on; every thousand objects are a request."""
        for place, info in enumerate(super().list(prefix, after=after)):
            if place and place % PAGE == 0:
                self.around("list", prefix, lambda: None)
            yield info


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), float(step)), "frozen": torch.ones(300)}}


@pytest.fixture(scope="module")
def stores() -> dict[int, Objects]:
    """Return the objects of stores with so many versions, all in one history."""
    environment = SimulatedEnvironment()
    backend = MemoryBackend("requests", environment=environment)
    found: dict[int, Objects] = {}
    with Store(create_on(backend, environment=environment, prober=trusting)) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(max(SIZES)):
            run.save(_state(step), step=step, metrics={"loss": 1.0 / (1 + step)})
            if step + 1 in SIZES:
                found[step + 1] = {key: item.data for key, item in backend.objects.items()}
    return found


def _opened(backend: Backend) -> Store:
    options = Options(workers=2)
    environment = SimulatedEnvironment(9)
    return Store(open_on(backend, environment=environment, options=options, prober=trusting))


def _counted(backend: MemoryBackend, work: Work) -> int:
    """Return the requests of a process that opens the store and does some work."""
    meter = _Pages(backend)
    with _opened(meter) as store:
        work(store)
    calls = meter.snapshot()
    # A small pack is one PUT, when its writer commits.
    silent = ("open_writer", "writer.write")
    return sum(one.calls for name, one in calls.items() if name not in silent)


def _half(store: Store) -> list[str]:
    return [f"#{version.id}" for version in store.versions()][::2]


def _condemn_half(store: Store) -> None:
    delete(store, *(ref[1:] for ref in _half(store)))


def _policy(store: Store) -> object:
    return store.retain({"full": "last 5, every 2 steps, within 1h"})


OPERATIONS: dict[str, tuple[tuple[Work, ...], Work]] = {
    "open": ((), lambda store: None),
    "list the versions": ((), lambda store: store.versions()),
    "load the latest": ((), lambda store: store.load("gpt")),
    "save": ((), lambda store: store.run("gpt").save(_state(-1), step=5000)),
    "tag": ((), lambda store: store.tag("gpt", "good")),
    "fork": ((), lambda store: store.fork("gpt@5", "tuned")),
    "rm, half of the versions": ((), lambda store: store.remove(_half(store))),
    "retain, half of the versions": ((), _policy),
    "gc, the first": ((), lambda store: store.gc()),
    "gc, nothing to do": ((Store.gc,), lambda store: store.gc()),
    "gc --dry-run, nothing to do": ((Store.gc,), lambda store: store.gc(dry_run=True)),
    "gc, one new version": (
        (Store.gc, lambda store: store.run("gpt").save(_state(-1), step=5000)),
        lambda store: store.gc(),
    ),
    "gc that condemns half": ((Store.gc, _condemn_half), lambda store: store.gc(repack_below=None)),
    "gc that deletes this half": (
        (_condemn_half, lambda store: store.gc(repack_below=None)),
        lambda store: store.gc(grace_s=0, repack_below=None),
    ),
}
"""What other processes do before, and what is counted."""


def _measured(stores: dict[int, Objects], name: str) -> list[int]:
    before, work = OPERATIONS[name]
    counts = []
    for size in SIZES:
        backend = memory_with(stores[size])
        for one in before:
            with _opened(backend) as store:
                one(store)
        counts.append(_counted(backend, work))
    return counts


def _told() -> dict[str, list[int]]:
    """Return the rows of the page."""
    cells = r" \| ".join([r"([\d,]+)"] * 3)
    rows = re.findall(rf"^\| ([^|]+) \| {cells} \|", PAGE_OF_DOCS.read_text("utf-8"), re.MULTILINE)
    return {
        name: [int(count.replace(",", "")) for count in counts]
        for name, *counts in rows
        if name != "operation"
    }


def test_the_page_has_the_measured_operations() -> None:
    """No more, no less."""
    assert list(_told()) == list(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_requests(stores: dict[int, Objects], name: str) -> None:
    """The page tells the requests of each operation, for each number of versions."""
    assert _measured(stores, name) == _told()[name][: len(SIZES)]


@pytest.mark.parametrize(
    "name", ["open", "list the versions", "save", "rm, half of the versions", "gc, nothing to do"]
)
def test_a_server_gets_these_requests(
    stores: dict[int, Objects], s3_bucket: S3Bucket, s3_proxy: FaultProxy, name: str
) -> None:
    """HTTP requests to S3, counted between client and server."""
    before, work = OPERATIONS[name]
    memory = memory_with(stores[10])
    for one in before:
        with _opened(memory) as store:
            one(store)
    for key, item in memory.objects.items():
        s3_bucket.write(key, item.data)
    counter = Fault(kind=Kind.DELAY, times=0)
    s3_proxy.set(counter)
    url = f"http://127.0.0.1:{s3_proxy.port}"
    with _opened(open_backend(s3_bucket.url, **s3_bucket.options(url))) as store:
        work(store)
    uploads = 1 if name.startswith("gc") else 0  # that dead writers left, which only S3 has
    assert counter.seen == _told()[name][0] + uploads


def test_commands_read_the_log_as_often_for_many_refs(
    stores: dict[int, Objects], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids and steps on a command line: two are found by as many listings as half of a store."""
    listings: list[str] = []

    def listing(self: MemoryBackend, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        listings.append(prefix)
        return plain(self, prefix, after=after)

    plain = MemoryBackend.list
    monkeypatch.setattr(MemoryBackend, "list", listing)
    counts = []
    for size in (2, 50):
        url = f"memory://commands-{size}"
        backend = open_backend(url)
        for key, data in stores[100].items():
            backend.put(key, data)
        with ckptstore.open(url, read_only=True) as store:
            ids = [version.id[:12] for version in store.versions()[1 : 1 + size : 2]]
        refs = [f"gpt@{step}" for step in range(2, 2 + size, 2)]
        for words in (["--dry-run", *ids, *refs], [*ids, *refs]):
            listings.clear()
            assert run_command(["rm", *words, "--store", url]) == 0, capsys.readouterr().err
            counts.append(len(listings))
    assert counts[:2] == counts[2:]


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


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """Return the URL of a server that answers each request with three bytes."""
    with WebServer(tmp_path) as server:
        server.change = lambda *_: Reply(status=200, body=b"abc")
        yield server.url


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="an option of Linux")
def test_each_answer_is_acknowledged_at_once(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system forgets it after an answer: it is asked before each, on one connection."""
    asked: list[int] = []
    ask = wire.ask

    def note(connection: object) -> None:
        asked.append(id(connection))
        ask(connection)

    monkeypatch.setattr(wire, "ask", note)
    settings = s3_calls.read_settings({"key": "k", "secret": "s", "endpoint_url": endpoint})
    assert settings is not None
    calls = direct_client(settings)
    for _ in range(3):
        assert calls.read({"Bucket": "b", "Key": "k"}, lambda _: None) == b"abc"
    calls.close()

    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_a_client_of_another_make_is_left_alone() -> None:
    """A later botocore may keep its connections elsewhere: all works, slower."""
    for session in (None, SimpleNamespace(), SimpleNamespace(_manager=SimpleNamespace())):
        client = SimpleNamespace(_endpoint=SimpleNamespace(http_session=session))
        assert not s3_direct.acknowledge_at_once(client)
