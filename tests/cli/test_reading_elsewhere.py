"""What only a replica has, exported, compared and forked from there, with a key of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli

WORDS = (
    ["export", "gpt@200", "{}/out.safetensors"],
    ["diff", "gpt@200", "gpt@400", "--values"],
    ["fork", "gpt@200", "tuned"],
)


@pytest.fixture
def key(cli: Cli, tmp_path: Path) -> str:
    """Return where a new key is."""
    assert cli("key", "new", tmp_path / "key").code == 0
    return f"file:{tmp_path}/key"


@pytest.fixture
def hot(cli: Cli, store_path: Path, tmp_path: Path, key: str) -> Path:
    """Return a store that has the record of gpt@200, whose content is in an encrypted replica."""
    cold = tmp_path / "cold"
    to_key = ("--to-key", key)
    assert cli("replicate", "--to", cold, *to_key, "-s", store_path).code == 0
    assert cli("replica", "add", "cold", cold, *to_key, "-s", store_path).code == 0
    evicting = ("evict", "--replica", "cold", "gpt@200", *to_key, "-s", store_path)
    assert len(cli(*evicting, "--json").document["evicted"]) == 1
    return store_path


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_a_replica_is_opened_with_what_is_given_for_it(
    cli: Cli, hot: Path, tmp_path: Path, key: str, words: list[str]
) -> None:
    """Without the key the hint names the options; with them the content is read there."""
    words = [word.format(tmp_path) for word in words]
    refused = cli(*words, "-s", hot)
    assert refused.code == 3
    hint = refused.err.split("on the command line: ")[1].split()
    assert hint == ["--from", "replica:cold", "--from-key", "SPEC"]
    done = cli(*words, *hint[:3], key, "-s", hot)
    assert done.code == 0, done.err


def test_options_without_their_store_are_refused(cli: Cli, hot: Path, key: str) -> None:
    """A key for a store that is not named would do nothing: that is said, not passed over."""
    for words in (
        ("export", "gpt@200", "x.safetensors", "--from-key", key),
        ("repair", "--from-key", key),
        ("verify", "--heal-key", key),
        ("fork", "gpt@400", "tuned", "--to-key", key),
    ):
        done = cli(*words, "-s", hot)
        assert (done.code, "none is named" in done.err) == (2, True), words


def test_only_a_replica_can_be_read_from(cli: Cli, hot: Path, tmp_path: Path) -> None:
    """--from of these names a replica that there is; for another store there is --store."""
    words = ("export", "gpt@200", tmp_path / "x.safetensors", "-s", hot)
    place = cli(*words, "--from", tmp_path / "cold")
    assert (place.code, "--store URL" in place.err) == (2, True)
    unknown = cli(*words, "--from", "replica:warm")
    assert (unknown.code, "there is cold" in unknown.err) == (3, True)
