"""Skeletons: what is written comes back, and hostile ones are refused."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import random  # noqa: TID251 - seeded below
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckptstore import errors
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path, PathFilter, Pattern, find_path, path_text
from ckptstore.format.skeleton import Node, decode, encode, iter_leaves, prune
from ckptstore.format.skeleton_check import validate
from ckptstore.tensors.destination import Destination
from ckptstore.tensors.flatten import flatten
from ckptstore.tensors.restore import Restorer

STATE: Node = [
    "d",
    "model", ["o", None, "a.w", ["T", 0, 3], "a.b", ["T", 1, 5], "tied", ["T", 0]],
    "optim", ["d", "state", ["d", 0, ["d", "m", ["T", 2]],
                                  1, ["d", "m", ["V", 2, "float32", 0, [1], [1]]]],
              "groups", ["l", ["d", "lr", 0.5], ["d", "lr", 0.25, "t", ["T", 3]]]],
    "step", 7,
    "obj", ["x", "point", ["l", ["T", 4]]],
    "np", ["N", 5], "blob", ["B", 6, "str"], "gen", ["G", "cpu", ["T", 7]], "nothing", ["d"],
    "q", ["Q", ["T", 8], "qint8", None, "channel", ["t", ["T", 9], ["T", 10], 0]],
]  # fmt: skip


def test_bytes_and_back() -> None:
    """Encoding is stable and decoding gives the same node."""
    assert decode(encode(STATE)) == STATE
    assert decode(memoryview(encode(STATE))) == STATE


def test_leaves() -> None:
    """Leaves come in the order of the state, with their paths, kinds and records."""
    leaves = [(path_text(leaf.path), leaf.kind, leaf.index) for leaf in iter_leaves(STATE)]
    assert leaves == [
        ("model.a.w", "parameter", 0), ("model.a.b", "buffer", 1), ("model.tied", "tensor", 0),
        ("optim.state.0.m", "tensor", 2), ("optim.state.1.m", "view", 2),
        ("optim.groups.1.t", "tensor", 3), ("obj.0", "tensor", 4), ("np", "numpy", 5),
        ("blob", "bytes", 6), ("gen", "generator", 7), ("q", "quantized", 8),
        ("q.quantizer.0", "tensor", 9), ("q.quantizer.1", "tensor", 10),
    ]  # fmt: skip
    assert iter_leaves(3) == []


def _kept(include: list[Any] | None = None, exclude: list[Any] | None = None) -> Node:
    wanted = PathFilter(include, exclude)
    kept = prune(STATE, wanted)
    assert prune(STATE, wanted, wanted.keys_below) == kept  # names that cannot lead there, unseen
    return kept


def test_prune_by_prefix_and_pattern() -> None:
    """A pattern takes what it names and all below; the rest goes, emptied containers too."""
    model = ["d", "model", STATE[2]]  # type: ignore[index]
    assert _kept(["model"]) == _kept(["model.*"]) == _kept([("model",)]) == model
    assert _kept(["model"], ["*.a.*"]) == ["d", "model", ["o", None, "tied", ["T", 0]]]
    assert _kept(["*.m"], ["*.1.*"]) == [
        "d", "optim", ["d", "state", ["d", 0, ["d", "m", ["T", 2]]]],
    ]  # fmt: skip
    assert _kept(["model.tied"]) == ["d", "model", ["o", None, "tied", ["T", 0]]]
    assert _kept(["model.a.w"]) == ["d", "model", ["o", None, "a.w", ["T", 0, 3]]]
    assert _kept(["model.a"]) == ["d", "model", [*STATE[2][:6]]]  # type: ignore[index]
    assert _kept(["nothing", "step"]) == ["d", "step", 7, "nothing", ["d"]]
    assert _kept([]) == ["d"]
    assert _kept() == STATE


def test_prune_keeps_positions_and_objects() -> None:
    """Elements that are left out of a list leave a mark; an adapter's object is kept whole."""
    groups = ["d", "optim", ["d", "groups", ["l", ["m"], ["d", "t", ["T", 3]]]]]
    assert _kept(["*.groups.1.t"]) == groups
    assert _kept(["obj.0"]) == _kept(["obj"]) == ["d", "obj", ["x", "point", ["l", ["T", 4]]]]


def test_patterns() -> None:
    """Patterns are those of a shell, over the whole text, and case-sensitive."""
    paths: list[Any] = [("a", "b"), ("a", 0), ("ab",), ("A", "b"), ("x[0]",), (b"k", (1, 2))]
    assert match_paths(paths, ["a.?"]) == [("a", "b"), ("a", 0)]
    assert match_paths(paths, ["a"]) == [("a", "b"), ("a", 0)]
    assert match_paths(paths, ["a*"], ["*0"]) == [("a", "b"), ("ab",)]
    assert match_paths(paths, ["[aA].b"]) == [("a", "b"), ("A", "b")]
    assert match_paths(paths, ["x[0]"]) == [("x[0]",)]
    assert match_paths(paths, [("a", 0)]) == [("a", 0)]
    assert path_text(paths[-1]) == "b'k'.(1, 2)"
    with pytest.raises(errors.TensorNotFoundError, match=r"matches 'modle\.\*'"):
        match_paths(paths, ["a", "modle.*"])
    with pytest.raises(errors.InvalidInputError, match="list of patterns"):
        match_paths(paths, "a")
    with pytest.raises(errors.InvalidInputError, match="string or a tuple"):
        match_paths(paths, [3])  # type: ignore[list-item]


def test_lookup() -> None:
    """One text names one leaf or is refused; a tuple always names one."""
    paths: list[Any] = [("a.b", "c"), ("a", "b.c"), ("x", 0), ("x", "0"), ("only", 1)]
    assert find_path(paths, "only.1") == ("only", 1)
    assert find_path(paths, ("x", "0")) == ("x", "0")
    with pytest.raises(errors.InvalidInputError, match="names 2 leaves") as caught:
        find_path(paths, "a.b.c")
    assert "('a.b', 'c')" in str(caught.value)
    with pytest.raises(errors.TensorNotFoundError, match=r"did you mean 'only\.1'"):
        find_path(paths, "onyl.1")
    with pytest.raises(errors.TensorNotFoundError):
        find_path(paths, ("nowhere",))


def test_partial_loads(shelf: Callable[..., Any]) -> None:
    """A partial load reads only the records of what it keeps and marks what a list lost."""
    kept = shelf({"a": [torch.ones(1), torch.ones(2), 5], "b": torch.zeros(3)})
    back = kept.load(PathFilter(["a.1"]))
    assert list(back) == ["a"]
    assert torch.equal(back["a"][1], torch.ones(2))
    assert (repr(back["a"][0]), bool(back["a"][2]), len(back["a"])) == ("MISSING", False, 3)


def test_without_torch() -> None:
    """Nothing in the format's state modules imports torch or NumPy."""
    modules = ["paths", "roles", "dtypes", "skeleton", "skeleton_check"]
    imports = ";".join(f"import ckptstore.format.{name}" for name in modules)
    code = f"{imports};import sys;assert not {{'torch','numpy'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def match_paths(
    paths: Iterable[Path],
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
) -> list[Path]:
    """Return the paths that a filter lets pass, once each of its patterns was of use."""
    wanted = PathFilter(include, exclude)
    chosen = [path for path in paths if wanted(path)]
    wanted.check_all_used()
    return chosen


SIZES = [64, 0]
DAMAGED: list[Any] = [
    # shape of nodes
    [], [3], [None, 1], ["nope"], [["d"]], {"a": 1}, msgspec.msgpack.Ext(5, b"x"),
    ["d", "a"], ["d", "a", 1, "a", 2], ["d", 1, 1, True, 2], ["d", float("nan"), 1],
    ["d", ["l"], 1], ["d", ["t", ["d"]], 1], ["d", ["u", b"\xff\xfe"], 1], ["d", ["u", "a"], 1],
    ["d", ["i"], 1], ["d", ["t", float("nan")], 1], ["d", {}, 1],
    ["o"], ["o", 1], ["o", ["l"]], ["o", ["d", 1, 2]], ["o", None, "a"],
    ["dd"], ["dd", "eval"], ["dd", ["l"]], ["dd", "int", 1], ["ct", 1],
    ["q"], ["q", -1], ["q", "a"], ["q", 1, 2, 3], ["s", 1, 1], ["s", ["l"]], ["s", ["T", 0]],
    # plain values
    ["c", 1.0], ["c", 1, 2], ["c", 1.0, 2.0, 3.0], ["i"], ["i", 5], ["i", "1e5"], ["i", "-"],
    ["i", "9" * 5000], ["i", "٣"], ["i", "1_0"], ["u", "text"], ["u", b"\xff"], ["ba", "x"],
    ["r", 1, 2], ["r", 1, 2, 0], ["r", "a", 1, 1], ["r", 1, 2, ["d"]], ["sl", 1],
    ["p", "path"], ["p", "eval", "x"], ["p", "path", 3], ["p", "path", ["i", "3"]],
    ["dt", 3], ["dv"], ["sz", -1], ["sz", "a"], ["sz", *[1] * 65], ["sz", 2**62, 4],
    ["da", 1], ["dm", "x"], ["td", 1.0, 2, 3], ["m", 1], ["x", "n"], ["x", 3, None], ["x", "", 1],
    ["nd"], ["nd", 3], ["nd", ["f", 1]], ["nd", ["f", -1, True, []]], ["nd", "x" * 2000],
    ["nd", ["f", 1, True, [["a"]]]], ["nd", ["f", 1, True, [["a", None, "|u1", -1, []]]]],
    ["nd", ["f", 1, True, [["a", None, "|u1", 0, [-1]]]]], ["ns", "|u1", "a"], ["ns", "|u1"],
    # tensors
    ["T"], ["T", 2], ["T", -1], ["T", "0"], ["T", True], ["T", 0, 16], ["T", 0, -1],
    ["T", 0, 0, -1], ["T", 0, 0, 0, 5], ["T", 0, 0, 0, "cpu", 1], ["T", 0, None],
    ["V", 0], ["V", 2, "uint8", 0, [1], [1]], ["V", 0, "qint8", 0, [1], [1]],
    ["V", 0, "uint8", 0, [65], [1]], ["V", 0, "uint8", 64, [1], [1]], ["V", 0, "uint8", 65, [0],
    [1]],
    ["V", 0, "uint8", -1, [1], [1]], ["V", 0, "float32", 2, [1], [1]], ["V", 0, "uint8", 0, [-1],
    [1]],
    ["V", 0, "uint8", 0, [2], [-1]], ["V", 0, "uint8", 0, [2], [64]], ["V", 0, "uint8", 0, [2],
    [1, 1]],
    ["V", 0, "uint8", 0, [2**62, 4], [0, 0]], ["V", 0, "uint8", 0, [2**63], [0]],
    ["V", 0, "uint8", 0, [2**40, 2**20], [2**40, 2**20]], ["V", 0, "uint8", 0, "ab", [1]],
    ["V", 0, "uint8", 0, [1] * 65, [1] * 65], ["V", 0, "uint8", 1.0, [1], [1]],
    ["V", 1, "uint8", 0, [], []],
    ["V", ["V", 0, "uint8", 0, [1], [1]], "uint8", 0, [1], [1]],
    ["Q", ["T", 0]], ["Q", 3, "qint8", None, "none", ["t"]],
    ["Q", ["d"], "qint8", None, "none", ["t"]],
    ["Q", ["T", 0], "float32", None, "none", ["t"]], ["Q", ["T", 0], "qint8", [-1], "none", ["t"]],
    ["Q", ["T", 0], "qint8", None, "eval", ["t"]], ["Q", ["T", 9], "qint8", None, "none", ["t"]],
    ["Q", [], "qint8", None, "none", ["t"]],
    ["N"], ["N", 5], ["N", 0, 5], ["N", 0, "|u1", 1], ["B", 0], ["B", 0, "eval"], ["B", 7, "str"],
    ["G", "cpu"], ["G", "cpu", ["d"]], ["G", 3, ["T", 0]], ["G", "cpu", ["V", 0, "uint8", 0, [1],
    [1]]],
]  # fmt: skip


@pytest.mark.parametrize("node", DAMAGED, ids=map(str, range(len(DAMAGED))))
def test_damaged_nodes(node: Any) -> None:  # noqa: ANN401
    """Each breach of the grammar is refused, and the message has the path."""
    states: list[Any] = [node, ["d", "key", ["l", 1, node]]]
    for state in states:
        with pytest.raises(errors.CorruptObjectError) as caught:
            validate(state, SIZES)
    assert "'key" in str(caught.value)


def _nested(depth: int) -> list[Any]:
    node: list[Any] = ["l"]
    for _ in range(depth):
        node = ["l", node]
    return node


def test_nesting() -> None:
    """Deep nesting is refused by the checker, and very deep nesting by the decoder."""
    with pytest.raises(errors.LimitError):
        validate(_nested(100), [])
    with pytest.raises(errors.CkptStoreError):
        validate(["d", ["t", ["t", *_nested(80)[1:]]], 1], [])
    with pytest.raises(errors.CorruptObjectError):
        decode(b"\x91" * 1_000_000 + b"\xc0")


def test_keys_cannot_nest_without_end() -> None:
    """Tuples as keys are limited in depth like everything else."""
    key: list[Any] = ["t"]
    for _ in range(100):
        key = ["t", key]
    with pytest.raises(errors.CkptStoreError):
        validate(["d", key, 1], [])
    with pytest.raises(errors.CkptStoreError):
        validate(["s", key], [])


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More nodes, containers or bytes than a state may have are refused before they are built."""
    monkeypatch.setattr("ckptstore.limits.STATE_NODES_MAX", 1000)
    with pytest.raises(errors.LimitError, match="values"):
        validate(["l", *range(2000)], [])
    with pytest.raises(errors.LimitError, match="values"):
        validate(["s", *range(2000)], [])
    with pytest.raises(errors.LimitError, match="containers"):
        decode(encode(["l"])[:-2] + b"\xdd\x00\x00\x10\x00" + b"\x90" * 4096)
    monkeypatch.setattr("ckptstore.limits.SKELETON_BYTES_MAX", 100)
    with pytest.raises(errors.LimitError, match="bytes"):
        decode(b"\xc0" * 101)
    with pytest.raises(errors.LimitError, match="bytes"):
        encode("x" * 101)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\xa5ab", b"\xa1\xff", b"\x01\x01"])
def test_not_msgpack(data: bytes) -> None:
    """Truncated, overlong and invalid bytes are refused."""
    with pytest.raises(errors.CorruptObjectError):
        decode(data)


def test_pickles_are_only_bytes() -> None:
    """A pickle in the place of a skeleton, or in it, is never run."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.abort, ()

    data = pickle.dumps(Bomb())
    with pytest.raises(errors.CkptStoreError):
        validate(decode(data), [])
    validate(decode(encode(["l", data])), [])


def _record(
    dtype: str, shape: tuple[int, ...], nbytes: int, order: tuple[int, ...] | None = None
) -> TensorRecord:
    return TensorRecord(dtype=dtype, shape=shape, order=order, role="weights", nbytes=nbytes)


@pytest.mark.parametrize(
    "record",
    [
        _record("float32", (4,), 15), _record("float99", (4,), 16), _record("qint8", (4,), 4),
        _record("float32", (-4,), -16), _record("float32", (2, 2), 16, (0, 0)),
        _record("float32", (2, 2), 16, (0,)), _record("float32", (2, 2), 16, (2, 1)),
    ],
    ids=map(str, range(7)),
)  # fmt: skip
def test_damaged_records(record: Any) -> None:  # noqa: ANN401
    """Records whose size, dtype or order is wrong get no memory."""
    with pytest.raises(errors.CorruptObjectError):
        Restorer(["T", 0], [record])


def test_records_beyond_memory() -> None:
    """A record of more bytes than there are is a typed error."""
    with pytest.raises(errors.LimitError, match="no memory"):
        Destination(_record("uint8", (1 << 60,), 1 << 60))


def _load(node: Any, *records: TensorRecord) -> Any:  # noqa: ANN401
    validate(node, [record.nbytes for record in records])
    restorer = Restorer(node, records)
    for index in restorer.needed:
        view = restorer.destination(index).view
        view[:] = b"\x81" * len(view)
    return restorer.build()


U8 = _record("uint8", (8,), 8)
MISFITS: list[Any] = [
    ["da", "not a date"], ["dm", "2020-13-01", 0], ["dm", "2020-01-01", 7], ["td", 10**12, 0, 0],
    ["dv", "nowhere"], ["nd", "O"], ["nd", "f4,O"], ["nd", "|O8"], ["nd", "<M8[what]"],
    ["nd", ["f", 8, False, [["a", None, "|O8", 0, []]]]], ["ns", "<i4", b"abc"],
    ["ns", "|O8", b"a" * 8],
    ["nd", ["f", 1, False, [["a", None, "<i8", 0, []]]]], ["N", 0, "<i4"], ["N", 0, "|V3"],
    ["nd", ["f", 8, False, [["a", None, "<i4", 0, []], ["a", None, "<i4", 4, []]]]],
    ["B", 0, "str"], ["G", "cpu", ["T", 0]], ["G", "what", ["T", 0]], ["T", 0, 1],
    ["Q", ["T", 0], "qint32", None, "none", ["t"]],
    ["Q", ["T", 0], "quint4x2", None, "none", ["t"]],
    ["Q", ["T", 0], "quint4x2", [3, 3], "none", ["t"]],
    ["Q", ["T", 0], "qint8", [8], "none", ["t"]],
    ["Q", ["T", 0], "qint8", None, "tensor", ["t"]],
    ["Q", ["T", 0], "qint8", None, "tensor", ["t", "a", 1]],
    ["Q", ["T", 0], "qint8", None, "channel", ["t", 1, 2, 3]],
    ["Q", ["T", 0], "qint8", None, "tensor", 5],
    ["Q", ["T", 0], "qint8", None, "channel", ["t", ["T", 0], ["T", 0], 99]],
]  # fmt: skip


@pytest.mark.parametrize("node", MISFITS, ids=map(str, range(len(MISFITS))))
def test_values_that_cannot_be_made(node: Any) -> None:  # noqa: ANN401
    """What the grammar allows and the libraries refuse arrives as a typed error with the path."""
    with pytest.raises(errors.CkptStoreError):
        _load(["d", "key", node], U8)


TWO = "torch.testing._internal.two_tensor.TwoTensor"


def _composed(name: str = TWO, **changes: Any) -> list[Any]:  # noqa: ANN401
    """Return the node of a tensor in parts, with other fields; None leaves one out."""
    fields = {
        "dtype": ["dt", "uint8"], "shape": ["sz", 8], "stride": ["t", 1], "flags": 0,
        "context": None, "tensors": ["d", "a", ["T", 0], "b", ["T", 0]],
    } | changes  # fmt: skip
    kept = {key: node for key, node in fields.items() if node != "gone"}
    return ["x", name, ["d", *(part for entry in kept.items() for part in entry)]]


def _coo(size: list[Any], context: Any = ("t", "coo", False), **changes: Any) -> list[Any]:  # noqa: ANN401
    """Return the node of a sparse tensor whose indices are 8 times 0x81, as bytes or numbers."""
    parts = ["d", "indices", ["V", 0, "int64", 0, [1, 1], [1, 1]], "values", ["T", 1]]
    fields: dict[str, Any] = {"shape": ["sz", *size], "stride": None, "tensors": parts, **changes}
    return _composed("ckptstore.sparse", context=[*context], **fields)


COMPOSED: dict[str, Any] = {
    "class outside of the list": _composed("os.system"),
    "class of torch that is not listed": _composed("torch.nn.Parameter"),
    "library of the list, other class": _composed("torchao.optim.subclass_8bit.exec"),
    "part missing": _composed(tensors=["d", "a", ["T", 0]]),
    "part too many": _composed(tensors=["d", "a", ["T", 0], "b", ["T", 0], "c", ["T", 0]]),
    "part is text": _composed(tensors=["d", "a", ["T", 0], "b", "text"]),
    "part with a number as name": _composed(tensors=["d", 1, ["T", 0], "b", ["T", 0]]),
    "parts are a list": _composed(tensors=["l", ["T", 0]]),
    "parts differ": _composed(tensors=["d", "a", ["T", 0], "b", ["T", 1]]),
    "field missing": _composed(context="gone"),
    "field too many": _composed(more=1),
    "shape is a list": _composed(shape=["l", 8]),
    "negative shape": _composed(shape=["sz", -8]),
    "other dtype": _composed(dtype=["dt", "float32"]),
    "dtype is text": _composed(dtype="uint8"),
    "flags are text": _composed(flags="1"),
    "Parameter of integers with a gradient": _composed(flags=3),
    "context of an odd type": _composed(context=["l", ["dv", "nowhere"]]),
    "state is a number": ["x", TWO, 3],
    "sparse: index out of range": _coo([4]),
    "sparse: negative size": _coo([-4]),
    "sparse: sizes without end": _coo([2**62, 2**62]),
    "sparse: too few dimensions": _coo([4, 4, 4]),
    "sparse: layout unknown": _coo([4], ("t", "dense", False)),
    "sparse: layout is no text": _coo([4], ("t", ["l"], False)),
    "sparse: coalesced is a number": _coo([4], ("t", "coo", 1)),
    "sparse: no context": _coo([4], ("l",)),
    "sparse: csr without rows": _coo([4, 4], ("t", "csr", True)),
    "sparse: other dtype": _coo([4], dtype=["dt", "float32"]),
    "stream: position beyond": ["x", "ckptstore.BytesIO", ["t", b"abc", 4]],
    "stream: position negative": ["x", "ckptstore.BytesIO", ["t", b"abc", -1]],
    "stream: position is a bool": ["x", "ckptstore.BytesIO", ["t", b"abc", True]],
    "stream: text": ["x", "ckptstore.BytesIO", ["t", "abc", 0]],
    "stream: no tuple": ["x", "ckptstore.BytesIO", b"abc"],
    "stream: no position": ["x", "ckptstore.BytesIO", ["t", b"abc"]],
    "enum of torchao, no member": ["x", "torchao.float8.config.ScalingGranularity", "no"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(COMPOSED))
def test_objects_of_built_in_adapters_that_cannot_be_made(name: str) -> None:
    """A typed error: of a class that is not listed, and of parts that make no such object."""
    with pytest.raises(errors.CkptStoreError):
        _load(["d", "key", COMPOSED[name]], U8, _record("uint8", (1,), 1))


def test_names_from_a_store_are_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in the list of names leads to no import, whatever it looks like."""
    asked: list[str] = []
    monkeypatch.setattr("importlib.import_module", asked.append)
    for name in ("os.system", "torchao.evil.Class", "ckptstore.tensors.builtin.SPARSE", ".", "a"):
        with pytest.raises(errors.StateError, match="which is not given"):
            _load(_composed(name), U8)
    assert asked == []


def test_random_damage() -> None:
    """Random changes of a real skeleton's bytes give some state or a typed error, nothing else."""
    flat = torch.randn(30)
    state: dict[str, Any] = {"a": flat, "b": flat[3:9], "c": {"x": (1, 2.5, "y", {3}, 10**30)}}
    state["d"] = [torch.zeros(2), np.zeros(2, "<M8[s]"), np.float32(1), range(3), {1: b"x"}]
    state["e"] = [dt.timedelta(1), torch.device("cpu"), torch.float16, deque([1], maxlen=2)]
    taken = flatten(state)
    good = encode(taken.skeleton)
    records = [_record(t.dtype, t.shape, t.nbytes, t.order) for t in taken.tensors]
    chance = random.Random(5)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            _load(decode(bytes(data)), *records)
        except errors.CkptStoreError:
            refused += 1
    assert refused > 1000
