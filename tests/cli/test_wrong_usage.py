"""What goes wrong on the command line says what, and what to do; nothing ends in a traceback."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.registry import open_backend
from ckptstore.replicas.options import open_target
from ckptstore.repo import open_repo
from ckptstore.store import Store, mend_superblock, open_store, rotate_key
from ckptstore.store.opening import open_target_of
from tests.cli.conftest import Cli

TAKING: tuple[Callable[..., Any], ...] = (
    open_store,
    open_repo,
    open_backend,
    open_target,
    open_target_of,
    mend_superblock,
    rotate_key,
    Store.add_replica,
)
"""What takes options of the storage library beside its own."""


def _names() -> list[str]:
    return sorted({name for one in TAKING for name in inspect.signature(one).parameters})


@pytest.mark.short(sample=8)
@pytest.mark.parametrize("name", _names())
def test_no_name_of_an_option_is_taken_for_one_of_ours(
    cli: Cli, store_path: Path, tmp_path: Path, name: str
) -> None:
    """--option NAME=x of a name that a function of ours has is a wrong argument, never a defect."""
    given = ("--option", f"{name}=x")
    second = ("--to-option", f"{name}=x")
    other = tmp_path / "other"
    for arguments in (
        ("ls", "-s", store_path, *given),
        ("tag", "gpt@100", "t", "-s", store_path, *given),
        ("init", other, *given),
        ("doctor", tmp_path / "any", *given),
        ("repair", "-s", store_path, *given),
        ("replicate", "-s", store_path, "--to", other, *second),
        ("replica", "add", "cold", other, "-s", store_path, *second),
        ("fork", "gpt@100", "new", "--to", other, "-s", store_path, *second),
    ):
        done = cli(*arguments)
        assert done.code not in {0, 1}, (arguments, done)
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["ls", "--limit"], 2, "requires an argument", "see ckptstore ls --help"),
        (["verify", "--level", "deep"], 2, "'--level': 'deep' is not one of", "verify --help"),
        (["verify", "--part", "3"], 2, "--part says which part of a sample", "--sample 5%"),
        (["verify", "--sample", "200%"], 2, "a sample is a fraction", "such as 0.05"),
        (["verify", "--resume", "/no/such/x"], 8, "No such file", "a folder that is there"),
        (["show", "gpt@999"], 3, "run 'gpt' has no step 999", "the nearest is 500"),
        (["show", "gpt@250"], 3, "run 'gpt' has no step 250", "the nearest are 200 and 300"),
        (["retain", "--clear", "--set"], 2, "--clear stands alone", "retain [RUN] --clear"),
        (["show", "deadbeef"], 3, "neither a run nor", "ckptstore ls"),
        (["doctor", "--size", "900GiB"], 2, "to measure", "64 MiB"),
        (["retain"], 2, "has no retention policy", "'last 3' for full"),
        (["export", "gpt", "/no/such/x.safetensors"], 8, "ENOENT", "is missing"),
        (["ls", "-o", "read_only=true"], 2, "'read_only' is not an option", "open a store so"),
        (["ls", "-o", "encryption_key=secret"], 2, "is not an option", "--key SPEC"),
    ],
)
def test_a_wrong_command_is_told_what_to_do(
    cli: Cli, store_path: Path, arguments: list[str], code: int, message: str, hint: str
) -> None:
    """Each of these ends with its exit code, says what is wrong, and what to do next."""
    done = cli(arguments[0], "-s", store_path, *arguments[1:])
    first, _, second = done.err.partition("hint: ")
    assert (done.code, done.out) == (code, "")
    assert message in first
    assert hint in second


@pytest.mark.parametrize("below", ["", "/store"])
def test_a_file_in_the_way_is_told(cli: Cli, tmp_path: Path, below: str) -> None:
    """No store can be made where a file is, or below one; the hint says what is in the way."""
    (tmp_path / "file").write_text("x")
    done = cli("init", f"{tmp_path}/file{below}")
    assert done.code in {2, 8}
    assert "hint: " in done.err


def test_a_version_that_is_named_and_stays_is_told_why(
    cli: Cli, store_path: Path, tmp_path: Path
) -> None:
    """Evict and replicate say of each version that a REF names why nothing became of it."""
    other, third = tmp_path / "other", tmp_path / "third"
    assert cli("replicate", "-s", store_path, "--to", other).code == 0
    assert cli("replica", "add", "cold", other, "-s", store_path).code == 0
    named = ("evict", "--replica", "cold", "gpt@500", "gpt@100", "gpt@200", "-s", store_path)
    out = cli(*named).out
    assert "stays as it is: the head of its run" in out
    assert "stays as it is: tagged first" in out
    stays = {one["step"]: one["why"] for one in cli(*named, "--json").document["stays"]}
    assert stays[200] == "only its record is here already"
    assert cli("replicate", "gpt@500", "-s", store_path, "--to", third).code == 0
    assert cli("replica", "add", "far", third, "-s", store_path).code == 0
    out = cli("evict", "--replica", "far", "gpt@300", "-s", store_path).out
    assert "stays as it is: not in far" in out
    out = cli("replicate", "gpt@200", "-s", store_path, "--to", third).out
    assert "stays: only its record is here" in out


def test_a_bare_id_names_a_version_to_replicate(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Tables show ids without their #, and so replicate takes them, as every command does."""
    found = cli("show", "gpt@300", "--json", "-s", store_path).document["version"]["id"]
    done = cli("replicate", found[:8], "-s", store_path, "--to", tmp_path / "other", "--json")
    assert done.document["copied"] == [found]


def test_a_huge_limit_is_no_limit(cli: Cli, store_path: Path) -> None:
    """A number that no machine counts to lists what there is."""
    for words in (["ls"], ["log"], ["log", "--graph"], ["diff", "gpt@100", "gpt@200"]):
        done = cli(*words, "--limit", 10**20, "-s", store_path)
        assert done.code == 0, done.err


def test_an_empty_store_answers_every_question(cli: Cli, tmp_path: Path) -> None:
    """Where nothing was saved yet, each command says so or shows nothing; none fails for it."""
    store = tmp_path / "store"
    assert cli("init", store).code == 0
    for words in (
        ["ls"],
        ["log"],
        ["log", "--graph"],
        ["du"],
        ["du", "--shared"],
        ["stats"],
        ["stats", "--prometheus"],
        ["retain", "--full", "last 3"],
        ["gc", "--dry-run"],
        ["gc"],
        ["verify"],
        ["repair"],
        ["replicate", "--to", tmp_path / "other"],
        ["replica", "ls"],
    ):
        done = cli(*words, "-s", store)
        assert done.code == 0, (words, done.err)
        assert "error" not in done.err
    assert "no commits yet" in cli("log", "-s", store).err
    assert cli("log", "--json", "-s", store).document["commits"] == []
