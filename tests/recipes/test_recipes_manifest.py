"""Manifests with recipes: what is written comes back, and what cannot be followed is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from shortening import examples

from ckptstore import limits
from ckptstore.checkpoint.content import read_content
from ckptstore.errors import CorruptObjectError, LimitError, UnsupportedFeatureError
from ckptstore.format import framing, manifest, skeleton
from ckptstore.format.dtypes import bytes_of
from ckptstore.format.manifest import FLAG_RECIPES, Manifest, PieceTable, TensorRecord
from ckptstore.format.tables import CASTS, CODES, SCALED, Recipe, recipe_problem

ID = "ab" * 16


def record(
    dtype: str, *shape: int, recipe: Recipe | None = None, order: tuple[int, ...] | None = None
) -> TensorRecord:
    """Return the record of a tensor."""
    size = bytes_of(dtype, shape)
    return TensorRecord(
        dtype=dtype, shape=shape, order=order, role="weights", nbytes=size, recipe=recipe
    )


def manifest_of(*records: TensorRecord, leaves: int = 1) -> Manifest:
    """Return a manifest of some tensors, the first `leaves` of them visible; a piece for each."""
    raw = [0 if one.recipe else one.nbytes for one in records]
    first = np.cumsum([0, *(size > 0 for size in raw)]).tolist()
    pieces = np.array([size for size in raw if size], np.uint32)
    count = len(pieces)
    table = PieceTable(
        ids=np.arange(32 * count, dtype=np.uint64).astype(np.uint8).reshape(count, 32),
        raw=pieces,
        pack=np.zeros(count, np.uint32),
        offset=np.full(count, 32, np.uint64),
        stored=pieces.copy(),
        inner=np.zeros(count, np.uint32),
        slab=pieces.copy(),
        packs=["cd" * 16] if count else [],
    )
    node: skeleton.Node = ["d"]
    for place in range(leaves):
        node += [f"t{place}", ["T", place]]  # type: ignore[operator]  # it is a list
    return Manifest(
        version=ID, chunk_bytes=limits.CHUNK_BYTES_MIN, skeleton=skeleton.encode(node),
        tensors=records, first=tuple(first), pieces=table,
    )  # fmt: skip


def cast(source: int = 1, **fields: Any) -> Recipe:  # noqa: ANN401
    """Return a lossy cast."""
    found = Recipe(
        kind="cast", sources=(source,), exact=False, digest=b"d" * 32, given=b"g" * 32, max_abs=0.5,
        rel_l2=0.25, max_abs_bound=1.0,
    )  # fmt: skip
    return replace(found, **fields)


def scaled(**fields: Any) -> Recipe:  # noqa: ANN401
    """Return codes with scales."""
    found = replace(cast(), kind="scaled", sources=(1, 2), code="linear", block=16)
    return replace(found, **fields)


def body_of(made: Manifest) -> dict[str, Any]:
    """Return the map inside of a manifest's object."""
    body: dict[str, Any] = msgspec.msgpack.decode(
        zstandard.ZstdDecompressor().decompress(manifest.encode(made)[64:])
    )
    return body


def opened(body: dict[str, Any], *, flags: int = FLAG_RECIPES) -> Manifest:
    """Decode a manifest of this map."""
    data = framing.encode_frame(manifest.MAGIC, msgspec.msgpack.encode(body), flags=flags)
    return manifest.decode(data, where="m", version=ID)


CAST = manifest_of(record("float32", 5, 3, recipe=cast()), record("bfloat16", 5, 3))
CODED = manifest_of(
    record("float32", 5, 7, recipe=scaled()), record("int8", 5, 7), record("float32", 3)
)

errors = st.floats(0, allow_infinity=False, allow_nan=False)
bounds = st.none() | errors
digests = st.binary(min_size=32, max_size=32)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Return a manifest of some visible tensors, in every form that there is."""
    visible: list[TensorRecord] = []
    hidden: list[TensorRecord] = []
    count = draw(st.integers(1, 5))
    for _ in range(count):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
        form = draw(st.sampled_from(["plain", "cast", "scaled"]))
        dtype = draw(st.sampled_from(sorted(SCALED if form == "scaled" else CASTS)))
        exact = draw(st.booleans())
        digest = draw(digests)
        measured: dict[str, Any] = {
            "max_abs": draw(errors),
            "rel_l2": draw(errors),
            "max_abs_bound": draw(bounds),
            "rel_l2_bound": draw(bounds),
        }
        recipe = Recipe(
            kind=form, sources=(count + len(hidden),), exact=exact, digest=digest,
            given=digest if exact else draw(digests), **({} if exact else measured),
        )  # fmt: skip
        if form == "plain":
            visible.append(record(dtype, *shape, order=order))
        elif form == "cast":
            visible.append(record(dtype, *shape, order=order, recipe=recipe))
            source = draw(st.sampled_from(sorted(CASTS - {dtype})))
            hidden.append(record(source, *shape, order=order))
        else:
            code = draw(st.sampled_from(sorted(CODES)))
            block = draw(st.sampled_from([limits.RECIPE_BLOCK_MIN, 33, limits.RECIPE_BLOCK_MAX]))
            places = (recipe.sources[0], recipe.sources[0] + 1)
            recipe = replace(recipe, code=code, block=block, sources=places)
            visible.append(record(dtype, *shape, order=order, recipe=recipe))
            hidden.append(record(CODES[code], *shape, order=order))
            hidden.append(record("float32", -(-math.prod(shape) // block)))
    return manifest_of(*visible, *hidden, leaves=count)


@settings(deadline=None)
@given(manifests())
def test_recipes_come_back(made: Manifest) -> None:
    """Every field of every recipe is read as it was written; what is hidden is told apart."""
    data = manifest.encode(made)
    found = manifest.decode(data, where="m", version=ID)
    content = read_content(found)
    visible = {leaf.index for leaf in content.leaves}

    assert found.tensors == made.tensors
    assert found.first == made.first
    assert content.hidden == frozenset(range(len(made.tensors))) - visible == made.sources
    assert framing.frame_flags(data) == (FLAG_RECIPES if made.sources else 0)
    assert all(label.startswith("t") for label in content.labels)


def test_a_recipe_costs_little() -> None:
    """An exact recipe takes some 45 bytes of a manifest before it is compressed."""
    recipe = Recipe(kind="cast", sources=(70_000,), exact=True, digest=b"d" * 32, given=b"d" * 32)

    assert len(msgspec.msgpack.encode(recipe.encode(70_001))) <= 50


def test_readers_that_know_no_recipes_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag tells them, so that none takes the tensor for an empty one."""
    data = manifest.encode(CAST)
    monkeypatch.setattr(manifest, "_FLAGS", manifest.FLAG_BLOCKS)
    with pytest.raises(UnsupportedFeatureError):
        manifest.decode(data, where="m", version=ID)


def test_the_flag_and_the_recipes_go_together() -> None:
    """Recipes without the flag, or the flag without recipes, are damage."""
    body = body_of(CAST)
    for changed, flags in ((body, 0), ({**body, "recipes": []}, FLAG_RECIPES)):
        with pytest.raises(CorruptObjectError, match="the flag of recipes"):
            opened(changed, flags=flags)


def test_a_tensor_that_nothing_names_is_refused() -> None:
    """What no leaf and no recipe names would be kept for ever, and seen by nobody."""
    made = manifest_of(record("float32", 3), record("float32", 3))
    with pytest.raises(CorruptObjectError, match="nothing names tensor 1"):
        read_content(manifest.decode(manifest.encode(made), where="m", version=ID))


def _fields(place: int, value: Any) -> Callable[[dict[str, Any]], None]:  # noqa: ANN401
    def change(body: dict[str, Any]) -> None:
        body["recipes"][0][place] = value

    return change


def _tensor(index: int, place: int, value: Any) -> Callable[[dict[str, Any]], None]:  # noqa: ANN401
    def change(body: dict[str, Any]) -> None:
        body["tensors"][index][place] = value

    return change


NAN = math.nan
LIES: dict[str, tuple[Manifest, Callable[[dict[str, Any]], None]]] = {
    "place-negative": (CAST, _fields(0, -1)),
    "place-too-high": (CAST, _fields(0, 2)),
    "place-huge": (CAST, _fields(0, 2**63)),
    "place-of-its-source": (CAST, _fields(0, 1)),
    "place-twice": (CAST, lambda body: body["recipes"].append(body["recipes"][0])),
    "kind-unknown": (CAST, _fields(1, 2)),
    "kind-negative": (CAST, _fields(1, -1)),
    "kind-of-another": (CAST, _fields(1, 1)),
    "kind-cast-of-codes": (CODED, _fields(1, 0)),
    "sources-none": (CAST, _fields(2, [])),
    "sources-itself": (CAST, _fields(2, [0])),
    "sources-too-many": (CAST, _fields(2, [1, 1])),
    "sources-three": (CODED, _fields(2, [1, 2, 2])),
    "sources-outside": (CAST, _fields(2, [2])),
    "sources-negative": (CAST, _fields(2, [-1])),
    "sources-huge": (CAST, _fields(2, [2**64 - 1])),
    "sources-swapped": (CODED, _fields(2, [2, 1])),
    "sources-one-twice": (CODED, _fields(2, [1, 1])),
    "code-unknown": (CODED, _fields(3, 3)),
    "code-negative": (CODED, _fields(3, -1)),
    "code-of-unsigned": (CODED, _fields(3, 1)),
    "code-of-a-cast": (CAST, _fields(3, 1)),
    "block-zero": (CODED, _fields(4, 0)),
    "block-small": (CODED, _fields(4, limits.RECIPE_BLOCK_MIN - 1)),
    "block-huge": (CODED, _fields(4, limits.RECIPE_BLOCK_MAX + 1)),
    "block-of-other-scales": (CODED, _fields(4, 8)),
    "block-of-a-cast": (CAST, _fields(4, 256)),
    "digest-short": (CAST, _fields(5, b"d" * 31)),
    "digest-none": (CAST, _fields(5, b"")),
    "digest-long": (CAST, _fields(5, b"d" * 65)),
    "digest-of-an-exact-one": (CAST, _fields(5, b"d" * 32)),
    "errors-nan": (CAST, _fields(6, [NAN, 0.0, None, None])),
    "errors-infinite": (CAST, _fields(6, [0.0, math.inf, None, None])),
    "errors-negative": (CAST, _fields(6, [-1.0, 0.0, None, None])),
    "errors-none": (CAST, _fields(6, [None, 0.0, None, None])),
    "errors-short": (CAST, _fields(6, [0.0])),
    "errors-empty": (CAST, _fields(6, [])),
    "errors-many": (CAST, _fields(6, [0.0] * 5)),
    "bound-nan": (CAST, _fields(6, [0.0, 0.0, NAN, None])),
    "bound-negative": (CAST, _fields(6, [0.0, 0.0, None, -0.5])),
    "shape-of-another": (CAST, _tensor(0, 2, [3, 5])),
    "order-of-another": (CAST, _tensor(0, 3, [1, 0])),
    "bytes-of-another": (CAST, _tensor(0, 4, 64)),
    "bytes-none": (CAST, _tensor(0, 4, 0)),
    "pieces-of-its-own": (CAST, _tensor(0, 5, 1)),
    "source-dtype-equal": (CAST, lambda body: body.update(dtypes=["float32", "float32"])),
    "source-dtype-integer": (CAST, lambda body: body.update(dtypes=["int16", "float32"])),
    "dtype-integer": (CAST, lambda body: body.update(dtypes=["bfloat16", "int32"])),
    "dtype-unknown": (CAST, lambda body: body.update(dtypes=["bfloat16", "float31"])),
    "dtype-of-scales": (CODED, lambda body: body.update(dtypes=["int32", "int8"])),
    "dtype-of-codes": (CODED, lambda body: body.update(dtypes=["float32", "uint8"])),
}


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_recipe_that_cannot_be_followed_is_refused(name: str) -> None:
    """Places, kinds, types, shapes, sizes, errors: whatever does not fit is damage."""
    made, lie = LIES[name]
    body = body_of(made)
    opened(body)
    lie(body)
    with pytest.raises(CorruptObjectError, match="manifest m: "):
        opened(body)


def test_no_chain_is_followed() -> None:
    """What a recipe names has none itself, so that no record can send a reader round."""
    for second in (cast(0), cast(2)):
        tensors = (record("float32", 3, recipe=cast(1)), record("bfloat16", 3, recipe=second))
        with pytest.raises(LimitError, match="has a recipe itself"):
            manifest.encode(manifest_of(*tensors, record("float16", 3), leaves=3))


def test_what_would_not_load_is_never_written() -> None:
    """A recipe that a reader would refuse is refused before it is stored."""
    for recipe in (cast(max_abs=math.inf), cast(exact=True), cast(block=16), scaled(block=7)):
        tensors = (record("float32", 5, 7, recipe=recipe), record("int8", 5, 7))
        with pytest.raises(LimitError, match="follows from"):
            manifest.encode(manifest_of(*tensors, record("float32", 5)))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 20)
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.sampled_from([b"d" * 32, b"d" * 64])
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=5,
)


@settings(max_examples=examples(300), deadline=None)
@given(made=st.sampled_from([CAST, CODED]), place=st.integers(0, 6), value=values)
def test_any_field_of_a_recipe_may_hold_anything(
    made: Manifest,
    place: int,
    value: Any,  # noqa: ANN401
) -> None:
    """A manifest is refused, or every recipe in it can be followed."""
    body = body_of(made)
    body["recipes"][0][place] = value
    try:
        found = opened(body)
    except CorruptObjectError:
        return
    assert [recipe_problem(n, found.tensors) for n in range(len(found.tensors))] == [""] * len(
        found.tensors
    )
    assert found.first == made.first
