"""ls, show, log and du: what they say is what is in the store."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptstore

Cli = Callable[..., Any]


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
    assert cli("show", "gpt", "--tensors", "some", "-s", history).code == 2


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
    assert cli("log", "nope", "-s", store_path).code == 3


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
    assert cli("du", "nope", "-s", history).code == 3
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
