"""Azure Blob Storage keeps the contract, on azurite, Microsoft's emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
import urllib3.connection
from buckets import AzureBucket, open_bucket
from doors import BucketDoor
from local_servers import AZURE_ACCOUNT, AZURE_KEY, SECRET

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.errors import ObjectNotFoundError
from ckptstore.testing.answers import AnswerConformance
from ckptstore.testing.conformance import KEYS, BackendConformance


@pytest.mark.short(sample=6)
class TestAzure(BucketDoor, BackendConformance):
    """The server is another process; the side door is plain HTTP."""

    backend_name = "azure"
    secrets = (SECRET, AZURE_KEY)
    thin = True

    @pytest.fixture
    def backend(self, azure_bucket: AzureBucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new container, without retries."""
        yield from self.opened(azure_bucket, thin=self.thin)

    @pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.slow), 4])
    def test_long_listings_continue_with_the_folder(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch, page: int
    ) -> None:
        """From every position in every prefix the rest is listed, however short the pages are."""
        monkeypatch.setattr(limits, "LIST_PAGE_OBJECTS", page)
        keys = sorted([*KEYS, "a/x.1/y", "a/z/1-2", "commits/000000/x", "packs/ab/2.pack.old"])
        for key in keys:
            self.raw_write(key, b"x")
        cuts = ["", *keys, "a/", "a/y", "b", "commits/000000/9", "packs/aa/0", "zz"]
        for prefix in ("", "a", "a/", "a/z", "commits/", "packs/a", "packs/ab/"):
            for after in cuts:
                found = [info.key for info in backend.list(prefix, after=after)]
                assert found == [k for k in keys if k.startswith(prefix) and k > after], after

    def test_directories_are_no_objects(self, backend: Backend) -> None:
        """Accounts with a hierarchical namespace list them as empty blobs, so marked."""
        for name in ("packs", "packs/aa"):
            self.bucket.write(name, b"", **{"x-ms-meta-hdi_isfolder": "true"})
        self.raw_write("packs/aa/1", b"x")
        assert [info.key for info in backend.list("")] == ["packs/aa/1"]
        with pytest.raises(ObjectNotFoundError):
            backend.stat("packs/aa")


@pytest.mark.short(sample=1)
class TestAzureByLibrary(TestAzure):
    """By Microsoft's library alone, which sends what the short path does not know."""

    thin = False

    def test_large_bodies_are_sent_in_parts(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A timeout counts for one part, so that slow networks can send any pack."""
        sent: list[int] = []
        real = urllib3.connection.HTTPConnection.send

        def send(connection: Any, data: Any) -> None:  # noqa: ANN401 - a socket's
            sent.append(len(data))
            real(connection, data)

        monkeypatch.setattr(urllib3.connection.HTTPConnection, "send", send)
        data = bytes(range(256)) * 20_000
        with backend.open_writer("packs/aa/1") as writer:
            writer.write(data)
            writer.commit()
        assert max(sent) == limits.STREAM_BYTES
        assert sum(sent) > len(data)
        assert self.raw_read("packs/aa/1") == data


@pytest.mark.short(sample=7)
class TestAzureAnswers(AnswerConformance):
    """Answers to the short path, and to Microsoft's library for the other requests."""

    thin = True

    def backend_at(self, endpoint: str) -> Backend:
        """Open a container on a server of the suite."""
        host = f"{endpoint}/{AZURE_ACCOUNT}"
        options: dict[str, Any] = {"account_host": host, "account_key": AZURE_KEY}
        options["account_name"] = AZURE_ACCOUNT
        return open_bucket("az://container/store", thin=self.thin, **options)


@pytest.mark.short(sample=1)
class TestAzureLibraryAnswers(TestAzureAnswers):
    """Answers to Microsoft's library alone."""

    thin = False
