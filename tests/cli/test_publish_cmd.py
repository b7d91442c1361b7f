"""publish from the command line, and every command that reads, on the URL of a web server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from webserver import WebServer

import ckptstore
from tests.cli.conftest import Cli


@pytest.fixture
def url(store_path: Path) -> Iterator[str]:
    """Serve the folder of the store; return the store's URL."""
    with WebServer(store_path.parent) as server:
        yield f"{server.url}/{store_path.name}"


def test_a_store_is_published_in_its_place(cli: Cli, store_path: Path) -> None:
    """It writes the index and the page, says where, and does so again."""
    for _ in range(2):
        done = cli("publish", "-s", store_path)
        assert (done.code, done.err) == (0, "")
        assert f"published 6 versions in 2 runs at {store_path}" in done.out
    document = cli("publish", "--json", "-s", store_path).document
    assert (document["versions_count"], document["copy"]) == (6, None)
    assert {"index.html", "published.json"} <= {path.name for path in store_path.iterdir()}
    assert cli("publish", "--quiet", "-s", store_path).out == ""


def test_some_versions_are_published(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """A copy has the versions that are named; more are added by ``--add`` alone."""
    to = tmp_path / "public"
    done = cli("publish", "gpt@best:val_loss", "--to", to, "-s", store_path)
    assert (done.code, done.err) == (0, "")
    assert "copied 1 version, " in done.out
    refused = cli("publish", "gpt@first", "--to", to, "-s", store_path)
    assert refused.code == 7
    assert "besides: gpt@400" in refused.err
    added = cli("publish", "gpt@first", "--to", to, "--add", "--json", "-s", store_path)
    assert len(added.document["copy"]["copied"]) == 1
    with ckptstore.open(to) as public:
        assert [version.step for version in public.versions()] == [400, 100]


def test_a_run_is_published_with_all_its_versions(
    cli: Cli, store_path: Path, tmp_path: Path
) -> None:
    """A run's name means all versions, as for verify."""
    document = cli("publish", "gpt", "--to", tmp_path / "gpt", "--json", "-s", store_path).document
    assert (document["versions_count"], document["runs_count"]) == (5, 1)


def test_what_the_store_has_deleted_is_told(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """The copy is published, and the command of the note removes from it what the source lost."""
    to = tmp_path / "public"
    again = ("publish", "--to", to, "-s", store_path)
    assert cli(*again).code == 0
    assert cli("rm", "gpt@200", "-s", store_path).code == 0
    done = cli(*again)
    assert (done.code, "log keeps their names" in done.err) == (0, True)
    assert cli(*again, "--quiet").err == ""
    command = done.err.partition("ckptstore ")[2].partition(" removes")[0]
    assert cli(*command.split()).code == 0
    assert cli(*again).err == ""


def test_what_is_refused(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Options of a copy want ``--to``; a misspelt ref makes nothing."""
    to = tmp_path / "public"
    for wrong in (["gpt@100"], ["--add"], ["--to-option", "a=b"], ["--to-key", "env:X"]):
        done = cli("publish", *wrong, "-s", store_path)
        assert done.code == 2
        assert "--to" in done.err
    assert cli("publish", "gpt@77", "--to", to, "-s", store_path).code == 3
    assert not to.exists()
    assert cli("publish", "--to", store_path, "-s", store_path).code == 4
    to.mkdir()
    (to / "index.html").write_text("my own page")
    refused = cli("publish", "--to", to, "-s", store_path)
    assert refused.code == 7
    assert "move that page away" in refused.err
    assert [path.name for path in to.iterdir()] == ["index.html"]


@pytest.mark.short(sample=6)
@pytest.mark.parametrize(
    "line",
    [
        "ls", "ls gpt --json", "show gpt@500", "log", "log --graph",
        "diff gpt@400 gpt@500 --values", "du", "du --shared", "stats", "verify gpt@500",
        "export gpt@500 out.safetensors --include model", "fork gpt@400 mine --to local",
        "replicate gpt@400 --to copy", "publish gpt@400 --to public",
    ],
)  # fmt: skip
def test_reading_by_url(
    cli: Cli, url: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command that reads works on a URL, published or not, without warnings."""
    monkeypatch.chdir(tmp_path)
    if "--to local" in line:
        ckptstore.open("local", create=True).close()
    done = cli(*line.split(), "-s", url)
    assert done.code == 0, done.err
    assert "error" not in done.err


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("verify", 8, "lists no objects"), ("doctor", 7, "ckptstore verify RUN --store http"),
        ("gc", 7, "read-only"), ("tag gpt@500 x", 7, "read-only"),
        ("publish", 7, "write to the store that is published there"),
        ("publish gpt@500 --to {}/new", 7, "folder or bucket"), ("init {}/new", 7, "read-only"),
        ("ls -s {}/no", 3, "folder with store.json"), ("ls -o token:=5", 2, "'token'"),
    ],
)  # fmt: skip
def test_what_a_url_does_not_allow(cli: Cli, url: str, line: str, code: int, text: str) -> None:
    """What needs a listing or writes is refused, with a hint that fits."""
    words = line.format(url).split()
    done = cli(*words, *(() if "-s" in words else ("-s", url)))
    assert done.code == code, done.err
    assert text in done.err
    assert "hint: create one" not in done.err
