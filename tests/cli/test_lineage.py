"""fork, rollback, diff, stats, du --shared and log --graph from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore

Cli = Callable[..., Any]


def test_fork_begins_a_run(cli: Cli, store_path: Path) -> None:
    """Parts under other names; what was shared is said; a taken name is a conflict."""
    result = cli(
        "fork", "gpt@400", "ft", "--role", "weights", "--rename", "model=net", "--exclude", "*norm",
        "-s", store_path,
    )  # fmt: skip
    assert result.code == 0
    assert "from gpt@400" in result.out
    assert "0 B copied" in result.out
    with ckptstore.open(store_path) as store:
        assert sorted(store.load("ft")["net"]) == ["embed", "head", "tied"]
    assert cli("fork", "gpt@400", "ft", "-s", store_path).code == 4
    document = cli("fork", "gpt@100", "whole", "--json", "-s", store_path).document
    assert document["version"]["parent"] == document["source"]
    assert document["version"]["new_bytes"] == 0
    quiet = cli("fork", "gpt", "quiet", "-q", "-s", store_path)
    assert len(quiet.out.strip()) == 32


def test_fork_to_another_store(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """The run appears there; this store is only read, and nothing travels twice."""
    other = tmp_path / "other"
    assert cli("init", other).code == 0
    result = cli("fork", "gpt@400", "copy", "--to", other, "--json", "-s", store_path)
    assert result.document["to"] == str(other)
    assert result.document["version"]["metadata"]["forked_from"]["run"] == "gpt"
    again = cli("fork", "gpt@400", "again", "--to", other, "--json", "-s", store_path)
    assert again.document["version"]["new_bytes"] == 0
    with ckptstore.open(store_path) as store, ckptstore.open(other) as there:
        assert [run.name for run in there.runs()] == ["copy", "again"]
        assert len(store.runs()) == 2
        expected, found = store.load("gpt@400"), there.load("again")
        assert torch.equal(expected["model"]["embed"], found["model"]["embed"])


def test_rollback_says_what_was_abandoned(cli: Cli, store_path: Path) -> None:
    """And how to undo it; ls, show and log have it; the undo works as printed."""
    result = cli("rollback", "gpt@best:val_loss", "--reason", "went up", "-s", store_path)
    assert result.code == 0
    assert "gpt continues gpt@400" in result.out
    assert "abandoned: gpt@500" in result.out
    listed = {row[1].strip(): row[-1] for row in cli("ls", "-s", store_path).rows if len(row) > 5}
    assert listed["500"] == "(abandoned)"
    assert "state" in cli("show", "gpt@500", "-s", store_path).out
    assert "gpt to gpt@400" in cli("log", "-s", store_path).out
    assert ": went up" in cli("log", "-s", store_path).out
    undo = result.out.split("to undo: ckptstore ")[1].split()
    document = cli(*undo, "--json").document
    assert document["step"] == 500
    assert document["returned"] == [document["version"]]
    assert "already" in cli("rollback", "gpt@500", "-s", store_path).out
    assert cli("rollback", "gpt@100", "-q", "-s", store_path).out == ""


def test_versions_tell_their_state(cli: Cli, store_path: Path) -> None:
    """The document of a version says whether it was abandoned, pinned, and so on."""
    cli("rollback", "gpt@300", "-s", store_path)
    document = cli("ls", "gpt", "--json", "-s", store_path).document
    assert {v["step"]: v["abandoned"] for v in document["versions"]} == {
        500: True, 400: True, 300: False, 200: False, 100: False,
    }  # fmt: skip
    assert {v["level"] for v in document["versions"]} == {"full"}


def test_graph_is_a_tree(cli: Cli, store_path: Path) -> None:
    """Forks and abandoned lines branch off where they do; one run shows its surroundings."""
    with ckptstore.open(store_path) as store:
        store.fork("gpt@200", "ft")
        run = store.run("gpt")
        run.rollback(300, reason="try again")
        run.save({"x": 1}, step=301)
    result = cli("log", "--graph", "--utc", "-s", store_path)
    lines = result.out.splitlines()
    drawn = [line.split("  ")[0] for line in lines]
    assert drawn == ["*", "", "*", "| *", "| *", "|/", "*", "|", "| *", "|/", "*", "*"]
    assert "lora@7" in lines[0]  # it has nothing to do with the others
    assert "latest" in lines[2]
    assert "abandoned" in lines[3]
    assert "try again" in lines[7]
    assert "forked from gpt@200" in lines[8]
    document = cli("log", "gpt", "--graph", "--json", "-s", store_path).document["graph"]
    assert [(v["run"], v["step"]) for v in document["versions"]][-1] == ("gpt", 100)
    assert {v["run"] for v in document["versions"]} == {"gpt", "ft"}
    assert [event["reason"] for event in document["rollbacks"]] == ["try again"]
    short = cli("log", "--graph", "-n", "2", "-s", store_path)
    assert len([line for line in short.out.splitlines() if "*" in line]) == 2
    assert "2 of 8 versions" in short.err
    assert "continues gpt@300" in short.out


def test_graph_passes_deleted_versions_over(cli: Cli, store_path: Path) -> None:
    """A line goes on to the nearest version that is there."""
    with ckptstore.open(store_path) as store:
        store.fork("gpt@300", "ft")
        store.remove(["gpt@300"])
    lines = cli("log", "--graph", "-s", store_path).out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["*", "", "*", "*", "| *", "|/", "*", "*"]
    assert "forked from gpt@300" in lines[4]
    assert "(deleted)" in lines[4]
    assert "gpt@200" in lines[6]


def test_diff_names_what_differs(cli: Cli, store_path: Path) -> None:
    """Counts, tensors, values; errors only when asked for; one document with all of it."""
    result = cli("diff", "gpt@100", "gpt@200", "-s", store_path)
    assert result.code == 0
    rows = {row[0].strip(): row for row in result.rows if row}
    assert rows["same"][1].strip() == "2"
    assert "model.embed" in result.out
    assert "RELATIVE" not in result.out
    valued = cli("diff", "gpt@100", "gpt@200", "--values", "-n", "1", "-s", store_path)
    assert "and 2 more; --limit 0 lists all" in valued.out
    document = cli("diff", "gpt@100", "gpt@200", "--values", "--json", "-s", store_path).document
    assert document["counts"]["changed"] == 3
    assert not document["equal"]
    embed = next(t for t in document["tensors"] if t["path"] == "model.embed")
    assert embed["error"]["max_abs"] == pytest.approx(100, rel=1e-4)
    assert embed["before"]["shape"] == [300, 100]
    with ckptstore.open(store_path) as store:
        store.fork("gpt@100", "ft", rename={"model": "net"})
        store.run("ft").save({"epoch": 2}, step=101)
    moved = cli("diff", "gpt@100", "ft@100", "-s", store_path)
    assert "net.embed" in moved.out
    assert "model.embed" in moved.out
    assert "epoch" in cli("diff", "gpt@100", "ft@101", "-s", store_path).out
    same = cli("diff", "gpt@100", "gpt@100", "--json", "-s", store_path).document
    assert same["equal"]


def test_stats_and_du_say_who_holds_what(cli: Cli, store_path: Path) -> None:
    """Numbers agree with each other, and with what a deleted version gives back."""
    with ckptstore.open(store_path) as store:
        store.fork("gpt@200", "ft", include=["model"])
        store.remove(["gpt@100"], force=True)
    stats = cli("stats", "--json", "-s", store_path).document
    assert (stats["runs_count"], stats["versions_count"], stats["deleted_count"]) == (3, 6, 1)
    packs = stats["objects"]["packs"]["bytes"]
    assert stats["live_bytes"] + stats["dead_bytes"] == packs
    assert stats["dead_bytes"] > 100_000
    assert stats["shares"][0]["runs"] == ["ft", "gpt"]
    assert "SHARED BY" in cli("stats", "-s", store_path).out
    shared = cli("du", "--shared", "--json", "-s", store_path).document["sharing"]
    assert shared["stored_bytes"] == stats["live_bytes"]
    assert shared["runs"]["ft"]["exclusive_bytes"] == 0
    run = cli("du", "gpt", "--shared", "--json", "-s", store_path).document["sharing"]
    assert set(run["runs"]) == {"gpt"}
    one = cli("du", "gpt@200", "--shared", "--json", "-s", store_path).document["sharing"]
    (held,) = one["versions"].values()
    assert held["held_bytes"] == held["exclusive_bytes"] + held["shared_bytes"] > 0
    assert set(one["shares"][0]["runs"]) == {"gpt", "ft"}
    for words in ((), ("gpt",), ("gpt@200",)):
        out = cli("du", *words, "--shared", "-s", store_path).out
        assert "ALONE" in out
    plain = cli("du", "gpt@200", "--json", "-s", store_path).document
    assert plain["sharing"] is None
    assert [v["step"] for v in plain["runs"][0]["versions"]] == [200]
