"""Renaming by prefix: which paths move, where to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.format.paths import Path, Pattern, path_text
from ckptstore.format.renames import Renames, encode_key, rename
from ckptstore.format.skeleton import Node, decode_key, iter_leaves
from ckptstore.format.skeleton_check import validate


@pytest.mark.parametrize(
    ("path", "mapping", "expected"),
    [
        (("model", "w"), {"model": "net"}, ("net", "w")),
        (("model", "w"), {"model": "net.inner"}, ("net", "inner", "w")),
        (("model", "w"), {"model": "model.inner"}, ("model", "inner", "w")),
        (("model", "w"), {"model": ""}, ("w",)),
        (("w.x",), {"": "model"}, ("model", "w.x")),
        (("model", "back.0.w"), {"model.back": "model.enc"}, ("model", "enc.0.w")),
        (("model", "back.0.w"), {"model.back": "model.enc.body"}, ("model", "enc.body.0.w")),
        (("model", "back.0.w"), {"model.back": "model"}, ("model", "0.w")),
        (("model", "back.0.w"), {"model.back": "enc"}, ("enc.0.w",)),
        (("model", "back.0.w"), {"model.back.0.w": "model.w"}, ("model", "w")),
        (("model", "w"), {"model.w": "model.enc.w"}, ("model", "enc.w")),
        (("a", "w"), {"a.w": "b.v"}, ("b", "v")),
        (("backbone", "w"), {"back": "x"}, ("backbone", "w")),
        (("a", "b", "w"), {"a": "x", "a.b": "y"}, ("y", "w")),
        (("a", "w"), {"a": "b", "b": "a"}, ("b", "w")),
        (("state", 0, "m"), {"state.0": "state.7"}, ("state", 7, "m")),
        (("state", 0, "m"), {("state", 0): ("state", "7")}, ("state", "7", "m")),
        (("a.b", "w"), {("a.b",): ("a", "b")}, ("a", "b", "w")),
        (("m", "X.a.X.w"), {"*.X.*": "*.*"}, ("m", "a.w")),
        (("X", "a", "X"), {"*.X": "*"}, ("a",)),
        (("X", "a"), {"*.X": "m.*"}, ("m", "a")),
        (("h", 0, "w"), {"h.*.w": "layers.*.v"}, ("layers", 0, "v")),
        (("m", "h.0.X.w"), {"m": "n", "*.X.*": "*.*"}, ("n", "h.0.w")),
        (("m", "a.b.w"), {"*.b": "*.X.b"}, ("m", "a.X.b.w")),
        (("a\nb.XX.w",), {"*.X.*": "*.*"}, ("a\nb.XX.w",)),
        (("a*", "w"), {("a*",): ("b*",)}, ("b*", "w")),
    ],
)
def test_a_leaf_moves_as_documented(
    path: Path, mapping: dict[Pattern, Pattern], expected: Path
) -> None:
    """Prefixes of keys and inside of keys, the longest first, once; texts agree with paths."""
    renames = Renames(mapping)

    assert renames.path(path) == expected
    assert Renames(mapping).text(path) == path_text(expected)


def test_what_is_no_renaming_is_refused() -> None:
    """Types, and a leaf that would have no name."""
    for wrong in ({"a": ("b",)}, {1: "a"}, [("a", "b")], {"*.a": "b"}):
        with pytest.raises(InvalidInputError):
            Renames(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="nothing would be left"):
        Renames({"w": ""}).path(("w",))
    with pytest.raises(InvalidInputError, match="nothing would be left"):
        Renames({"*.w": "*"}).path(("w",))


def _node(state: Any, leaf: list[int]) -> Node:  # noqa: ANN401 - nested dicts
    """Return the skeleton of nested dicts whose leaves are tensors, lists or numbers."""
    if isinstance(state, dict):
        body: list[Node] = []
        for key, value in state.items():
            body += [encode_key(key), _node(value, leaf)]
        return ["d", *body]
    if isinstance(state, list):
        return ["l", *(_node(item, leaf) for item in state)]
    if state == "T":
        leaf[0] += 1
        return ["T", leaf[0] - 1]
    return state  # type: ignore[no-any-return]


def _paths(node: Node) -> dict[int, Path]:
    return {leaf.index: leaf.path for leaf in iter_leaves(node)}


def test_a_skeleton_is_rebuilt_around_what_moved() -> None:
    """Containers move with what is in them, keep their kind, merge; empty ones stay."""
    node = _node(
        {
            "model": {"back.w": "T", "head.w": "T"}, "parts": ["T", {"x": "T"}], "empty": {},
            "gone": {"w": "T"}, "lr": 0.1,
        },
        [0],
    )  # fmt: skip
    assert isinstance(node, list)
    node[node.index("model") + 1] = ["o", None, *node[node.index("model") + 1][1:]]  # type: ignore[index]

    moved = rename(node, Renames({"model": "net", "parts": "net.parts", "gone": "net"}))

    assert _paths(moved) == {
        0: ("net", "back.w"), 1: ("net", "head.w"), 2: ("net", "parts", 0),
        3: ("net", "parts", 1, "x"), 4: ("net", "w"),
    }  # fmt: skip
    assert isinstance(moved, list)
    assert moved[moved.index("net") + 1][0] == "o"  # type: ignore[index]
    assert moved[moved.index("empty") + 1] == ["d"]
    assert moved[moved.index("lr") + 1] == 0.1
    assert "gone" not in moved
    validate(moved, [4] * 5)


@pytest.mark.parametrize(
    ("mapping", "error", "match"),
    [
        ({"a": "b"}, InvalidInputError, r"'a\.w' and 'b\.w' would get .* at 'b\.w'"),
        ({"a.w": "c"}, InvalidInputError, "'c'"),
        ({"b": "c"}, InvalidInputError, "'b.w' and 'c' would"),
        ({"a.w": "b"}, InvalidInputError, "'a.w' and 'b.w' would"),
        ({"modle": "net"}, TensorNotFoundError, "'modle'"),
        ({"l.0": "first"}, TensorNotFoundError, "'l.0'"),
    ],
)
def test_collisions_and_misspellings_are_named(
    mapping: dict[Pattern, Pattern], error: type[Exception], match: str
) -> None:
    """Nothing is lost in silence; a prefix that leads nowhere is an error."""
    node = _node({"a": {"w": "T"}, "b": {"w": "T"}, "c": 1, "l": ["T"]}, [0])

    with pytest.raises(error, match=match):
        rename(node, Renames(mapping))


KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.just(1 << 70))


@given(st.one_of(KEYS, st.tuples(KEYS, KEYS), st.just("\ud800")))
def test_keys_survive_encoding(key: Any) -> None:  # noqa: ANN401 - any key
    """The node of a key stands for that key."""
    assert decode_key(encode_key(key)) == key


NAMES = st.sampled_from(["a", "b", "a.b", "b.c", "c"])


@given(
    st.recursive(st.just("T"), lambda inner: st.dictionaries(NAMES, inner, min_size=1)),
    st.dictionaries(NAMES, st.sampled_from(["x", "y", "x.y", "a"]), min_size=1, max_size=2),
)
def test_no_leaf_is_lost_or_doubled(
    state: Any,  # noqa: ANN401 - nested dicts
    mapping: dict[Pattern, Pattern],
) -> None:
    """A renaming either keeps every leaf, at the place its path says, or is refused."""
    node = _node(state, [0])
    before = _paths(node)
    try:
        moved = rename(node, Renames(mapping))
    except (InvalidInputError, TensorNotFoundError):
        return
    after = _paths(moved)

    assert after == {index: Renames(mapping).path(path) for index, path in before.items()}
    validate(moved, [4] * len(before))
