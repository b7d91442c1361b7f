"""The golden store of format v1, which every version of ckptstore must read as it is."""

from __future__ import annotations

import datetime as dt
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from goldenkit import FILES, chunks_of, copied, golden, sizes

import ckptstore
from ckptstore.backends.posix import PosixBackend
from ckptstore.catalog import snapshots
from ckptstore.format.references import References, decode_references
from ckptstore.store import Store
from ckptstore.tensors.adapters import TypeAdapter

GOLDEN, COLLECTED = golden("v1"), golden("v1-collected")
FIRST, SECOND = "4dece9da5a8888fe9c2bac69211d23ba", "47945d30d668d3b4ac077c2793170555"
RAW, ZSTD = "de1559a6f33ebf3ae6eca845073c2669", "f152bea7abe0d3f17e65ea4c5fce4f1c"
RECORD = "references/000000000006-35ae7bc3.refs"


class Money:
    """Never made here: the adapter gives the stored state as it is."""


MONEY = TypeAdapter(name="money", type=Money, to_state=vars, from_state=lambda state: state)


def listed() -> dict[str, tuple[int, int]]:
    """Return size and time of change of every file of the golden store."""
    return {
        path.relative_to(GOLDEN).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in GOLDEN.rglob("*")
        if path.is_file()
    }


def opened() -> Store:
    """Open the golden store."""
    return ckptstore.open(GOLDEN, read_only=True)


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Return the second version, loaded."""
    with opened() as store:
        loaded: dict[str, Any] = store.load("gpt", adapters=[MONEY])
    return loaded


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.parent.iterdir()))
def test_every_file_of_the_golden_stores_is_there(name: str) -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(golden(name)) == FILES[name]


@pytest.mark.parametrize(
    ("golden_store", "name", "values"),
    [
        ("v1-again", "gpt", [2.0, 3.0]), ("v1-again", "vit", [1.0, 2.0]),
        ("v1-again", "35ee575030efdab59be409148b8b7236", [1.0, 2.0]),  # it came back
        ("v1-collected", "gpt", [2.0, 3.0, 4.0]), ("v1-pins", "gpt", [3.0, 4.0, 5.0]),
        ("v1-tiers", "gpt", [1.0, 2.0, 3.0]), ("v1-replica", "gpt", [-1.5, -1.5, -1.5, 3.0]),
        ("v1-replica", "ft", [-1.5, -1.5, -1.5, -1.5, 4.0]),
        ("v1-replica", "dae16f7bd36dcd4dfde8ec0e7ef4c7f9", [-1.5, -1.5, -1.5, -1.5, 4.0]),
    ],
)  # fmt: skip
def test_the_single_file_reads_it_too(
    reader: ModuleType, golden_store: str, name: str, values: list[float]
) -> None:
    """The reader of docs/reference reads versions of other stores, and passes over other records.

    Those are pins, names of replicas and records of references.
    """
    found = reader.restore(golden(golden_store), name)["model.w"]
    assert found[: len(values)].tolist() == values


def test_reading_writes_nothing() -> None:
    """Listing, loading and verifying leaves every file as it is."""
    before = listed()
    with opened() as store:
        store.versions()
        store.load("gpt@first", adapters=[MONEY])
        store.version("raw")["weights"][:5]
        store.stats()
        assert store.verify().ok

    assert listed() == before


def test_the_catalog() -> None:
    """Runs, versions, metrics, tags and metadata are what they were."""
    with opened() as store:
        runs = {run.name: run for run in store.runs()}
        versions = {version.id: version for version in store.versions()}
        log = store.log()

    assert list(runs) == ["gpt", "raw", "zstd/a"]
    assert runs["gpt"].metrics == {"loss": "min", "acc": "max"}
    assert runs["gpt"].tags == {"good": SECOND, "first": FIRST}
    assert {name: run.head for name, run in runs.items()} == {
        "gpt": SECOND,
        "raw": RAW,
        "zstd/a": ZSTD,
    }
    assert list(versions) == [FIRST, SECOND, RAW, ZSTD]
    first, second = versions[FIRST], versions[SECOND]
    assert (first.run, first.step, first.parent, first.commit) == ("gpt", 1, "", 1)
    assert first.metrics == {"loss": 0.5, "bleu": 31.0}
    assert first.created_at == dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC)
    assert (second.step, second.parent, second.tags) == (2, FIRST, ("good",))
    assert second.created_at == dt.datetime(2023, 11, 14, 22, 14, 20, tzinfo=dt.UTC)
    assert math.isnan(second.metrics["loss"])
    assert second.metrics["acc"] == math.inf
    assert second.metadata == {"lr": 0.001, "note": "größer", "layers": [1, 2]}
    assert second.roles["weights"].logical == 344_479
    assert second.roles["weights"].new == 200
    assert [[type(op).__name__ for op in commit.ops] for commit in log] == [
        ["CreateRun", "Save"], ["Annotate"], ["Declare", "Save"], ["Tag"], ["Tag"], ["Untag"],
        ["CreateRun", "Save"], ["CreateRun", "Save"],
    ]  # fmt: skip


def test_the_snapshots_hold_what_the_log_does() -> None:
    """Both catalog snapshots are read, and the newer equals the folded log."""
    with opened() as store:
        backend, catalog = store.repo.backend, store.repo.refresh()
        newest, older = snapshots.read_newest_first(backend, snapshots.listed(backend))
        log = store.repo.log

        assert (newest.number, older.number) == (8, 4)
        assert log.catalog.digest == newest.digest == log.commits(8).__next__().digest
        assert newest.versions() is not None
        assert [repr(v) for v in newest.versions()] == [repr(v) for v in catalog.versions()]
        assert [v.id for v in older.versions()] == [FIRST, SECOND]


def test_every_codec_and_every_layout_is_there() -> None:
    """The golden store holds chunks of each codec and each layout of planes."""
    found = {(header.codec, header.layout) for header, _ in chunks_of(GOLDEN)}

    assert found == {(0, 0), (1, 0), *((2, layout) for layout in range(1, 7))}


TENSORS: dict[str, tuple[torch.dtype, list[int], Any]] = {
    "float32": (torch.float32, [3, 4], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    "view": (torch.float32, [2, 2], [[4, 6], [8, 10]]),
    "tied": (torch.float32, [3], [1.5, -2.5, 3.25]),
    "tied_again": (torch.float32, [3], [1.5, -2.5, 3.25]),
    "parameter": (torch.float32, [1, 2], [[1.0, 2.0]]),
    "frozen": (torch.float32, [1], [3.0]),
    "buffer": (torch.float32, [1], [7.0]),
    "scalar": (torch.float64, [], 2.5),
    "empty": (torch.float32, [0, 5], []),
    "bool": (torch.bool, [3], [True, False, True]),
    "bfloat16": (torch.bfloat16, [3], [1.0, -0.5, 3.0]),
    "float16": (torch.float16, [100], [-1.5] * 100),
    "complex64": (torch.complex64, [2], [1 + 2j, -3.5j]),
    "large_float32": (torch.float32, [40_000], [(n % 251) / 8 for n in range(40_000)]),
    "large_equal": (torch.float32, [40_000], [(n % 251) / 8 for n in range(40_000)]),
    "planes_float64": (torch.float64, [500], [n / 4 for n in range(500)]),
    "planes_bfloat16": (torch.bfloat16, [600], [n % 17 for n in range(600)]),
    "planes_int16": (torch.int16, [700], [*range(700)]),
    "planes_int32": (torch.int32, [800], [*range(0, 2400, 3)]),
    "planes_int64": (torch.int64, [900], [*range(-450, 450)]),
    "zstd_uint8": (torch.uint8, [2000], [n % 5 for n in range(2000)]),
}


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_tensors(state: dict[str, Any], name: str) -> None:
    """Every tensor has the dtype, the shape and the values that it had."""
    dtype, shape, values = TENSORS[name]
    tensor = state["model"][name]

    assert (tensor.dtype, list(tensor.shape)) == (dtype, shape)
    assert tensor.tolist() == values


def test_bits_kinds_and_memory_of_tensors(state: dict[str, Any]) -> None:
    """What values do not tell: bits, strides, kinds of tensors, and what is one memory."""
    model = state["model"]

    assert model["float8"].dtype == torch.float8_e4m3fn
    assert model["float8"].view(torch.uint8).tolist() == [0x38, 0xC0, 0x30]
    assert model["nan"].view(torch.int32).tolist() == [0x7FC00000, 0x7F800000, -(2**31)]
    assert model["channels_last"].stride() == (24, 1, 8, 2)
    assert model["channels_last"].flatten().tolist() == [float(n) for n in range(24)]
    assert model["tied"] is model["tied_again"]
    assert model["view"].untyped_storage().data_ptr() == model["float32"].data_ptr()
    assert model["view"].stride() == (4, 2)
    assert type(model["parameter"]) is torch.nn.Parameter
    assert (model["parameter"].requires_grad, model["frozen"].requires_grad) == (True, False)
    assert type(model["frozen"]) is torch.nn.Parameter
    assert isinstance(model["buffer"], torch.nn.Buffer)
    assert model["quantized"].dtype == torch.quint8
    assert (model["quantized"].q_scale(), model["quantized"].q_zero_point()) == (0.5, 10)
    assert model["quantized"].int_repr().tolist() == [10, 12, 14]
    assert model["generator"].initial_seed() == 7


def test_numpy_values(state: dict[str, Any]) -> None:
    """Arrays keep dtype, values and memory order; scalars and dtypes come back as such."""
    extra = state["extra"]

    assert extra["numpy"].dtype == np.int16
    assert extra["numpy"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert extra["numpy"].strides == (2, 6)
    assert extra["numpy_struct"].dtype == np.dtype([("id", "<i4"), ("x", "<f8")])
    assert extra["numpy_struct"].tolist() == [(1, 2.5), (3, 4.5)]
    assert extra["numpy_text"].tolist() == ["ab", "ü"]
    assert (type(extra["numpy_scalar"]), float(extra["numpy_scalar"])) == (np.float32, 0.5)
    assert extra["numpy_dtype"] == np.dtype("<u2")


PLAIN: dict[str, Any] = {
    "long_bytes": b"0123456789" * 500, "long_text": "grün " * 1000,
    "long_bytearray": bytearray(b"xyz" * 2000),
    "plain": [None, True, False, 0, -5, 2**63, -(10**30), 1.5, -math.inf, "ä", b"\x00\xff"],
    "surrogate": "a\udc80b", "complex": 1.5 - 2j, "tuple": (1, (2,), ()), "set": {1, "a"},
    "frozenset": frozenset({(1, 2)}), "deque": deque([1, 2], maxlen=5),
    "ordered": OrderedDict(b=1, a=2), "defaultdict": defaultdict(list, {"k": [1]}),
    "counter": Counter("aab"),
    "keys": {1: "int", "1": "str", None: "none", (1, "x"): "tuple", 2.5: "float", b"b": "bytes"},
    "bytearray": bytearray(b"abc"), "range": range(1, 10, 3), "slice": slice(None, 5),
    "path": pathlib.PurePosixPath("/data/x"), "date": dt.date(2024, 2, 29),
    "datetime": dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC),
    "timedelta": dt.timedelta(days=-1, seconds=5), "dtype": torch.bfloat16,
    "device": torch.device("cpu"), "size": torch.Size([2, 3]), "money": {"cents": 250},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_plain_values(state: dict[str, Any], name: str) -> None:
    """Every plain value has the type and the value that it had."""
    found = state["extra"][name]

    assert type(found) is type(PLAIN[name])
    assert found == PLAIN[name]


def test_what_equality_does_not_tell(state: dict[str, Any]) -> None:
    """Order, limits, factories and attributes of containers are kept too."""
    extra = state["extra"]

    assert [*state] == ["model", "extra"]
    numpy = {"numpy", "numpy_struct", "numpy_text", "numpy_scalar", "numpy_dtype"}
    assert set(extra) == {*PLAIN, *numpy}
    assert [type(value) for value in extra["plain"]] == [type(value) for value in PLAIN["plain"]]
    assert extra["deque"].maxlen == 5
    assert list(extra["ordered"]) == ["b", "a"]
    assert extra["ordered"]._metadata == {"version": 2}
    assert extra["defaultdict"].default_factory is list
    assert list(extra["keys"]) == list(PLAIN["keys"])


def test_the_first_version_differs_where_it_did() -> None:
    """The version before holds the tensor as it was before the change."""
    with opened() as store:
        half = store.load("gpt@1", include=["model.float16", "model.bool"])["model"]

    assert half["float16"].tolist() == [n / 8 for n in range(100)]
    assert half["bool"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("ref", "load"), [("raw@0", lambda s: s["bias"]), ("zstd/a@latest", lambda s: s["bias"])]
)
def test_other_codecs(ref: str, load: Callable[[Any], torch.Tensor]) -> None:
    """Versions that were saved raw, and with zstd alone."""
    with opened() as store:
        assert load(store.load(ref)).tolist() == [float(n) for n in range(300)]


def test_noise_that_is_stored_raw() -> None:
    """A tensor of 70,000 random bytes comes back by its sum, ends and a slice in the middle."""
    with opened() as store:
        weights = store.load("raw")["weights"]
        part = store.version("raw")["weights"][65_530:65_540]

    assert (weights.dtype, weights.shape) == (torch.uint8, (70_000,))
    assert weights[:6].tolist() == [168, 229, 184, 171, 238, 171]
    assert int(weights.sum()) == 8_919_500
    assert part.tolist() == [254, 117, 59, 21, 67, 183, 190, 22, 118, 76]


def test_a_record_of_references() -> None:
    """Digests of the two live manifests, and the packs that they name."""
    with ckptstore.open(COLLECTED, read_only=True) as store:
        digests = [version.manifest_digest for version in store.versions()]
    # All of a pack is live, but for its header and its trailer.
    files = FILES[COLLECTED.name]
    packs = {name[9:41]: size - 64 for name, size in files.items() if name.startswith("packs/")}
    found = decode_references((COLLECTED / RECORD).read_bytes(), where=RECORD)
    assert found == References(
        manifests=frozenset(map(bytes.fromhex, digests)), packs=packs, deltas_settled=True
    )


def test_a_collection_believes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No manifest is read where it is, all are where it is not; nothing changes."""
    read: list[str] = []
    files = FILES[COLLECTED.name]
    plain = PosixBackend.get

    def get(self: PosixBackend, key: str, *, bytes_max: int) -> bytes:
        read.append(key)
        return plain(self, key, bytes_max=bytes_max)

    monkeypatch.setattr(PosixBackend, "get", get)
    for without, count in (((), 0), (("*.refs",), 2)):
        place = copied(COLLECTED, tmp_path / f"copy-{count}", without=without)
        with ckptstore.open(place) as store:
            read.clear()
            report = store.gc(grace_s=0, orphan_age_s=0)
        assert not report.condemned["packs"].count
        assert sum(key.startswith("manifests/") for key in read) == count
        apart = {name: size for name, size in files.items() if name != RECORD}
        assert apart.items() <= sizes(place).items()
        ours = [name for name in sizes(place) if not name.startswith(".")]
        assert len(ours) == len(files)
