"""retain, rm, undelete, pin, interval and log --metric: what they say and what they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptstore

Cli = Callable[..., Any]


def _levels(path: Path) -> dict[int, str]:
    with ckptstore.open(path, read_only=True) as store:
        return {version.step: version.level for version in store.versions("gpt")}


RULES = ("--full", "last 1", "--weights", "best 1 val_loss")


def test_retain_says_and_changes_nothing(cli: Cli, store_path: Path) -> None:
    """The table has a reason for each version, the note says how to do it, nothing changes."""
    result = cli("retain", "gpt", *RULES, "-s", store_path)
    assert result.code == 0
    lines = {line.split()[1]: line for line in result.out.splitlines()[1:]}
    assert "full -> weights" in lines["400"]
    assert lines["400"].endswith("best 1 val_loss")
    assert "full -> gone" in lines["200"]
    assert lines["200"].endswith("no rule")
    assert lines["100"].endswith("tagged first")
    assert lines["500"].endswith("last 1")
    assert "2 would be deleted, 1 would be reduced" in result.err
    assert "one 60 min later (--grace) deletes" in result.err
    assert "--apply" in result.err
    assert set(_levels(store_path).values()) == {"full"}
    assert cli("retain", "gpt", *RULES, "--dry-run", "-q", "-s", store_path).err == ""


def test_retain_apply_does_what_it_said(cli: Cli, store_path: Path) -> None:
    """The document of the dry run and of the real one agree."""
    said = cli("retain", "gpt", *RULES, "--json", "-s", store_path).document
    done = cli("retain", "gpt", *RULES, "--apply", "--json", "-s", store_path).document
    assert (said["dry_run"], done["dry_run"], len(done["commits"])) == (True, False, 1)
    assert said["runs"] == done["runs"]
    assert (done["deleted_count"], done["aged_count"]) == (2, 1)
    fates = {v["step"]: v["fate"] for v in done["runs"][0]["versions"] if v["fate"] != "gone"}
    assert _levels(store_path) == fates == {100: "full", 400: "weights", 500: "full"}
    again = cli("retain", "gpt", *RULES, "--apply", "--json", "-s", store_path).document
    assert again["commits"] == []
    log = cli("log", "gpt", "-s", store_path).out
    assert "keeps its weights" in log
    assert ": retention" in log


def test_retain_stores_a_policy_and_takes_it_away(cli: Cli, store_path: Path) -> None:
    """Of a run or of the store; it counts when no rules are given."""
    assert cli("retain", "gpt", "-s", store_path).code == 2
    lossy = ("--encoding", "role:optimizer=dynamic8")
    assert "add --set" in cli("retain", "gpt", *RULES, *lossy, "-s", store_path).err
    assert "last 1" in cli("retain", "gpt", *RULES, "--set", "-s", store_path).out
    document = cli("retain", "--full", "last 9", "--set", "--json", "-s", store_path).document
    assert document["policy"] == {"full": ["last 9"]}
    shown = cli("retain", "--json", "-s", store_path).document
    assert {run["run"]: run["policy"] for run in shown["runs"]} == {
        "gpt": {"full": ["last 1"], "weights": ["best 1 val_loss"]},
        "lora": {"full": ["last 9"]},
    }
    assert cli("retain", "gpt", "--clear", "--dry-run", "-s", store_path).code == 2
    foreseen = cli(
        "retain", "gpt", "--full", "last 2", "--set", "--dry-run", "--json", "-s", store_path
    ).document
    assert (foreseen["dry_run"], foreseen["deleted_count"]) == (True, 2)
    assert cli("retain", "--json", "-s", store_path).document["runs"] == shown["runs"]
    assert cli("retain", "gpt", "--clear", "-s", store_path).out == "gpt: no policy\n"
    assert cli("retain", "gpt", "--json", "-s", store_path).document["deleted_count"] == 0
    assert cli("retain", "--clear", "-q", "-s", store_path).out == ""
    assert cli("retain", "-s", store_path).code == 2


def test_a_dry_run_of_what_is_refused_says_so(cli: Cli, store_path: Path) -> None:
    """A preview exits as the command would, with its plan."""
    result = cli("retain", "gpt", "--record", "all", "-s", store_path)
    assert result.code == 7
    assert "refused: it would keep the content of none" in result.out


def test_rm_and_undelete(cli: Cli, store_path: Path) -> None:
    """A dry run says what is in the way; what went comes back, by step, id or run."""
    dry = cli(
        "rm", "gpt@200", "gpt@first", "gpt@latest", "--dry-run", "--json", "-s", store_path
    ).document
    obstacles = {v["step"]: v["obstacle"] for v in dry["versions"]}
    assert obstacles[200] is None
    assert "tagged" in obstacles[100]
    assert "head" in obstacles[500]
    assert len(_levels(store_path)) == 5
    assert cli("rm", "gpt@200", "gpt@first", "-s", store_path).code == 7
    assert len(_levels(store_path)) == 5
    gone = cli("rm", "gpt@200", "--reason", "bad data", "-s", store_path)
    assert "1 deleted" in gone.err
    assert "bad data" in cli("log", "-n", 1, "-s", store_path).out
    assert cli("show", "gpt@200", "-s", store_path).code == 3
    assert "gpt@200" in cli("undelete", "gpt@200", "-s", store_path).out
    found = cli("rm", "--run", "gpt", "--force", "--json", "-s", store_path).document
    assert len(found["versions"]) == 5
    bare = found["versions"][0]["id"][:12]
    assert cli("undelete", bare, "-q", "-s", store_path).out == ""
    assert (
        len(cli("undelete", "--run", "gpt", "--json", "-s", store_path).document["versions"]) == 4
    )


def test_undelete_tells_what_was_reduced(cli: Cli, store_path: Path) -> None:
    """A reduced version that was not deleted is no version to restore; a restored one is named."""
    with ckptstore.open(store_path) as store:
        (version,) = store.age(["gpt@first"], "weights", force=True)
    for ref in ("gpt@100", version.id):
        late = cli("undelete", ref, "-s", store_path)
        assert late.code in (2, 3)
        assert "was reduced to weights, which is for good" in late.err
    cli("rm", "gpt@100", "--force", "-s", store_path)
    back = cli("undelete", version.id, "-s", store_path)
    assert "is back; it was reduced to weights, which is for good" in back.out


def test_pin(cli: Cli, store_path: Path) -> None:
    """A pinned version survives force, and goes once it is unpinned."""
    assert "is pinned" in cli("pin", "gpt@200", "gpt@300", "-s", store_path).out
    assert cli("rm", "gpt@200", "--force", "-s", store_path).code == 7
    document = cli("pin", "gpt@200", "--delete", "--json", "-s", store_path).document
    assert [v["pinned"] for v in document["versions"]] == [False]
    assert cli("rm", "gpt@200", "-q", "-s", store_path).code == 0
    assert cli("pin", "gpt@300", "-d", "-q", "-s", store_path).out == ""


def test_rm_of_a_run_name_is_refused(cli: Cli, store_path: Path) -> None:
    """Whether the newest or all are meant is asked, even of who forces it; nothing is deleted."""
    result = cli("rm", "gpt", "--force", "-s", store_path)
    assert result.code == 2
    assert "write gpt@latest, or --run gpt for all versions" in result.err
    with ckptstore.open(store_path) as store:
        assert len(store.versions("gpt")) == 5


def test_rm_dry_run_counts_what_is_in_the_way(cli: Cli, store_path: Path) -> None:
    """One tagged version means that nothing would be deleted; the exit code is that of ``rm``."""
    blocked = cli("rm", "--run", "gpt", "--dry-run", "-s", store_path)
    assert "0 would be deleted: 1 of 5 in the way" in blocked.err
    free = cli("rm", "--run", "gpt", "--dry-run", "--force", "-s", store_path)
    assert "5 would be deleted; at most" in free.err
    assert (blocked.code, free.code) == (7, 0)
    for words in (["gpt@first"], ["gpt@200"], ["gpt@latest"]):
        dry = cli("rm", *words, "--dry-run", "-s", store_path)
        assert dry.code == cli("rm", *words, "-s", store_path).code, words


def test_fork_to_the_name_of_a_deleted_run(cli: Cli, store_path: Path) -> None:
    """The refusal says that nothing of that run is left, and how it comes back."""
    assert cli("rm", "--run", "lora", "-s", store_path).code == 0
    refused = cli("fork", "gpt@latest", "lora", "-s", store_path)
    assert refused.code == 4
    assert "whose versions were all deleted" in refused.err
    assert "ckptstore undelete " in refused.err
    assert "undelete" not in cli("fork", "gpt@latest", "gpt", "-s", store_path).err


def test_log_metric(cli: Cli, store_path: Path) -> None:
    """A line of blocks and a table, newest first; a document, oldest first."""
    result = cli("log", "gpt", "--metric", "val_loss", "-s", store_path)
    lines = result.out.splitlines()
    assert lines[0] == "gpt: val_loss, 2.2 to 3, 5 versions"
    assert lines[1] == "█▄!▁▃"
    rows = {line.split()[0]: line for line in lines[4:]}
    assert list(rows) == ["500", "400", "300", "200", "100"]
    assert "2.2*" in rows["400"]
    assert "2.5+" in rows["200"]
    assert len(cli("log", "gpt", "--metric", "val_loss", "-n", 2, "-s", store_path).rows) == 6
    document = cli("log", "gpt", "--metric", "val_loss", "--json", "-s", store_path).document
    assert [point["value"] for point in document["points"]] == [3.0, 2.5, "nan", 2.2, 2.4]
    assert document["direction"] == "min"


def test_rounding_is_foreseen_with_bytes_and_errors(cli: Cli, tmp_path: Path) -> None:
    """The table has the errors, the document each tensor; quick reads nothing and knows none."""
    path = tmp_path / "rounded"
    with ckptstore.open(path, create=True) as store:
        for step in (1, 2):
            store.run("gpt").save({"model": {"w": torch.randn(100, 100)}}, step=step)
    rules = ("--full", "last 1", "--weights-int8", "all", "--lossy", "int8:rel_l2=0.1")
    out = cli("retain", "gpt", *rules, "-s", path).out
    assert "full -> weights-int8" in out
    assert "rel 0.00" in out
    said = cli("retain", "gpt", *rules, "--json", "-s", path).document["runs"][0]["versions"]
    (tensor,) = said[0]["rounding"]["tensors"]
    assert (tensor["path"], tensor["form"]) == ("model.w", "int8, blocks of 256")
    assert 0 < tensor["rel_l2"] < 0.01
    assert said[1]["rounding"] is None
    quick = cli("retain", "gpt", *rules, "--quick", "-s", path)
    assert "rel" not in quick.out
    tight = cli("retain", "gpt", *rules[:-1], "int8:rel_l2=1e-9", "--json", "-s", path).document
    (tensor,) = tight["runs"][0]["versions"][0]["rounding"]["tensors"]
    assert "int8: rel_l2" in tensor["problem"]
    done = cli("retain", "gpt", *rules, "--apply", "--json", "-s", path).document
    assert done["runs"][0]["versions"] == said
    assert _levels(path) == {1: "weights-int8", 2: "full"}
    assert "keeps its weights as int8" in cli("log", "gpt", "-s", path).out
    assert "int8 weights only" in cli("show", "gpt@1", "-s", path).out
    encodings = ("--encoding", "role:optimizer=dynamic8", "--encoding", "model.*=bf16:rel_l2=0.1")
    stored = cli("retain", "gpt", "--full", "all", *encodings, "--set", "--json", "-s", path)
    assert stored.document["policy"] == {
        "full": ["all"],
        "encodings": {"role:optimizer": "dynamic8", "model.*": "bf16:rel_l2=0.1"},
    }
