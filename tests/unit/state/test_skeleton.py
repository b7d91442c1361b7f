"""The skeleton's bytes, leaves, paths, pruning: all without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.format.paths import Path, PathFilter, Pattern, find_path, path_text
from ckptstore.format.skeleton import Node, decode, encode, iter_leaves, prune

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
    return prune(STATE, PathFilter(include, exclude))


def test_prune_by_prefix_and_pattern() -> None:
    """A pattern takes what it names and all below; the rest goes, emptied containers too."""
    model = ["d", "model", STATE[2]]  # type: ignore[index]
    assert _kept(["model"]) == _kept(["model.*"]) == _kept([("model",)]) == model
    assert _kept(["model"], ["*.a.*"]) == ["d", "model", ["o", None, "tied", ["T", 0]]]
    assert _kept(["*.m"], ["*.1.*"]) == [
        "d", "optim", ["d", "state", ["d", 0, ["d", "m", ["T", 2]]]],
    ]  # fmt: skip
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
    with pytest.raises(TensorNotFoundError, match=r"matches 'modle\.\*'"):
        match_paths(paths, ["a", "modle.*"])
    with pytest.raises(InvalidInputError, match="list of patterns"):
        match_paths(paths, "a")
    with pytest.raises(InvalidInputError, match="string or a tuple"):
        match_paths(paths, [3])  # type: ignore[list-item]


def test_lookup() -> None:
    """One text names one leaf or is refused; a tuple always names one."""
    paths: list[Any] = [("a.b", "c"), ("a", "b.c"), ("x", 0), ("x", "0"), ("only", 1)]
    assert find_path(paths, "only.1") == ("only", 1)
    assert find_path(paths, ("x", "0")) == ("x", "0")
    with pytest.raises(InvalidInputError, match="names 2 leaves") as caught:
        find_path(paths, "a.b.c")
    assert "('a.b', 'c')" in str(caught.value)
    with pytest.raises(TensorNotFoundError, match=r"did you mean 'only\.1'"):
        find_path(paths, "onyl.1")
    with pytest.raises(TensorNotFoundError):
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
