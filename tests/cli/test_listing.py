"""ls, show, log and du: what they say is what is in the store."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.catalog.commits import OPS
from ckptstore.cli import log_cmd
from tests.cli.conftest import Cli


def _versions(path: Path) -> list[ckptstore.Version]:
    with ckptstore.open(path, read_only=True) as store:
        return store.versions()


def test_show_gives_the_receipt_in_units(cli: Cli, history: Path) -> None:
    """Seconds are durations, bytes are sizes, counts are whole numbers."""
    receipt = cli("show", "gpt@500", "--receipt", "-s", history).out.split("RECEIPT")[1]
    found = dict(line.split(None, 1) for line in receipt.strip().splitlines())
    assert found["tensors_count"] == "4"
    assert found["staging_s"].split()[1] in {"us", "µs", "ms", "s"}
    sizes = [text for name, text in found.items() if name.endswith("_bytes")]
    assert sizes
    assert all(text.split()[1] in {"B", "KiB", "MiB"} for text in sizes)


# --- ls -----------------------------------------------------------------------------------------
def test_ls_lists_runs_and_versions_newest_first(cli: Cli, history: Path) -> None:
    """Without a run: one line per run, then the versions of all, newest first."""
    result = cli("ls", "--store", history)
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0] == ["RUN", "VERSIONS", "LATEST", "AGE", "BEST"]
    assert lines[1][:3] == ["gpt", "5", "500"]
    assert " ".join(lines[1][4:]) == "val_loss 2.2 @400"
    ids = [version.id[:8] for version in reversed(_versions(history))]
    assert [line[2] for line in lines[5:]] == ids
    assert not any(line.endswith(" ") for line in result.out.splitlines())


def test_ls_marks_the_best_the_head_and_tags(cli: Cli, history: Path) -> None:
    """The best value has a star, NaN never; the head is latest; tags are shown."""
    lines = {line.split()[0]: line for line in cli("ls", "gpt", "-s", history).out.splitlines()}
    assert "2.2*" in lines["400"]
    assert sum(line.count("*") for line in lines.values()) == 1
    assert "nan" in lines["300"]
    assert lines["500"].endswith("latest")
    assert lines["100"].endswith("first")
    assert lines["STEP"].split()[4:6] == ["VAL_LOSS", "ACC"]


def test_ls_limit_and_columns(cli: Cli, history: Path) -> None:
    """--limit cuts the oldest and says so on stderr; --metric chooses the columns."""
    result = cli("ls", "gpt", "-n", 2, "--metric", "acc", "--utc", "-s", history)
    lines = [line.split() for line in result.out.splitlines()]
    assert [line[0] for line in lines] == ["STEP", "500", "400"]
    assert "ACC" in lines[0]
    assert "VAL_LOSS" not in lines[0]
    assert lines[1][3].endswith("Z")
    assert "2 of 5 versions" in result.err
    assert cli("ls", "gpt", "-n", 2, "-q", "-s", history).err == ""
    assert len(cli("ls", "gpt", "-n", 0, "-s", history).out.splitlines()) == 6


def test_ls_document(cli: Cli, history: Path) -> None:
    """The document has every version with all that the catalog knows; NaN is a text."""
    document = cli("ls", "--json", "-s", history).document
    assert (document["schema"], document["command"]) == (1, "ls")
    assert [run["name"] for run in document["runs"]] == ["gpt", "lora"]
    assert document["versions_count"] == len(document["versions"]) == 6
    by_step = {v["step"]: v for v in document["versions"] if v["run"] == "gpt"}
    for version in _versions(history)[:5]:
        shown = by_step[version.step]
        assert shown["id"] == version.id
        assert shown["parent"] == (version.parent or None)
        assert shown["logical_bytes"] == sum(part.logical for part in version.roles.values())
        assert shown["created_at"].endswith("Z")
    assert by_step[300]["metrics"] == {"val_loss": "nan", "acc": 0.3}
    assert [step for step, v in by_step.items() if v["best"]] == [400]
    assert [step for step, v in by_step.items() if v["head"]] == [500]


def test_ls_of_an_empty_store(cli: Cli, tmp_path: Path) -> None:
    """A new store is no error: it has nothing yet, and the note says so."""
    cli("init", tmp_path / "new", "-q")
    result = cli("ls", "-s", tmp_path / "new")
    assert (result.code, result.out, result.err) == (0, "", "no versions yet\n")
    assert cli("ls", "--json", "-s", tmp_path / "new").document["versions"] == []


def test_ls_table_is_not_cut_in_a_pipe(cli: Cli, tmp_path: Path) -> None:
    """However long names are, a pipe gets each version in one whole line."""
    name = "experiment/" + "x" * 180
    with ckptstore.open(tmp_path, create=True) as store:
        store.run(name).save({"n": 1}, step=1, tags=["t" * 90])
    out = cli("ls", "-s", tmp_path).out
    assert sum(name in line and "t" * 90 in line for line in out.splitlines()) == 1


# --- show ---------------------------------------------------------------------------------------
def test_show_has_every_section(cli: Cli, history: Path) -> None:
    """Metrics, tags, lineage, metadata, roles, tensors with ties; the receipt if asked for."""
    out = cli("show", "gpt@best:val_loss", "--receipt", "-s", history).out
    version = next(v for v in _versions(history) if v.step == 400)
    assert out.startswith("gpt@400\n")
    assert version.id in out
    assert "gpt@300" in out
    assert "best of the run" in out
    assert "model.embed" in out
    assert "= model.tied" in out
    assert "optimizer" in out
    assert "pack_bytes" in out
    for text in ("pack_bytes", "RECEIPT", "manifests/"):
        assert text not in cli("show", "gpt@best:val_loss", "-s", history).out
    assert '"lr": 0.1' in out
    assert "\x1b" not in out


def test_show_tensors_option(cli: Cli, history: Path) -> None:
    """A number cuts the list and says how many more there are; 0 lists none; else an error."""
    assert "and 3 more" in cli("show", "gpt", "--tensors", 1, "-s", history).out
    assert "more" not in cli("show", "gpt", "--tensors", "all", "-s", history).out
    assert "TENSOR" not in cli("show", "gpt", "--tensors", 0, "-s", history).out


def test_show_document(cli: Cli, history: Path) -> None:
    """The document has all tensors and the line of ancestors, nearest first."""
    document = cli("show", "gpt@first", "--json", "-s", history).document
    assert (document["version"]["step"], document["ancestors"]) == (100, [])
    document = cli("show", "gpt", "--json", "-s", history).document
    assert [v["step"] for v in document["ancestors"]] == [400, 300, 200, 100]
    assert document["version"]["metadata"] == {"lr": 0.1, "note": "red \x1b[31m alert"}
    tensors = {t["path"]: t for t in document["tensors"]}
    assert document["tensors_count"] == len(tensors) == 4
    assert tensors["model.embed"]["aliases"] == ["model.tied"]
    assert tensors["model.embed"]["shape"] == [300, 100]
    assert cli("show", "gpt", "--json", "--tensors", 0, "-s", history).document["tensors"] is None


def test_show_of_a_record_has_all_but_the_tensors(cli: Cli, store_path: Path) -> None:
    """Metadata, metrics, lineage and the receipt are kept, so they are shown; tensors are not."""
    with ckptstore.open(store_path) as store:
        store.age(["gpt@400"], "record")
    shown = cli("show", "gpt@400", "--receipt", "-s", store_path)
    assert shown.code == 0
    for text in ("record only", "gpt@300", '"lr": 0.1', "val_loss", "RECEIPT", "pack_bytes"):
        assert text in shown.out
    assert "TENSOR" not in shown.out
    assert "only the record is kept" in shown.out
    document = cli("show", "gpt@400", "--json", "-s", store_path).document
    assert (document["tensors"], document["tensors_count"]) == (None, None)
    assert document["version"]["metadata"]["lr"] == 0.1


def test_ids_are_refs_with_and_without_their_mark(cli: Cli, history: Path) -> None:
    """What ls prints as id can be pasted: a shell would take #id for a comment."""
    version = _versions(history)[0]
    for ref in (version.id, version.id[:8], f"#{version.id[:6]}"):
        found = cli("show", ref, "--json", "--tensors", 0, "-s", history).document
        assert found["version"]["id"] == version.id
    missing = cli("show", "0123abcd", "-s", history)
    assert missing.code == 3
    assert "neither a run nor" in missing.err


def test_run_that_looks_like_an_id_is_a_run(cli: Cli, store_path: Path) -> None:
    """A run's name wins over the beginning of an id."""
    with ckptstore.open(store_path) as store:
        name = store.versions()[0].id[:6]
        saved = store.run(name).save({"n": 1}, step=3)
    found = cli("show", name, "--json", "-s", store_path).document
    assert found["version"]["id"] == saved.id


# --- log ----------------------------------------------------------------------------------------
def test_log_is_the_history_newest_first(cli: Cli, store_path: Path) -> None:
    """Every commit with its operations in words; metrics, tags and deletions too."""
    cli("tag", "gpt@400", "good", "-s", store_path)
    cli("tag", "gpt", "good", "--delete", "-s", store_path)
    cli("annotate", "gpt@400", "bleu=31", "-s", store_path)
    lines = cli("log", "-s", store_path).out.splitlines()
    assert [int(line.split()[0]) for line in lines[1:] if line[:6].strip()] == list(range(9, 0, -1))
    text = "\n".join(lines)
    for part in ("gpt@400", "bleu 31", "untag", "gpt@good", "create-run", "val_loss: min"):
        assert part in text
    assert [line.split()[-5] for line in lines if " annotate " in line] == ["annotate"]


def test_log_tells_how_a_resume_went(cli: Cli, store_path: Path) -> None:
    """When something differed: at once, or after how many steps."""
    for steps, text in (
        (0, "differs in what was restored: ema"),
        (1, "differs after 1 step: ema"),
        (2, "differs after 2 steps: ema"),
    ):
        with ckptstore.open(store_path) as store:
            told = {"verdict": "differs", "steps": steps, "names": ["ema"]}
            store.annotate("gpt@400", metadata={"resumed": told})
        assert f"resumed, {text}\n" in cli("log", "-n", 1, "-s", store_path).out


def test_log_of_a_run_and_limit(cli: Cli, store_path: Path) -> None:
    """Only commits that touch the run; the limit counts those."""
    cli("annotate", "gpt@400", "bleu=31", "-s", store_path)
    numbers = [
        c["number"] for c in cli("log", "lora", "--json", "-s", store_path).document["commits"]
    ]
    assert numbers == [6]
    two = cli("log", "gpt", "-n", 2, "--json", "-s", store_path).document
    assert [c["number"] for c in two["commits"]] == [7, 5]
    assert two["commits_count"] == 7
    result = cli("log", "-n", 1, "--utc", "-s", store_path)
    assert "1 of 7 commits" in result.err


def test_log_document_is_the_chain(cli: Cli, history: Path) -> None:
    """Each commit names the digest of the one before; saves carry what was saved."""
    commits = cli("log", "--json", "-n", 0, "-s", history).document["commits"]
    assert [c["number"] for c in commits] == [6, 5, 4, 3, 2, 1]
    for newer, older in itertools.pairwise(commits):
        assert newer["previous"] == older["digest"]
    assert commits[-1]["previous"] is None
    saves = [op for c in commits for op in c["ops"] if op["op"] == "save"]
    assert saves[4]["metrics"]["val_loss"] == 2.5
    assert saves[3]["metrics"]["val_loss"] == "nan"
    assert saves[-1]["metadata"]["lr"] == 0.1


def test_log_document_of_a_copy_has_its_numbers(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """What is no number is text in the log of a replica, too."""
    cold = tmp_path / "cold"
    assert cli("replicate", "--to", cold, "-s", store_path).code == 0
    commits = cli("log", "--json", "-n", 0, "-s", cold).document["commits"]
    copied = [op for c in commits for op in c["ops"] if op["op"] == "replicate"]
    values = [op["metrics"]["val_loss"] for op in copied if "val_loss" in op.get("metrics", {})]
    assert "nan" in values
    assert None not in values


# --- du -----------------------------------------------------------------------------------------
def test_du_adds_up(cli: Cli, history: Path) -> None:
    """Versions add up to runs, runs to the store, and the objects are those on disk."""
    document = cli("du", "--json", "-s", history).document
    assert {run["name"]: len(run["versions"]) for run in document["runs"]} == {"gpt": 5, "lora": 1}
    for name in ("logical_bytes", "new_bytes", "stored_bytes"):
        assert document[name] == sum(run[name] for run in document["runs"])
        assert document[name] == sum(role[name] for role in document["roles"].values())
        for run in document["runs"]:
            assert run[name] == sum(version[name] for version in run["versions"])
    gpt = document["runs"][0]["versions"]
    weight = 300 * 100 * 4
    assert gpt[0]["roles"]["weights"]["new_bytes"] == 2 * weight + 16
    assert gpt[1]["roles"]["weights"]["new_bytes"] == weight  # head is shared, embed changed
    files = [path for path in history.rglob("[!.]*") if path.is_file()]  # without the reserve
    on_disk = sum(path.stat().st_size for path in files)
    assert sum(kind["bytes"] for kind in document["objects"].values()) == on_disk


def test_du_tables(cli: Cli, history: Path) -> None:
    """The store by run, role and kind of object; a run by version, newest first."""
    out = cli("du", "-s", history).out
    for part in ("RUN", "ROLE", "OBJECTS", "weights", "packs", "total"):
        assert part in out
    lines = [line.split() for line in cli("du", "gpt", "-s", history).out.splitlines()]
    assert [line[0] for line in lines[1:7]] == ["500", "400", "300", "200", "100", "total"]
    assert cli("du", "gpt", "--json", "-s", history).document["objects"] is None


def test_documents_are_strict_json(cli: Cli, history: Path) -> None:
    """No document holds NaN or Infinity, which JSON does not know."""

    def refuse(name: str) -> float:
        raise AssertionError(name)

    for command in (["ls"], ["show", "gpt@300"], ["log"], ["du"], ["verify"]):
        text = cli(*command, "--json", "-s", history).out
        document = json.loads(text, parse_constant=refuse)
        assert document["command"] == command[0]
    assert math.isnan(_versions(history)[2].metrics["val_loss"])


def _steps(cli: Cli, history: Path, *options: str) -> list[int]:
    document = cli("ls", "gpt", *options, "--json", "-s", history).document
    assert document["versions_count"] == len(document["versions"])
    return [version["step"] for version in document["versions"]]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--sort", "val_loss"], [400, 500, 200, 100, 300]),  # NaN comes last
        (["--sort", "acc"], [100, 200, 300, 400, 500]),  # no direction: the lowest first
        (["--sort", "step"], [500, 400, 300, 200, 100]), (["--where", "val_loss<2.5"], [500, 400]),
        (["--where", "val_loss <= 2.5", "--where", "step!=400"], [500, 200]),
        (["--where", "val_loss!=3"], [500, 400, 300, 200]),
        (["--where", "step>=400", "--sort", "val_loss"], [400, 500]), (["--tag", "first"], [100]),
        (["--tag", "nothing"], []), (["--where", "size>1e12"], []),
    ],
)  # fmt: skip
def test_versions_are_chosen_and_sorted(
    cli: Cli, history: Path, options: list[str], steps: list[int]
) -> None:
    """By metrics in the direction that the run declared, by step, size and tag."""
    assert _steps(cli, history, *options) == steps


def test_the_sorted_metric_has_a_column_and_the_rest_is_counted(cli: Cli, history: Path) -> None:
    """Of what fits, some are shown, and a note says how many there are."""
    done = cli("ls", "--sort", "acc", "--where", "acc<0.5", "-n", 2, "-s", history)
    titles, first, second = done.rows[-3:]
    assert titles.index(" ACC".strip()) if "ACC" in titles else any("ACC" in t for t in titles)
    assert "100" in " ".join(first)
    assert "200" in " ".join(second)
    assert "2 of 4 versions" in done.err
    assert "no version fits" in cli("ls", "--tag", "x", "-s", history).err


def test_every_operation_has_words() -> None:
    """No operation of the format is without a description in ``ckptstore log``."""
    assert set(OPS) == set(log_cmd._DESCRIBE)


def test_copies_name_the_other_store(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Who has a version is told by the name of the replica, on the other side by its id."""
    other = tmp_path / "other"
    assert cli("replicate", "gpt@500", "-s", store_path, "--to", other).code == 0
    assert cli("replica", "add", "cold", other, "-s", store_path).code == 0
    here = cli("log", "-s", store_path).out
    there = cli("log", "-s", other).out
    assert "cold has gpt@500 " in here
    store = cli("ls", "-s", store_path, "--json").document["store"]
    assert store == str(store_path)
    assert "gpt@500 " in there
    assert " from store " in there


def test_policies_are_rules_not_json(cli: Cli, store_path: Path) -> None:
    """A policy is told as its rules, and one that was taken away as none."""
    cli("retain", "gpt", "--full", "last 3", "--set", "-s", store_path)
    cli("retain", "gpt", "--clear", "-s", store_path)
    out = cli("log", "-s", store_path).out
    assert "gpt: full: last 3" in out
    assert "gpt: no policy" in out


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose one version is rounded, derived, coded, and kept in vain."""
    path = tmp_path_factory.mktemp("encoded")
    random = torch.Generator().manual_seed(1)
    master = torch.randn(80, 90, generator=random)
    state = {
        "model": {"w": torch.randn(80, 90, generator=random), "low": master.to(torch.bfloat16)},
        "optimizer": {"master": master, "exp_avg": torch.randn(80, 90, generator=random)},
        "table": torch.randn(80, 90, generator=random),
    }
    rules = {"model.w": "bf16:rel_l2=0.004", "*.exp_avg": "int8", "table": "int8:rel_l2=1e-5"}
    with ckptstore.open(path, create=True) as store:
        store.run("gpt").save(state, step=1, encodings=rules)
    return path


def test_text_lists_what_is_not_stored_as_it_is(cli: Any, encoded: Path) -> None:  # noqa: ANN401
    """A table of forms, and in the metadata what fell back; other tensors are not in either."""
    shown = cli("show", "gpt", "-s", encoded)
    assert shown.code == 0
    table = shown.out.split("ENCODED")[1].split("RECEIPT")[0]
    rows = {line.split()[0]: line.split() for line in table.splitlines()[1:] if line.strip()}
    assert set(rows) == {"model.w", "model.low", "optimizer.exp_avg"}
    assert rows["model.w"][1] == "bf16"
    assert rows["model.w"][-1] == "0.004"
    assert rows["model.low"][1:3] == ["as", "optimizer.master"]
    assert rows["optimizer.exp_avg"][1] == "int8"
    assert rows["optimizer.exp_avg"][-1] == "-"
    assert "the relative error would be" in shown.out


def test_the_document_has_figures(cli: Any, encoded: Path) -> None:  # noqa: ANN401
    """Every tensor has its form, its errors, their bounds, and the bytes of its codes."""
    tensors = {
        t["path"]: t for t in cli("show", "gpt", "--json", "-s", encoded).document["tensors"]
    }
    size = 80 * 90
    weight = tensors["model.w"]
    assert (weight["encoding"], weight["coded_bytes"]) == ("bf16", 2 * size)
    assert 0 < weight["rel_l2"] < weight["rel_l2_bound"] == 0.004
    assert weight["max_abs"] > 0
    assert weight["max_abs_bound"] is None
    assert tensors["model.low"]["derived_from"] == "optimizer.master"
    assert tensors["model.low"]["coded_bytes"] == 0
    assert tensors["optimizer.exp_avg"]["coded_bytes"] == size + 4 * -(-size // 256)
    assert tensors["table"]["encoding"] == "lossless"
    assert tensors["table"]["coded_bytes"] == 4 * size


def test_a_version_without_forms_has_no_table(cli: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """Nothing is said of encodings where there are none."""
    with ckptstore.open(tmp_path, create=True) as store:
        store.run("gpt").save({"w": torch.ones(9)}, step=1)
    assert "ENCODED" not in cli("show", "gpt", "-s", tmp_path).out


def test_show_prints_the_receipt_and_its_state(cli: Cli, history: Path) -> None:
    """Seconds of each stage and bytes, in units; how far the version has come."""
    out = cli("show", "gpt@400", "--receipt", "-s", history).out
    receipt = out.split("RECEIPT\n")[1]
    assert re.search(r"^state +durable$", receipt, re.MULTILINE)
    for name in ("blocked", "staging", "hashing", "encoding", "writing", "committing"):
        assert re.search(rf"^{name}_s +[\d.]+ m?s$", receipt, re.MULTILINE), name
    for name in ("logical", "new", "shared", "stored"):
        assert re.search(rf"^{name}_bytes +[\d.]+ [KM]?i?B$", receipt, re.MULTILINE), name
    assert re.search(r"^auto +(raw|planes)$", receipt, re.MULTILINE)
    assert "auto_planes" not in receipt
    version = cli("show", "gpt@400", "--json", "-s", history).document["version"]
    assert version["state"] == "durable"
    assert version["receipt"]["new_bytes"] == version["new_bytes"]


def test_stats_for_prometheus(cli: Cli, history: Path) -> None:
    """The text alone, ready for a collector; the same in the document."""
    outcome = cli("stats", "--prometheus", "-s", history)
    lines = outcome.out.splitlines()
    assert outcome.code == 0
    assert 'ckptstore_versions{run="gpt",state="durable"} 5' in lines
    assert 'ckptstore_last_save_step{run="lora"} 7' in lines
    document = cli("stats", "--prometheus", "--json", "-s", history).document
    assert document["prometheus"] == outcome.out


def test_stats_shows_what_saves_wrote(cli: Cli, history: Path) -> None:
    """A line a version, oldest first, in units; of all runs, or of one; zeros only in JSON."""
    outcome = cli("stats", "--transfers", "--run", "gpt", "-s", history)
    assert outcome.code == 0
    title, *lines = outcome.out.splitlines()
    assert title.split("  ")[0] == "VERSION"
    assert [line.split()[0] for line in lines] == [f"gpt@{n}00" for n in range(1, 6)]
    units = r"[\d.]+ [KM]iB +[\d.]+ m?s +[\d.]+ [KMG]iB/s"
    assert re.search(rf"{units} +\d+ +0 +\d+ +0 +0 +0$", lines[0])
    saves = cli("stats", "--transfers", "--json", "-s", history).document["saves"]
    assert [save["run"] for save in saves] == ["gpt"] * 5 + ["lora"]
    assert all(save["requests_bytes"] > 0 and save["limit_count"] == 0 for save in saves)


def test_stats_of_saves_without_figures(cli: Cli, tmp_path: Path) -> None:
    """Versions of earlier releases have dashes."""
    golden = Path(__file__).parents[1] / "compat" / "golden" / "v1"
    outcome = cli("stats", "--transfers", "-s", golden)
    assert outcome.code == 0
    assert {tuple(line.split()[1:]) for line in outcome.out.splitlines()[1:]} == {("-",) * 9}


@pytest.mark.parametrize("command", [["verify"], ["gc", "--dry-run"]])
def test_commands_that_read_much_tell_what_they_moved(
    cli: Cli, history: Path, command: list[str]
) -> None:
    """In the document: requests, bytes, seconds and requests at once, by direction."""
    moved = cli(*command, "--json", "-s", history).document["transfers"]["read"]
    assert moved["requests_count"] >= moved["at_once_count"] >= 1
    assert moved["bytes_per_s"] == moved["requests_bytes"] / moved["requests_s"] > 0
