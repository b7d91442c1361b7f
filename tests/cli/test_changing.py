"""init, tag, annotate, import, export, doctor and key mend: what they change and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from buckets import AzureBucket, S3Bucket

import ckptstore
from ckptstore.backends.posix import PosixWriter
from ckptstore.errors import CorruptObjectError, StorageFullError
from tests.cli.conftest import Cli


def test_init_makes_a_store_and_prints_what_was_found(cli: Cli, tmp_path: Path) -> None:
    """The checks are shown, chunk size and all are in the document; a second one is refused."""
    result = cli("init", tmp_path / "a")
    assert result.code == 0
    assert "created a store" in result.out
    assert "safe for concurrent writers" in result.out
    document = cli("init", tmp_path / "b", "--chunk-size", "1MiB", "--json").document
    assert (document["chunk_bytes"], document["put_if_absent"]) == (1 << 20, "atomic")
    assert all(check["passed"] for check in document["probe"]["checks"])
    with ckptstore.open(tmp_path / "b") as store:
        assert store.info.store_id == document["store_id"]
    again = cli("init", tmp_path / "a")
    assert again.code == 4
    assert "already" in again.err
    assert cli("init", tmp_path / "c", "--chunk-size", "1KiB").code == 2
    assert not (tmp_path / "c" / "store.json").exists()


def test_init_takes_the_location_from_where_it_is_given(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument comes first, then --store, then the environment."""
    monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / "environment"))
    assert cli("init", tmp_path / "argument", "--store", tmp_path / "option").code == 0
    assert cli("init", "--store", tmp_path / "option").code == 0
    assert cli("init").code == 0
    assert cli("ls").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["argument", "environment", "option"]


def test_tag_moves_and_goes(cli: Cli, store_path: Path) -> None:
    """A tag is set, moved with a word about where it was, and deleted."""
    assert "step 400" in cli("tag", "gpt@400", "good", "-s", store_path).out
    moved = cli("tag", "gpt@best:val_loss", "good", "--json", "-s", store_path).document
    assert moved["previous"] == moved["version"]
    assert "it was" in cli("tag", "gpt@500", "good", "-s", store_path).out
    with ckptstore.open(store_path) as store:
        assert store.resolve("gpt@good").step == 500
    assert cli("tag", "gpt", "good", "--delete", "-q", "-s", store_path).out == ""
    assert cli("show", "gpt@good", "-s", store_path).code == 3


def test_annotate_adds_metrics(cli: Cli, store_path: Path) -> None:
    """Values arrive and replace earlier ones; NaN is allowed, what is no number is not."""
    assert cli("annotate", "gpt@400", "bleu=31.5", "val_loss=nan", "-s", store_path).code == 0
    with ckptstore.open(store_path) as store:
        assert store.resolve("gpt@400").metrics["bleu"] == 31.5
        assert store.resolve("gpt@best:val_loss").step == 500
    document = cli("annotate", "gpt", "a=b=2", "--json", "-s", store_path).document
    assert document["metrics"]["a=b"] == 2
    nothing = cli("annotate", "gpt", "--note", "", "-s", store_path)
    assert (nothing.code, "--note TEXT" in nothing.err) == (2, True)


def test_export_then_import_is_the_same_weights(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """A part of a version goes out under other names, and comes in as a run of its own."""
    path = tmp_path / "model.safetensors"
    arguments = ("gpt@400", path, "--include", "model", "--strip-prefix", "model.")
    result = cli("export", *arguments, "-s", store_path)
    assert result.code == 0
    assert "4 tensors of gpt@400" in result.out
    assert cli("export", *arguments, "-s", store_path).code == 4
    assert cli("export", *arguments, "--force", "-q", "-s", store_path).out == ""
    found = cli(
        "import", path, "copy", "--step", 3, "--metric", "acc=0.5", "--max", "acc",
        "--tag", "hf", "--under", "model", "--json", "-s", store_path,
    ).document  # fmt: skip
    assert (found["version"]["step"], found["version"]["tags"]) == (3, ["hf"])
    with ckptstore.open(store_path) as store:
        original = store.load("gpt@400", include=["model"])["model"]
        copy = store.load("copy@best:acc")["model"]
        assert all(torch.equal(original[name], copy[name]) for name in original)
        assert store.resolve("copy").id == found["version"]["id"]


def test_export_says_what_it_left_out(cli: Cli, history: Path, tmp_path: Path) -> None:
    """The note goes to stderr, the list into the document; excluded paths are in neither."""
    path = tmp_path / "all.safetensors"
    assert (
        "left out, since they are no tensors: epoch"
        in cli("export", "gpt", path, "-s", history).err
    )
    document = cli("export", "gpt", path, "-f", "--json", "-s", history).document
    assert (document["left_out"], document["tensors_count"]) == (["epoch"], 5)
    assert document["file_bytes"] == path.stat().st_size
    quiet = cli("export", "gpt", path, "-f", "--exclude", "epoch", "-s", history)
    assert quiet.err == ""
    assert len(safetensors.torch.load_file(path)) == 5


def test_import_of_a_folder_of_transformers(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Neither step nor key is asked for, and the fork of its weights has its files."""
    folder = tmp_path / "base"
    folder.mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert cli("import", folder, "llama", "-s", store_path).out.startswith("llama@0 is ")
    assert cli("fork", "llama", "ft", "--include", "model.*", "-s", store_path).code == 0
    with ckptstore.open(store_path) as store:
        state = store.load("ft@0")
    assert list(state) == ["model", "pretrained"]
    assert state["pretrained"]["config"] == {"model_type": "gpt2"}
    assert cli("import", tmp_path / "nope", "llama", "-s", store_path).code == 3


def test_import_prints_the_id_when_quiet(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Scripts get the id and nothing else; wrong options are refused before the file is read."""
    path = tmp_path / "w.pt"
    torch.save({"w": torch.ones(3)}, path)
    result = cli("import", path, "r", "--step", 1, "-q", "-s", store_path)
    with ckptstore.open(store_path) as store:
        assert result.out == store.resolve("r").id + "\n"
    assert cli("import", path, "r", "-s", store_path).code == 2
    assert cli("import", path, "r", "--step", -1, "-s", store_path).code == 2
    both = cli("import", path, "r", "--step", 1, "--min", "a", "--max", "a", "-s", store_path)
    assert (both.code, "both" in both.err) == (2, True)
    assert cli("import", tmp_path / "nope.pt", "r", "--step", 1, "-s", store_path).code == 3


def test_unsafe_storage_is_refused_unless_vouched_for(
    cli: Cli, careless_bucket: S3Bucket, tmp_path: Path
) -> None:
    """S3 that ignores conditions: init names the reason, doctor shows it, writing needs a flag."""
    options = []
    for name, value in careless_bucket.options().items():
        text = f"{name}:={json.dumps(value)}" if isinstance(value, dict) else f"{name}={value}"
        options += ["--option", text]
    secret = careless_bucket.options()["secret"]
    refused = cli("init", careless_bucket.url, *options)
    assert refused.code == 7
    assert "two writers would lose commits" in refused.err
    assert "--single-writer" in refused.err
    report = cli("doctor", careless_bucket.url, "--size", "1MiB", *options)
    assert report.code == 0
    assert "FAILS" in report.out
    assert "single writer only" in report.out
    made = cli("init", careless_bucket.url, "--single-writer", "--json", *options)
    assert made.document["single_writer"] is True
    path = tmp_path / "w.pt"
    torch.save({"w": torch.ones(3)}, path)
    arguments = ("import", path, "r", "--step", 1, "-s", careless_bucket.url, *options)
    assert cli(*arguments).code == 7
    assert cli(*arguments, "--single-writer").code == 0
    listing = cli("ls", "-s", careless_bucket.url, *options)
    assert listing.code == 0
    for result in (refused, report, made, listing):
        assert secret not in result.out + result.err


def test_doctor_remarks_on_a_folder_of_a_group(cli: Cli, tmp_path: Path) -> None:
    """A folder to which a group may write: what would stop its members, and the command for it."""
    tmp_path.chmod(0o775)
    assert "chmod g+s" in cli("doctor", tmp_path, "--size", "0").out
    (remark,) = cli("doctor", tmp_path, "--size", "0", "--json").document["remarks"]
    assert "group" in remark
    tmp_path.chmod(0o755)
    assert cli("doctor", tmp_path, "--size", "0", "--json").document["remarks"] == []


def test_doctor_shows_every_check_without_the_right_to_delete(
    cli: Cli, azure_bucket: AzureBucket
) -> None:
    """The failed check is in the table, and no large object is written that would stay."""
    line = azure_bucket.limited("rwlc")["connection_string"]
    arguments = ("doctor", azure_bucket.url, "--option", f"connection_string={line}", "--json")
    document = cli(*arguments).document
    assert [check["name"] for check in document["checks"] if not check["passed"]] == ["delete"]
    assert len(document["checks"]) == 7
    assert document["speed"] is None
    assert "the credentials lack the right to delete" in document["advice"]
    left = azure_bucket.keys()
    assert f"; {len(left)} test objects stay below probe/" in document["advice"]
    assert not any(key.endswith(".pack") for key in left)


def test_doctor_shows_every_check_on_storage_without_room(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for small objects alone: the table, and why the speed is not known."""

    def full(*_: object, **__: object) -> None:
        msg = "write probe/x: No space left on device"
        raise StorageFullError(msg)

    monkeypatch.setattr(PosixWriter, "write", full)
    done = cli("doctor", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "list after write  holds" in done.out
    assert "No space left on device (try --size 1MiB)" in done.out
    document = cli("doctor", tmp_path, "--json").document
    assert document["speed"] is None
    assert "No space left" in document["speed_failure"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_needs_no_store(cli: Cli, tmp_path: Path) -> None:
    """Checks, latencies, throughput and advice; nothing is left behind that makes a store."""
    where = tmp_path / "somewhere"
    out = cli("doctor", where, "--size", "2MiB").out
    assert "-0.0 s" not in out
    assert "+0.0 s" not in out
    for part in ("create twice", "LATENCY", "storage clock", "write", "put-if-absent: atomic"):
        assert part in out
    document = cli("doctor", where, "--size", "0", "--json").document
    assert (document["concurrent_writers"], document["speed"]) == (True, None)
    assert document["advice"] == "safe for concurrent writers"
    assert not list(where.rglob("*.json"))
    assert cli("ls", "-s", where).code == 3


def test_the_command(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what would go, and takes it away; refused elsewhere."""
    monkeypatch.setenv("CKPTSTORE_KEY", "env:MY_KEY")
    monkeypatch.setenv("MY_KEY", bytes(range(1, 33)).hex())
    monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / "store"))
    assert cli("init", str(tmp_path / "store")).code == 0
    assert "nothing to mend" in cli("key", "mend").out
    planted = tmp_path / "store" / "keys" / "000999999999.json"
    planted.write_text("{}")
    failed = cli("ls")
    assert failed.code == CorruptObjectError.exit_code
    assert "ckptstore key mend" in failed.err
    dry = cli("key", "mend", "-n")
    assert "keys/000999999999.json would be deleted" in dry.out
    assert planted.exists()
    done = cli("key", "mend", "--json")
    assert done.document["deleted"] == ["keys/000999999999.json"]
    assert done.document["kept"] is True
    assert not planted.exists()
    assert cli("ls").code == 0
    assert cli("key", "id", "-n").code != 0
