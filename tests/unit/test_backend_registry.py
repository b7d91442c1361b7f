"""Locations lead to the right backend, or to an error that says what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends import registry
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import PosixBackend
from ckptstore.backends.registry import open_backend, scheme_of
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.errors import InvalidUrlError, MissingDependencyError, StorageError


@pytest.mark.parametrize(
    ("location", "scheme"),
    [
        ("/a/b", ""), ("relative/path", ""), ("C3://x", "c3"), ("S3://bucket/x", "s3"),
        ("memory://x", "memory"), ("simplecache::s3://b/x", "simplecache::s3"), ("a:b/c", ""),
        ("arrow_hdfs://host/x", "arrow_hdfs"),
        ("simplecache::arrow_hdfs://host/x", "simplecache::arrow_hdfs"), ("folder/a://b", ""),
        ("a::b", ""), ("x::", ""), ("simplecache::/data/x", "simplecache"),
    ],
)  # fmt: skip
def test_schemes(location: str, scheme: str) -> None:
    """The scheme is what stands before ``://``, in lower case; a path has none."""
    assert scheme_of(location) == scheme


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, path objects and file URLs lead to the same folder; ``~`` is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for location in (str(tmp_path / "x y"), tmp_path / "x y", "x y", "~/x y"):
        backend = open_backend(location, retry=False)
        assert isinstance(backend, PosixBackend)
        assert backend.url == str(tmp_path / "x y")
    assert open_backend(f"file://{tmp_path}/x%20y", retry=False).url == str(tmp_path / "x y")
    assert open_backend(f"local://{tmp_path}", retry=False).name == "local"
    assert not (tmp_path / "x y").exists(), "opening creates nothing"
    for name in (
        "~no-such-user",
        "a::b/c",
        "./~root",
        "./a::b",
        "$HOME",
        "%41",
        "C:x",
        "new\nline",
    ):
        assert open_backend(name, retry=False).url == str(tmp_path / name)
    assert open_backend(f"/{tmp_path}", retry=False).url == str(tmp_path)  # two slashes
    (tmp_path / "memory:x").mkdir()
    assert open_backend("memory:x", retry=False).url == str(tmp_path / "memory:x")


@pytest.mark.parametrize("location", ["x", "./x", ".", "~no-such-user", "a::b"])
def test_a_working_directory_that_was_deleted(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path has no meaning there, which the error says; an absolute one works."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match=r"working directory of .* was deleted -- "):
        ckptstore.open(location, create=True)
    ckptstore.open(tmp_path / "x", create=True).close()


def test_a_home_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without HOME and an entry of the user, ``~`` is refused, and makes no folder of that name."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(InvalidUrlError, match="set HOME"):
        open_backend("~/ckpts")


@pytest.mark.filterwarnings("ignore:The 'arrow_hdfs' protocol:DeprecationWarning")
def test_a_url_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL whose scheme nobody serves, or whose package is missing, is never a relative path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    for location, error in (
        ("arrow_hdfs://host/x", MissingDependencyError),
        ("my_hdfs://host/x", InvalidUrlError),
        ("2fs://host/x", InvalidUrlError),
    ):
        with pytest.raises(error):
            ckptstore.open(location, create=True)
    assert list(tmp_path.iterdir()) == []
    assert open_backend("./2fs:/host/x", retry=False).url == str(tmp_path / "2fs:" / "host" / "x")


@pytest.mark.parametrize("error", [ImportError("Install adlfs"), AttributeError("no such name")])
def test_a_package_that_does_not_serve_its_scheme(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without what fsspec looks for in it, as adlfs for ``adl``, counts as missing."""

    def get_filesystem_class(_scheme: str) -> None:
        raise error

    monkeypatch.setattr("fsspec.get_filesystem_class", get_filesystem_class)
    with pytest.raises(MissingDependencyError, match="adl://") as caught:
        open_backend("adl://host/x")
    assert str(error) in caught.value.hint


def test_retry_is_the_default() -> None:
    """A backend comes with retries unless they are declined."""
    assert isinstance(open_backend("memory://x"), RetryingBackend)
    assert isinstance(open_backend("memory://x", retry=False), MemoryBackend)


@pytest.mark.parametrize(
    "location",
    [
        "", "memory://", "file://otherhost/x", "file://", "s3://", "s3:///x", "s3://b/../x",
        "s3://b//x", "s3://b/x?versionId=1", "s3://base--use1-az4--x-s3/ckpts",
        "s3a://base--usw2-lax1-az1--x-s3", "s3://access--use1-az4--xa-s3/x", "gs://b#x",
        "az://", "az://Container/x", "az://c/x", "az://container/x?sv=2022&sig=x",
        "abfss://container@account/x", "abfss://container@account.dfs.core.windows.net:443/x",
        "abfss://@account.dfs.core.windows.net/x", "nosuchscheme://x",
        "no_such_scheme://host/x", "1st://host/x", "s 3://bucket/x", "_://x", "://x", "a\0b",
        "  ", "/", "file:///", "s3://b/a/./x", "s3://b/.", "s3a://b/./x", "gs://b/a/./x",
        "az://container/a/./x", "abfss://container@account.dfs.core.windows.net/a/../x",
        "http://host/a/./x", "https://host/../x", "memory://a/./b", "memory://a/../b",
        "memory://a//b", "memory://a\nb", "s3://b/x\0", "gs://b/\udc80",
    ],
)  # fmt: skip
def test_bad_locations(location: str) -> None:
    """What no backend serves is refused as such."""
    with pytest.raises(InvalidUrlError):
        open_backend(location)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("", "the URL is empty -- is CKPTSTORE_URL set"), ("s3:/bucket/x", "did you mean s3://"),
        ("file:/data/x", "did you mean file:///"), ("file:x", "did you mean file:///"),
        ("memory:x", "did you mean memory://...? A folder of this name is ./memory:..."),
        ("S3:bucket/x", "did you mean S3://"), ("https:host/x", "did you mean https://"),
        ("C:\\ckpts", "a drive of Windows"), ("d:/ckpts", "a drive of Windows"),
        ("zip://x.zip", "write zip://::FILE"), ("tar://x.tar", "write tar://::FILE"),
    ],
)  # fmt: skip
def test_typos_are_named(location: str, said: str) -> None:
    """What was surely meant otherwise is not taken for a path, and the message says what to do."""
    with pytest.raises(InvalidUrlError, match=re.escape(said)):
        open_backend(location)
    assert open_backend("./s3:/bucket", retry=False).name in {"local", "parallel"}


def test_a_file_is_no_location(tmp_path: Path) -> None:
    """The message says so before anything is tried below it."""
    (tmp_path / "weights").write_text("x")
    for location in (tmp_path / "weights", f"file://{tmp_path}/weights"):
        with pytest.raises(InvalidUrlError, match="is a file, not a folder"):
            open_backend(location)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_settings_in_a_url_are_refused(scheme: str) -> None:
    """The hint shows both ways to give them; the query is not repeated, as it may hold a secret."""
    with pytest.raises(InvalidUrlError) as caught:
        open_backend(f"{scheme}://bucket/x?requests=7")
    assert "requests=7" not in str(caught.value)
    assert "ckptstore.open(url, requests=16)" in caught.value.hint
    assert "--option requests=16" in caught.value.hint


def test_credentials_in_a_url_are_not_repeated() -> None:
    """A URL with credentials is refused, and the message does not show them."""
    for location in (
        "s3://AKIA123:sup3rsecret@bucket/x",
        "gs://user:sup3rsecret@bucket/x",
        "az://account:sup3rsecret@container/x",
        "abfs://container@user:sup3rsecret@account.dfs.core.windows.net/x",
    ):
        with pytest.raises(InvalidUrlError) as caught:
            open_backend(location)
        assert "sup3rsecret" not in str(caught.value)
    shown = open_backend("ftp://user:sup3rsecret@host/x?token=sup3rsecret", retry=False)
    assert "sup3rsecret" not in shown.url + repr(shown)
    assert shown.url == "ftp://host/x"


@pytest.mark.parametrize("location", ["/some/path", "memory://x"])
def test_options_that_nobody_takes(location: str) -> None:
    """A misspelled option is an error, not silence, and its value is not shown."""
    with pytest.raises(InvalidUrlError, match="endpoint") as caught:
        open_backend(location, endpoint="sup3rsecret")
    assert "sup3rsecret" not in str(caught.value)


def test_kind_can_be_given(tmp_path: Path) -> None:
    """Where the mount table does not tell, the user can."""
    assert open_backend(tmp_path, kind="nfs").name == "nfs"
    with pytest.raises(InvalidUrlError):
        open_backend(tmp_path, kind="floppy")


@pytest.mark.parametrize(
    ("scheme", "extra", "module"),
    [
        ("s3", "s3", "botocore"),
        ("s3", "s3", "s3fs"),  # for an option that only s3fs knows
        ("gs", "gcs", "gcsfs"),
        ("abfss", "azure", "azure.storage.blob"),
    ],
)
def test_missing_package_names_the_extra(
    scheme: str, extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package of an extra the error says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    names = ("s3", "s3_direct", "gcs", "azure", "azure_settings")
    ours = [f"ckptstore.backends.{name}" for name in names]
    options: dict[str, Any] = {"cache_regions": True} if module == "s3fs" else {}
    for name in (*ours, f"{module}.core", "ckptstore.backends.s3_fsspec"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingDependencyError, match=rf"ckptstore\[{extra}\]"):
        open_backend(f"{scheme}://bucket/x", **options)


def test_third_party_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point serves its scheme; one that cannot be loaded is an error of our tree."""
    value = "ckptstore.backends.memory:open_memory"
    monkeypatch.setattr(
        metadata,
        "entry_points",
        lambda group, name: [metadata.EntryPoint(name, value, registry.ENTRY_POINTS)],
    )
    assert isinstance(open_backend("mine://somewhere", retry=False), MemoryBackend)
    value = "no_such_module:x"
    with pytest.raises(MissingDependencyError):
        open_backend("mine://somewhere")


def test_local_paths_import_no_storage_library(tmp_path: Path) -> None:
    """Opening a path or a memory store imports neither fsspec nor numpy nor torch."""
    program = (
        "import sys; from ckptstore.backends.registry import open_backend;"
        f"open_backend({str(tmp_path)!r}); open_backend('memory://x');"
        "heavy = {'fsspec', 's3fs', 'gcsfs', 'azure', 'numpy', 'torch'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
