"""verify, repair and latest-valid on the command line."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaging import flip_pack

import ckptstore

Cli = Callable[..., Any]


@pytest.fixture
def damaged(store_path: Path) -> Path:
    """Return a store of which the newest version's own pack is damaged; a copy is beside it."""
    shutil.copytree(store_path, store_path.parent / "copy")
    with ckptstore.open(store_path) as store:
        latest = store.version("gpt@500")
        pack = latest._content.manifest.pieces.packs[int(latest._content.manifest.pieces.pack[0])]
    flip_pack(store_path / "packs" / pack[:2] / f"{pack}.pack")
    return store_path


def test_verify_in_parts_and_recorded(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Samples add up to the whole; a record is in the log and is not made twice."""
    whole = cli("verify", "--json", "-s", store_path).document
    parts = [
        cli("verify", "--sample", "25%", "--part", part, "--json", "-s", store_path).document
        for part in range(4)
    ]
    assert sum(part["chunks_count"] for part in parts) == whole["chunks_count"]
    assert (whole["sample"], parts[1]["sample"]) == (None, {"parts": 4, "part": 1})
    assert "part 1 of 4" in cli("verify", "--sample", "0.25", "--part", 1, "-s", store_path).out

    state = tmp_path / "state"
    recorded = cli("verify", "--record", "--resume", state, "-s", store_path)
    assert "6 versions recorded as sound" in recorded.out
    assert not state.exists()
    again = cli("verify", "--unverified", "--record", "--json", "-s", store_path).document
    assert (again["versions_count"], again["recorded"]) == (0, [])
    assert "verified" in cli("log", "-s", store_path).out


def test_verify_of_a_run_is_of_all_its_versions(cli: Cli, store_path: Path) -> None:
    """The name alone stands for every version of it, a ref for one; no run is an error."""
    for refs, count in ((["gpt"], 5), (["gpt@latest"], 1), (["lora", "gpt@100"], 2)):
        found = cli("verify", *refs, "--json", "-s", store_path).document
        assert found["versions_count"] == count


def test_verify_counts_what_no_version_needs(cli: Cli, store_path: Path) -> None:
    """Leftovers are told, and are no damage."""
    (store_path / "packs" / "notes.txt").write_text("mine")
    result = cli("verify", "-s", store_path)
    assert result.code == 0
    assert "1 object is not ckptstore's" in result.out
    document = cli("verify", "--json", "-s", store_path).document
    assert [n["kind"] for n in document["notices"]] == ["unknown"]


def test_repair_says_what_is_lost_and_mends_from_a_copy(cli: Cli, damaged: Path) -> None:
    """Dry run, repair alone, and repair from a second store; 5 while something is lost."""
    before = {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()}
    dry = cli("repair", "--dry-run", "--json", "-s", damaged)
    assert dry.code == 5
    assert dry.document["dry_run"]
    assert [lost["step"] for lost in dry.document["lost"]] == [500]
    assert before == {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()}

    alone = cli("repair", "-s", damaged)
    assert alone.code == 5
    assert "gpt@500" in alone.out
    assert "recorded as damaged" in alone.out
    assert "quarantine" in cli("log", "-s", damaged).out

    copy = damaged.parent / "copy"
    can = cli("repair", "--from", copy, "-n", "-s", damaged)
    assert (can.code, "everything can be mended" in can.out) == (0, True)
    mended = cli("repair", "--from", copy, "--json", "-s", damaged).document
    assert mended["ok"]
    assert [each["step"] for each in mended["mended"]] == [500]
    assert mended["pieces"]["source"] >= 1
    assert cli("verify", "-s", damaged).code == 0
    assert "no damage" in cli("repair", "-s", damaged).out
    assert cli("repair", "--from", damaged.parent / "nothing", "-s", damaged).code == 3


def test_repair_names_a_missing_commit(cli: Cli, damaged: Path) -> None:
    """The number, what can be read before it, and the same from a copy that has it."""
    (damaged / "commits" / "000000" / "000000000003.json").unlink()
    alone = cli("repair", "-s", damaged)
    assert alone.code == 5
    assert "commit 3" in alone.out
    assert "read up to commit 2, with 2 versions" in alone.out
    whole = cli("repair", "--from", damaged.parent / "copy", "-s", damaged)
    assert whole.code == 0
    assert "everything is mended" in whole.out


def test_repair_brings_store_json_back_first(cli: Cli, store_path: Path) -> None:
    """A dry run says so and stops; the repair makes it, and goes on; what is new is named."""
    (store_path / "store.json").unlink()
    assert "ckptstore repair" in cli("ls", "-s", store_path).err
    dry = cli("repair", "-n", "--json", "-s", store_path)
    assert (dry.code, dry.document["ok"], dry.document["superblock"]["mended"]) == (5, False, True)
    assert not (store_path / "store.json").exists()
    assert "store.json can be mended" in cli("repair", "-n", "-s", store_path).out
    done = cli("repair", "-s", store_path)
    assert done.code == 0
    assert "new are store_id, by" in done.out
    assert "everything is mended" in done.out
    assert cli("verify", "-s", store_path).code == 0
    (store_path / "store.json").chmod(0o644)
    (store_path / "store.json").write_bytes(b"{")
    refused = cli("repair", "-s", store_path)
    assert refused.code == 5
    assert "open the store as a single writer" in refused.out
    assert cli("repair", "--single-writer", "--json", "-s", store_path).document["ok"]
    assert cli("repair", "--json", "-s", store_path).document["superblock"] is None


def test_latest_valid_is_a_ref_everywhere(
    cli: Cli, damaged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Show and export skip what is damaged, and say so."""
    caplog.set_level(logging.WARNING, logger="ckptstore")
    shown = cli("show", "gpt@latest-valid", "--json", "-s", damaged)
    assert shown.document["version"]["step"] == 400
    assert "skipped gpt@500" in caplog.text
    target = tmp_path / "weights.safetensors"
    assert cli("export", "gpt@latest-valid", target, "-q", "-s", damaged).code == 0
    assert target.exists()
    assert cli("export", "gpt@latest", tmp_path / "other.safetensors", "-s", damaged).code == 5


def test_a_damaged_end_of_the_log(
    cli: Cli, store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents stay whole, a warning or an error names the record; the log tells the repair."""
    last = max((store_path / "commits").rglob("*.json"))
    last.write_bytes(b"")
    for words, code in (
        (["ls", "--json"], 0),
        (["show", "gpt@latest-valid", "--json"], 0),
        (["verify", "--json"], 5),
        (["gc", "--json"], 5),
        (["tag", "gpt@100", "t"], 5),
        (["repair", "--dry-run", "--json"], 0),
    ):
        caplog.clear()
        result = cli(*words, "-s", store_path)
        assert result.code == code, words
        assert last.name in (result.err if code else result.out + caplog.text), words
        assert ("ckptstore repair" in result.err) == (code == 5)
        if "--json" in words:
            assert result.document
    assert "set aside" in cli("repair", "-s", store_path).out
    assert cli("verify", "-s", store_path).code == 0
    assert "cut off (0 bytes)" in cli("log", "-s", store_path).out


def test_totals_leave_out_what_has_no_manifest(cli: Cli, store_path: Path) -> None:
    """Stats and du --shared count the rest, and name the version that they left out."""
    with ckptstore.open(store_path) as store:
        (store_path / store.resolve("gpt@300").manifest_key).unlink()
    for command in (["stats"], ["du", "--shared"], ["du", "gpt@400", "--shared"]):
        result = cli(*command, "-s", store_path)
        assert result.code == 0
        assert "gpt@300" in result.err
    (reason,) = cli("stats", "--json", "-s", store_path).document["skipped"]
    assert "is gone" in reason
