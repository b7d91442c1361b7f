"""Directories that torch.distributed.checkpoint wrote become versions, and nothing is executed."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peaks import memory_below
from rankkit.groups import Rank, run_ranks
from rankkit.states import differences, mesh_of, sharded, state_of
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Shard

import ckptstore
from ckptstore import limits
from ckptstore.cli.main import run as command
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    FormatError,
    LimitError,
    ObjectNotFoundError,
    PolicyError,
)
from ckptstore.integrations.dcp.metadata_pickle import read_metadata
from ckptstore.integrations.files import import_file
from ckptstore.store import Store

pytestmark = pytest.mark.timeout(300)

PLAIN = {
    "model": {"w": torch.arange(6000.0).reshape(60, 100), "half": torch.ones(3, 5).bfloat16()},
    "optimizer": {"state": [{"m": torch.full((4,), 2.0)}, {"m": torch.zeros(0, 3)}], "lr": 0.1},
    "step": 7,
    "text": "grün",
    "betas": (0.9, 0.999),
}


def write_of_ranks(me: Rank, path: str) -> None:
    """Save the state of all ranks as torch does."""
    state = state_of(me.world, seed=3, models=("hsdp",))
    state["values"] = {name: state["values"][name] for name in ("lr", "names", "betas", "random")}
    state["tensors"]["more"] = sharded(torch.ones(999, 70), mesh_of(me.world, 1), [Shard(1)])
    dcp_save(state, storage_writer=FileSystemWriter(path, thread_count=2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory that torch wrote."""
    path = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp_save(PLAIN, storage_writer=FileSystemWriter(path), no_dist=True)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a new store."""
    return ckptstore.open(tmp_path / "store", create=True, chunk_bytes=65536)


@pytest.mark.slow
def test_what_four_ranks_wrote(tmp_path: Path) -> None:
    """Shards by rows, columns and tiles of four ranks: one version of whole tensors, in batches."""
    path = str(tmp_path / "four")
    run_ranks(write_of_ranks, 4, path)
    url = tmp_path / "store"
    with ckptstore.open(url, create=True, chunk_bytes=65536, host_bytes=200_000) as store:
        version = import_file(store, path, run="old", step=3)
        found = store.load("old@3")
        sound = store.verify().ok
    meant = state_of(0, seed=3, models=("hsdp",))
    meant["values"] = {n: meant["values"][n] for n in ("lr", "names", "betas", "random")}
    meant["tensors"]["more"] = torch.ones(999, 70)

    assert list(differences(found, meant)) == []
    assert version.metadata["import"]["format"] == "torch.distributed.checkpoint"
    assert version.receipt["ranks_count"] > 4, "it was read in batches"
    assert sound


def test_a_save_that_did_not_finish_is_told(folder: Path, store: Store) -> None:
    """Files of ranks without .metadata: not taken for a folder of weights, nothing is imported."""
    (folder / ".metadata").unlink()
    with store, pytest.raises(FormatError, match=r"did not finish: there is no \.metadata"):
        import_file(store, folder, run="old", step=1)


def test_a_file_that_the_metadata_names_is_missing(folder: Path, store: Store) -> None:
    """A copy that lost a rank's file: the error says that the checkpoint is incomplete."""
    for file in folder.glob("*.distcp"):
        file.unlink()
    with store:
        with pytest.raises(ObjectNotFoundError, match=r"\.distcp by the metadata") as told:
            import_file(store, folder, run="old", step=1)
        assert told.value.hint == "the checkpoint is incomplete"
        assert store.runs() == []


def test_plain_states_metrics_and_roles(folder: Path, store: Store) -> None:
    """Nested dicts and lists, values, a key above all of it; and what the catalog is to say."""
    with store:
        first = import_file(
            store, folder, run="old", step=1, metrics={"loss": 0.5}, directions={"loss": "min"},
            tags=["good"], metadata={"note": "x"}, roles={"*.half": "extra"},
        )  # fmt: skip
        second = import_file(store, folder, run="old", step=2, under="all")
        found = store.load("old@best:loss")
        nested = store.load("old@2")

    assert list(differences(found, PLAIN)) == []
    assert list(differences(nested, {"all": PLAIN})) == []
    assert (first.metrics, first.tags, first.metadata["note"]) == ({"loss": 0.5}, ("good",), "x")
    assert first.roles["extra"].logical == 30
    assert sum(role.new for role in second.roles.values()) == 0, "shared with the first"


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``ckptstore import DIR`` takes it for what it is; a hostile one ends with an error."""
    url = str(tmp_path / "store")
    assert command(["init", url]) == 0
    assert command(["import", str(folder), "old", "--step", "5", "--store", url]) == 0
    assert "old@5" in capsys.readouterr().out
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(os.system, ("touch pwned",))))
    assert command(["import", str(folder), "old", "--step", "6", "--store", url]) != 0
    assert "posix.system" in capsys.readouterr().err
    with ckptstore.open(url) as opened:
        assert [version.step for version in opened.versions()] == [5]


class Hostile:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:  # noqa: ANN401
        return self.call


MARK: list[str] = []


def mark(text: str) -> str:
    """Note that something was executed."""
    MARK.append(text)
    return text


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("true",)), (mark, ("called",)), (eval, ("1",)), (getattr, ("text", "upper")),
        (torch.load, ("x",)), (OrderedDict, ()), (torch.hub.load, ("a/b", "c")),
    ],
)  # fmt: skip
def test_a_pickle_that_calls_is_refused(
    function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """Whatever it would call, anywhere: an error that names it, and nothing has run."""
    hostile = Hostile(function, arguments)
    for data in (
        pickle.dumps(hostile),
        pickle.dumps(Metadata(state_dict_metadata={"a": hostile})),  # type: ignore[dict-item]
        pickle.dumps(Metadata(state_dict_metadata={}, planner_data=hostile)),
        pickle.dumps([hostile], protocol=0),
    ):
        with pytest.raises(PolicyError, match=function.__name__):
            read_metadata(data, where=".metadata")
    assert MARK == []


def test_attributes_of_what_is_allowed_lead_nowhere() -> None:
    """Dotted names, stack tricks and references to outside are refused as well."""
    dotted = b"\x80\x04\x8c\x28torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93."
    outside = pickle.dumps(1)[:-1] + b"Q."
    copyreg = b"\x80\x02ccopyreg\n_reconstructor\n."
    for data in (dotted, b"cos\nsystem\n.", copyreg, outside, b"", b"garbage", b"\x80\x04N."):
        with pytest.raises((PolicyError, FormatError)):
            read_metadata(data, where=".metadata")


def test_too_much_metadata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file over the limit is not read on."""
    monkeypatch.setattr(limits, "DCP_METADATA_BYTES_MAX", 100)
    with pytest.raises(LimitError):
        read_metadata(bytes(101), where=".metadata")


OF_TORCH = b"ctorch.distributed.checkpoint."


def text(value: str) -> bytes:
    """Return the instruction that makes a string."""
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def metadata_with(fqn: bytes, path: bytes) -> bytes:
    """Return a ``.metadata`` whose one place is of the name and the file that instructions make."""
    index = OF_TORCH + b"metadata\nMetadataIndex\n)\x81}" + text("fqn") + fqn + b"sb"
    info = OF_TORCH + b"filesystem\n_StorageInfo\n)\x81}" + text("relative_path") + path
    state = text("storage_data") + b"}" + index + info + b"sbss" + text("state_dict_metadata")
    return b"\x80\x02" + OF_TORCH + b"metadata\nMetadata\n)\x81}" + state + b"}sb."


def doubled(levels: int, pair: bytes) -> bytes:
    """Return instructions that make a container of two of one of two of one ..."""
    return b")" + b"".join(b"q\x00" + pair for _ in range(levels))


TUPLES = b"0h\x00h\x00\x86"
LISTS = b"0]h\x00ah\x00a"
BOMBS = {
    "a place far up in the memo": b"\x80\x02Nr" + struct.pack("<I", 150_000_000) + b".",
    "bytes that are not there": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "a tuple that takes years to hash": b"\x80\x02}" + doubled(60, TUPLES) + b"Ns.",
    "as keys of many": b"\x80\x02}(" + doubled(60, TUPLES) + b"Nu.",
    "copied on the stack": b"\x80\x02})" + b"2\x86" * 60 + b"Ns.",
    "in a set": b"\x80\x04\x8f(" + doubled(60, TUPLES) + b"\x90.",
    "a name that takes years to print": metadata_with(doubled(60, LISTS), text("x")),
    "a file that takes years to print": metadata_with(text("x"), doubled(60, TUPLES)),
    "a name nested deeply": metadata_with(b"]" * 5000 + b"a" * 4999, text("x")),
    "a number of a million bits": b"\x80\x02\x8b" + struct.pack("<i", 1 << 17) + b"1" * (1 << 17),
    "an empty stack": b"\x80\x02}s.",
    "a function that is changed": OF_TORCH + b"metadata\n_MEM_FORMAT_ENCODING\n}Nb.",
}


@pytest.mark.parametrize("what", sorted(BOMBS))
def test_a_small_pickle_cannot_ask_for_much(what: str) -> None:
    """Some bytes of metadata that want gigabytes or years: a typed error, and little memory."""
    with memory_below(16 << 20), pytest.raises((FormatError, CorruptObjectError)):
        read_metadata(BOMBS[what], where=".metadata")


def test_instructions_and_shared_chunks_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch writes is read up to the limits; beyond them a typed error says which."""
    data = (folder / ".metadata").read_bytes()
    assert read_metadata(data, where=".metadata").tensors
    for name, limit in (("DCP_METADATA_OPCODES_MAX", 50), ("BLOCKS_MAX", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, limit)
            with pytest.raises(LimitError, match=rf"^\.metadata has .*{limit}"):
                read_metadata(data, where=".metadata")


@pytest.mark.parametrize(
    ("levels", "width", "why"), [(40, 2, "'step'.*more than"), (200, 1, "'step'.*deeper")]
)
def test_a_value_that_names_one_list_often_is_refused(
    folder: Path, store: Store, levels: int, width: int, why: str
) -> None:
    """Values are counted as often as they are named, and to a depth; no version appears."""
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value] * width
    replace_value(folder, value)
    with store:
        with pytest.raises(LimitError, match=why):
            import_file(store, folder, run="old", step=1)
        assert store.versions() == []


def replace_value(folder: Path, value: object) -> None:
    """Put a value in the place of the step."""
    packed = io.BytesIO()
    torch.save(value, packed)
    (folder / "value").write_bytes(packed.getvalue())

    def place(metadata: Any) -> None:  # noqa: ANN401
        for index, info in metadata.storage_data.items():
            if index.fqn == "step":
                info.relative_path, info.offset, info.length = "value", 0, len(packed.getvalue())

    changed(folder, place)


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    """Change what the metadata of a directory says."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - written by this test
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _place(name: str) -> Callable[[Any], Any]:
    return lambda m: next(info for index, info in m.storage_data.items() if index.fqn == name)


CHANGES: dict[str, tuple[Callable[[Any], None], type[CkptStoreError], str]] = {
    "a file outside": (
        lambda m: setattr(_place("model.w")(m), "relative_path", "../secret"),
        FormatError,
        "not in the directory",
    ),
    "an absolute file": (
        lambda m: setattr(_place("model.w")(m), "relative_path", "/etc/passwd"),
        FormatError,
        "not in the directory",
    ),
    "no such file": (
        lambda m: setattr(_place("model.w")(m), "relative_path", "__9_9.distcp"),
        ObjectNotFoundError,
        "__9_9",
    ),
    "past the end": (
        lambda m: setattr(_place("model.w")(m), "offset", 1 << 40),
        FormatError,
        "incomplete",
    ),
    "an extension": (
        lambda m: setattr(_place("model.w")(m), "transform_descriptors", ["stream.zstd"]),
        FormatError,
        "stream.zstd",
    ),
    "another shape": (
        lambda m: setattr(
            m.state_dict_metadata["model.half"].chunks[0], "sizes", torch.Size([5, 3])
        ),
        FormatError,
        "model.half",
    ),
    "larger than its file": (
        lambda m: setattr(
            m.state_dict_metadata["model.half"].chunks[0], "sizes", torch.Size([1 << 40, 5])
        ),
        FormatError,
        "model.half",
    ),
    "a chunk less": (
        lambda m: m.state_dict_metadata["model.w"].chunks.clear(),
        CkptStoreError,
        "model.w",
    ),
    "no place": (lambda m: m.storage_data.pop(MetadataIndex("step")), CorruptObjectError, "step"),
    "no storage": (lambda m: setattr(m, "storage_data", None), FormatError, "where the data"),
    "negative": (
        lambda m: setattr(_place("model.w")(m), "offset", -5),
        CorruptObjectError,
        "incomplete",
    ),
}


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_what_contradicts_itself_is_refused(folder: Path, store: Store, what: str) -> None:
    """Places outside, missing data, other shapes: an error that says what, and no version."""
    change, error, text = CHANGES[what]
    changed(folder, change)
    with store:
        with pytest.raises(error, match=text):
            import_file(store, folder, run="old", step=1)
        assert store.versions() == []


def test_a_link_that_leads_out_is_refused(folder: Path, store: Store, tmp_path: Path) -> None:
    """A data file that is a link to elsewhere is not read."""
    (data,) = folder.glob("*.distcp")
    shutil.move(data, tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with store, pytest.raises(FormatError, match="leads out"):
        import_file(store, folder, run="old", step=1)


def test_a_value_that_would_execute_is_refused(tmp_path: Path, store: Store) -> None:
    """A value that needs a full unpickler is named; nothing of it runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(tmp_path / "bad")
        dcp_save(
            {"fine": 1, "hook": Hostile(mark, ("value",))}, storage_writer=writer, no_dist=True
        )
    MARK.clear()
    with store:
        with pytest.raises(PolicyError, match="'hook'"):
            import_file(store, tmp_path / "bad", run="old", step=1)
        assert store.versions() == []
    assert MARK == []


def test_a_compressed_archive_is_refused(folder: Path, store: Store) -> None:
    """An archive within that would grow when read is refused before torch sees it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 16))
    (data,) = folder.glob("*.distcp")
    data.write_bytes(packed.getvalue().ljust(data.stat().st_size, b"\0"))

    def whole(metadata: Any) -> None:  # noqa: ANN401
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(packed.getvalue())

    changed(folder, whole)
    with store, pytest.raises(FormatError):
        import_file(store, folder, run="old", step=1)
