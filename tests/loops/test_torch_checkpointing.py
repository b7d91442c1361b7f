"""torch_checkpointing: its CheckpointManager, with a run of a store as its Storage."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import AzureBucket, GcsBucket, S3Bucket
from rankkit import checkpointing
from rankkit.groups import Group, run_ranks
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.base_storage import ReadArgs

import ckptstore
from ckptstore import limits
from ckptstore.errors import InvalidInputError, PolicyError, ReadOnlyError
from ckptstore.integrations.torch_checkpointing import (
    CkptStoreStorage,
    CkptStoreStorageConfig,
    path_of,
)
from ckptstore.store import Store


@pytest.fixture
def storage(store: Store) -> CkptStoreStorage:
    """Return the storage of a run of a new store."""
    return CkptStoreStorage(store, "gpt")


def _manager(url: str, *, background: bool = False, **words: Any) -> CheckpointManager:
    """Return a manager that saves to a run, in the background without pinned memory."""
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    save = (
        AsyncCheckpointSaverConfig(staging_config=staging)
        if background
        else SyncCheckpointSaverConfig()
    )
    storage = CkptStoreStorageConfig(url=url, run="gpt", **words)
    return CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))


def _state(step: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(7)
    frozen, trained = torch.randn(2, 700, 1000, generator=random)
    return {
        "model": {"frozen": frozen, "trained": trained + step, "empty": torch.empty(0, 3)},
        "step": step,
    }


def _check_round(url: str, options: dict[str, Any]) -> None:
    """Save two checkpoints, and load both."""
    manager = _manager(url, options=options)
    for step in (1, 2):
        manager.save(f"ckpts/step_{step}", _state(step))
    for step in (1, 2):
        into = {"model": _state(9)["model"], "step": 0}
        loaded = manager.load(f"/ckpts/step_{step}", into=into, strict=True)
        assert loaded["step"] == step
        assert all(torch.equal(into["model"][k], v) for k, v in _state(step)["model"].items())
    manager.close()
    with ckptstore.open(url, **options) as store:
        assert [version.step for version in store.versions("gpt")] == [1, 2]
        assert [path_of(version) for version in store.versions("gpt")] == [
            "ckpts/step_1",
            "ckpts/step_2",
        ]
        assert store.run("gpt/files").versions() == []
        assert store.verify().ok
        one, two = (sum(r.new for r in v.roles.values()) for v in store.versions("gpt"))
        assert one > 5_600_000 > two
        loaded = torch.load(io.BytesIO(store.load("gpt@2")["model_0.pt"].numpy().tobytes()))
        assert torch.equal(loaded["trained"], _state(2)["model"]["trained"])


def test_a_checkpoint_is_a_version(tmp_path: Path) -> None:
    """Each checkpoint is one version that verifies; what did not change is shared."""
    _check_round(str(tmp_path / "ckpts"), {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gcs", "azure"])
def test_on_each_object_store(kind: str, request: pytest.FixtureRequest) -> None:
    """The same through the store's URL, with its options."""
    bucket: S3Bucket | GcsBucket | AzureBucket = request.getfixturevalue(f"{kind}_bucket")
    _check_round(bucket.url, bucket.options())


@pytest.mark.slow
def test_saves_in_the_background(tmp_path: Path) -> None:
    """The process of the library opens the store itself; what is saved is of the call."""
    manager = _manager(str(tmp_path / "ckpts"), background=True, retain=True)
    with ckptstore.open(tmp_path / "ckpts") as store:
        store.run("gpt").set_policy({"full": "last 2"})
        for step in (1, 2, 3):
            state = _state(step)
            pending = manager.save(f"step_{step}", state)
            assert pending is not None
            pending.result()
        manager.close()
        assert [version.step for version in store.versions("gpt")] == [2, 3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_and_a_resume_at_any_size(tmp_path: Path) -> None:
    """After a kill -9 in a save all sizes resume with the same bits; the same size, all losses."""
    url = str(tmp_path / "ckpts")
    ckptstore.open(url, create=True).close()
    whole = run_ranks(checkpointing.train, 2, url, {})
    with Group(checkpointing.train, 2, url, {"saves": True, "dies": 15}) as group:
        while group.ended[1] is None:
            assert group.step(300)
        assert group.ended == [None, ("gone", None)]
    with ckptstore.open(url) as store:
        assert [version.step for version in store.versions("gpt")] == [5, 10]
    for ranks in (1, 4, 2):
        resumed = run_ranks(checkpointing.train, ranks, url, {"resume": True, "saves": ranks == 2})
        assert resumed[0][1][0] == whole[0][1][2]
        if ranks == 2:
            assert [mine[0] for mine in resumed] == [theirs[0][10:] for theirs in whole]
            assert resumed[0][1][-1] == whole[0][1][-1]
    with ckptstore.open(url) as store:
        assert [version.step for version in store.versions("gpt")] == [5, 10, 15, 20]
        assert store.run("gpt/files").versions() == []


# --- files ------------------------------------------------------------------------------------
@pytest.mark.parametrize("grid", [1, 2, 3])
def test_streams_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: int) -> None:
    """Bytes come back whatever the sizes of writes, reads and parts; other types of buffers too."""
    monkeypatch.setattr(limits, "FILE_PART_BYTES", grid * 65536)
    monkeypatch.setattr(limits, "CHUNK_BYTES_DEFAULT", 1000)
    data = torch.randint(0, 256, (250_001,), dtype=torch.uint8).numpy().tobytes()
    with ckptstore.open(tmp_path / "small", create=True, chunk_bytes=65536) as store:
        storage = CkptStoreStorage(store, "gpt")
        for size, step in itertools.product((0, 1, 65536, 131072, len(data)), (7_001, 200_000)):
            with storage.stream_write("a/file") as stream:
                for at in range(0, size, step):
                    stream.write(memoryview(data)[at : min(size, at + step)])
                assert stream.tell() == size
            assert storage.getsize("a/file") == size
            assert storage.read("a/file") == data[:size]
            with storage.stream_read("a/file", ReadArgs(pre_read_full_file=False)) as found:
                assert found.seek(-min(size, 70_000), io.SEEK_END) == max(0, size - 70_000)
                assert found.read(66_000) == data[max(0, size - 70_000) : size][:66_000]
                with pytest.raises(ValueError, match="before the first byte"):
                    found.seek(-1)
        with storage.stream_write("numbers") as stream:
            assert stream.write(torch.arange(4).reshape(2, 2).numpy()) == 32
            assert stream.write(bytearray()) == 0
        assert storage.read("numbers") == torch.arange(4).numpy().tobytes()


def test_an_error_leaves_no_file(storage: CkptStoreStorage) -> None:
    """A stream that ends by an exception, or that nobody closes, is no file."""

    def chunks() -> Iterator[bytes]:
        yield b"x" * 100
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), storage.stream_write("step_1/a") as stream:
        stream.writelines(chunks())
    storage.stream_write("step_1/a").write(b"x")
    assert not storage.exists("step_1/a")
    assert not storage.isdir("step_1")


def _written(storage: CkptStoreStorage, *paths: str) -> None:
    for path in paths:
        storage.write(path, path.encode())


def _occupied(storage: CkptStoreStorage, kind: str) -> None:
    """Make something at ``there``."""
    if kind in ("folder", "version"):
        _written(storage, "tmp/old")
        _written(storage, "there/old") if kind == "folder" else storage.rename("tmp", "there")
    elif kind == "file":
        _written(storage, "there")


@pytest.mark.parametrize("kind", ["nothing", "file", "folder", "version"])
@pytest.mark.parametrize("source", ["folder", "file", "version"])
def test_renames(storage: CkptStoreStorage, source: str, kind: str) -> None:
    """Only a file is replaced, by a file; all else that is there stays, and is named."""
    _occupied(storage, kind)
    _written(storage, "from" if source == "file" else "from/a")
    if source == "version":
        storage.rename("from", "first_7")
    start = "first_7" if source == "version" else "from"
    if kind == "nothing" or (kind, source) == ("file", "file"):
        storage.rename(start, "there")
        assert not storage.exists(start)
        moved = "there" if source == "file" else "there/a"
        assert storage.read(moved) == (b"from" if source == "file" else b"from/a")
    else:
        with pytest.raises(FileExistsError, match="occupied"):
            storage.rename(start, "there", is_directory=source != "file")
        assert storage.exists(start)
        kept = "there" if kind == "file" else "there/old"
        assert storage.exists(kept)
        assert storage.ls("") == sorted({start, "there", *(["tmp"] if kind == "folder" else [])})


def test_a_folder_moves_whole_or_not_at_all(storage: CkptStoreStorage) -> None:
    """Versions below a folder move with it; one that has loose files beside them is refused."""
    _written(storage, "tmp/a")
    storage.rename("tmp", "all/step_1")
    storage.rename("all", "other")
    assert storage.read("other/step_1/a") == b"tmp/a"
    assert not storage.exists("all")
    _written(storage, "other/step_1/note")
    for folder in ("other", "other/step_1"):
        with pytest.raises(OSError, match="checkpoints and files"):
            storage.rename(folder, "third")
    assert storage.ls("other/step_1") == ["a", "note"]


def test_folders_and_files(storage: CkptStoreStorage, store: Store) -> None:
    """Listings, files beside a version, deletions; a version's own files do not change."""
    _written(storage, "/ckpts/tmp_step_12/rank_0/model.pt", "/ckpts/tmp_step_12/meta")
    assert storage.ls("/ckpts/tmp_step_12") == ["meta", "rank_0"]
    storage.mkdir("/ckpts/tmp_step_12")
    storage.rename("/ckpts/tmp_step_12", "/ckpts/step_12", is_directory=True)
    assert store.versions("gpt")[0].step == 12
    assert storage.ls("ckpts") == ["step_12"]
    assert storage.ls("ckpts/step_12/rank_0") == ["model.pt"]
    assert storage.isdir("ckpts/step_12/rank_0")
    assert storage.exists("ckpts/step_12/rank_0/model.pt")
    assert storage.glob("/ckpts/step_*") == ["/ckpts/step_12"]
    assert storage.remap_path("/ckpts/step_12") == "/ckpts/step_12"

    _written(storage, "ckpts/step_12/DONE", "ckpts/step_12/meta")
    assert storage.read("ckpts/step_12/meta") == b"ckpts/step_12/meta"
    storage.delete("ckpts/step_12/meta")
    assert storage.read("ckpts/step_12/meta") == b"/ckpts/tmp_step_12/meta"
    with pytest.raises(PermissionError, match="a part of a version"):
        storage.delete("ckpts/step_12/meta")
    for call in (storage.delete, storage.getsize, storage.read, storage.ls):
        with pytest.raises(FileNotFoundError):
            call("ckpts/step_13")
    with pytest.raises(FileNotFoundError):
        storage.rename("ckpts/step_13", "ckpts/step_14")
    with pytest.raises(IsADirectoryError):
        storage.write("ckpts/step_12", b"")
    with pytest.raises(FileExistsError):
        storage.mkdir("ckpts/step_12/DONE")
    with pytest.raises(InvalidInputError, match="leads out of the run"):
        storage.exists("../other")

    _written(storage, "tmp_last/a")
    storage.rename("tmp_last", "last")
    assert store.versions("gpt")[-1].step == 12  # no number in its name
    with pytest.raises(PolicyError):
        storage.rmdir("last")
    storage.rmdir("ckpts/step_12")
    assert storage.ls("") == ["last"]
    storage.rmdir("last")
    assert not storage.isdir("")


def test_roles_and_refs(storage: CkptStoreStorage, store: Store) -> None:
    """Retention keeps what weights are read from; a ref becomes a path."""
    _written(storage, "tmp/model_0.pt", "tmp/optimizer_0.pt", "tmp/.metadata")
    storage.rename("tmp", "step_3")
    run = store.run("gpt")
    assert {t.path: t.role for t in run.version().tensors()} == {
        ".metadata": "weights",
        "model_0.pt": "weights",
        "optimizer_0.pt": "optimizer",
    }
    run.annotate(3, {"loss": 0.5})
    assert path_of(store.resolve("gpt@3")) == "step_3"
    other = store.run("other").save({"w": [1.0]}, step=1)
    with pytest.raises(InvalidInputError, match="was not saved by torch_checkpointing"):
        path_of(other)


def test_what_is_refused(store: Store, tmp_path: Path) -> None:
    """Wrong arguments, and writes to a store that is only read, are refused at once."""
    wrong: list[Callable[[], object]] = [
        lambda: CkptStoreStorage("ckpts", "gpt"),  # type: ignore[arg-type]
        lambda: CkptStoreStorage(store, store.run("gpt")),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(InvalidInputError, match="is needed"):
            call()
    with (
        ckptstore.open(tmp_path / "ckpts", read_only=True) as reading,
        pytest.raises(ReadOnlyError),
    ):
        CkptStoreStorage(reading, "gpt").write("a/b", b"")
