"""Codes of 8 bits, measured errors, and rules: what they promise, apart from any store."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptstore import limits
from ckptstore.encodings.codebooks import BOOKS, codes_of, scales_of
from ckptstore.encodings.coding import Coded, Difference, Form, ValueRange, decode_elements
from ckptstore.encodings.encoding import NAMES, Encoding, form_name
from ckptstore.encodings.encoding_rules import EncodingRules, is_second_moment
from ckptstore.errors import InvalidInputError, UnsafeEncodingError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path
from ckptstore.format.tables import CODES
from ckptstore.hashing import blake3_hex

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float32, st.integers(1, 300), elements=FINITE)
BLOCKS = st.sampled_from([8, 9, 64, 256])


def _restored(form: Form, coded: Coded, dtype: str, count: int) -> npt.NDArray[Any]:
    out = np.zeros(count, {"float32": np.uint32, "bfloat16": np.uint16}[dtype])
    assert coded.scales is not None
    decode_elements(
        form.kind, form.code, form.block, dtype, form.dtype, 0,
        coded.codes.view(np.uint8).data, coded.scales.view(np.uint8).data, out.view(np.uint8).data,
    )  # fmt: skip
    return out


def _there_and_back(encoding: Encoding, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    form = Form.of(encoding, signed=bool((values < 0).any()))
    coded = form.encode("float32", values.view(np.uint32))
    return _restored(form, coded, "float32", len(values)).view(np.float32)


# --- books --------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", ["dynamic-signed", "dynamic-unsigned"])
def test_a_dynamic_book_is_the_tree_of_the_paper(code: str) -> None:
    """256 ascending values: 0, 1, and in seven decades twice as many values in each next one."""
    book = BOOKS[code].astype(np.float64)
    assert len(book) == 256
    assert (np.diff(book) > 0).all()
    assert {0.0, 1.0} <= set(book)
    first = 1 if code == "dynamic-signed" else 2
    positive = book[(book > 0) & (book < 1)]
    for decade in range(7):
        inside = positive[(positive > 10.0 ** (decade - 7)) & (positive < 10.0 ** (decade - 6))]
        assert len(inside) == first * 2**decade
        assert np.allclose(np.diff(inside, 2), 0, atol=1e-9 * 10.0**decade)  # evenly
    if code == "dynamic-signed":
        assert np.array_equal(-positive[::-1], book[book < 0])


def test_the_linear_book_is_even() -> None:
    """Codes from -127 to 127 are that share of the scale."""
    book = BOOKS["linear"]
    codes = np.arange(-127, 128).astype(np.int8)
    assert np.allclose(book[codes.view(np.uint8)], codes / 127, atol=1e-8)


def test_books_are_the_same_everywhere() -> None:
    """The values are pinned by their digest: a store is read on other machines."""
    digests = {name: blake3_hex(book.astype("<f4").tobytes())[:16] for name, book in BOOKS.items()}
    assert digests == {
        "linear": "06b815f18bdd9afd",
        "dynamic-signed": "cd2422f6488817b0",
        "dynamic-unsigned": "9804e33882fad733",
    }


def test_the_format_knows_the_same_codes() -> None:
    """What a manifest may say is what there is a book for."""
    assert set(CODES) == set(BOOKS)


# --- blocks -------------------------------------------------------------------------------------
@given(ARRAYS, BLOCKS)
def test_linear_codes_are_the_nearest(values: npt.NDArray[np.float32], block: int) -> None:
    """No element of a block differs by more than half a step of its scale; the largest is exact."""
    back = _there_and_back(Encoding("int8", block=block), values).astype(np.float64)
    scales = np.repeat(scales_of(values, block), block)[: len(values)].astype(np.float64)
    off = np.abs(back - values.astype(np.float64))
    held = scales > 0
    assert (off[held] <= scales[held] / 254 * (1 + 1e-5)).all()
    assert (np.abs(back[~held]) == 0).all()
    largest = held & (np.abs(values) == scales)
    assert np.array_equal(back[largest], values[largest].astype(np.float64))


@given(ARRAYS, BLOCKS, st.booleans())
def test_dynamic_codes_are_the_nearest(
    values: npt.NDArray[np.float32], block: int, magnitudes: bool
) -> None:
    """No value of the book is nearer; and what is positive beside no negative is never 0."""
    values = np.abs(values) if magnitudes else values
    signed = bool((values < 0).any())
    code = "dynamic-signed" if signed else "dynamic-unsigned"
    scales = scales_of(values, block)
    codes = codes_of(code, values, scales, block)
    wide = np.repeat(scales, block)[: len(values)].astype(np.float64)
    held = wide > 0
    shares = values[held].astype(np.float64) / wide[held]
    book = BOOKS[code].astype(np.float64)
    best = np.abs(shares[:, None] - book).min(axis=1)
    off = np.abs(book[codes[held]] - shares)
    tiny = (codes[held] == 1) & (shares < book[1]) & (not signed)
    assert (off[~tiny] <= best[~tiny] + 1e-7).all()
    if not signed:
        assert ((codes[held] == 0) == (values[held] == 0)).all()


@given(ARRAYS, st.sampled_from(["int8", "dynamic8"]), st.integers(0, 299), st.integers(1, 300))
def test_any_range_is_decoded_alone(
    values: npt.NDArray[np.float32], name: str, start: int, count: int
) -> None:
    """Elements that are decoded from the middle of a tensor are those of the whole."""
    form = Form.of(Encoding(name, block=8), signed=bool((values < 0).any()))
    coded = form.encode("float32", values.view(np.uint32))
    whole = _restored(form, coded, "float32", len(values))
    start = min(start, len(values))
    stop = min(start + count, len(values))
    out = np.zeros(stop - start, np.uint32)
    assert coded.scales is not None
    decode_elements(
        form.kind, form.code, 8, "float32", form.dtype, start,
        coded.codes[start:stop].data.cast("B"), coded.scales[start // 8 :].view(np.uint8).data,
        out.view(np.uint8).data,
    )  # fmt: skip
    assert np.array_equal(out, whole[start:stop])


@given(ARRAYS, st.sampled_from(["int8", "dynamic8"]))
def test_encoding_again_changes_nothing(values: npt.NDArray[np.float32], name: str) -> None:
    """What came back once comes back the same: a resumed run does not lose more at each save."""
    encoding = Encoding(name, block=16)
    signed = bool((values < 0).any())
    form = Form.of(encoding, signed=signed)
    once = _restored(form, form.encode("float32", values.view(np.uint32)), "float32", len(values))
    if name == "dynamic8" and signed:
        return  # -1 is not in the book: the largest negative shrinks once
    again = form.encode("float32", once)
    assert np.array_equal(_restored(form, again, "float32", len(values)), once)


def test_zeros_denormals_and_tiny_blocks() -> None:
    """A block of zeros, or of nothing above 2**-100, is zeros; others are not touched."""
    values = np.zeros(32, np.float32)
    values[8:16] = 1e-40  # denormal
    values[16:24] = 2.0**-99
    for name in ("int8", "dynamic8"):
        back = _there_and_back(Encoding(name, block=8), values)
        assert not back[:16].any()
        assert np.array_equal(back[16:24], values[16:24])


@pytest.mark.parametrize("name", ["int8", "dynamic8", "bf16"])
def test_flushed_denormals_change_no_bit(name: str) -> None:
    """A processor that takes denormal numbers for zero encodes and restores the same bits."""
    random = np.random.default_rng(3)
    values = (random.standard_normal(4096) * 10.0 ** random.integers(-44, 1, 4096)).astype("f4")

    def coded(signed: bool) -> tuple[bytes, ...]:
        form = Form.of(Encoding(name), signed=signed)
        given = values if signed else np.abs(values)
        found = form.encode("float32", given.view(np.uint32))
        if found.scales is None:
            return (found.codes.tobytes(),)
        back = _restored(form, found, "float32", len(values))
        return found.codes.tobytes(), found.scales.tobytes(), back.tobytes()

    wanted = coded(True), coded(False)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert (coded(True), coded(False)) == wanted
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("flushed", [True, False])
def test_denormals_that_are_lost_are_an_error_where_they_are_flushed_too(*, flushed: bool) -> None:
    """No tensor of them passes for stored exactly, whatever the processor makes of them."""
    given = np.linspace(1, 999, 1000).astype(np.uint32)
    if not torch.set_flush_denormal(flushed):
        pytest.skip("this processor cannot")
    try:
        found = Difference()
        found.add("float32", given, np.zeros_like(given))
    finally:
        torch.set_flush_denormal(False)
    assert found.rel_l2 == 1.0
    assert found.largest == 999 * 2.0**-149


def test_a_half_precision_tensor_is_scaled_too() -> None:
    """Codes of bfloat16 elements restore bfloat16 elements."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    form = Form.of(Encoding("int8", block=64), signed=True)
    coded = form.encode("bfloat16", values.view(torch.uint16).numpy())
    back = torch.from_numpy(_restored(form, coded, "bfloat16", 1000)).view(torch.bfloat16)
    assert (back.float() - values.float()).norm() / values.float().norm() < 0.02


# --- measuring ----------------------------------------------------------------------------------
def test_differences_are_over_finite_elements() -> None:
    """NaN and infinities that stay are no error; those that appear are a problem."""
    was = np.array([1.0, np.nan, np.inf, 3.0], np.float32)
    now = np.array([1.5, np.nan, np.inf, 3.0], np.float32)
    found = Difference()
    found.add("float32", was.view(np.uint32), now.view(np.uint32))
    assert found.problem == ""
    assert found.max_abs == 0.5
    assert found.rel_l2 == pytest.approx(0.5 / math.sqrt(10), rel=1e-5)
    for lost in ([np.inf, np.nan, np.inf, 3.0], [1.0, np.nan, 448.0, 3.0]):
        bad = Difference()
        bad.add("float32", was.view(np.uint32), np.array(lost, np.float32).view(np.uint32))
        assert bad.problem


@pytest.mark.parametrize("value", [1e-150, 1e-170, 1e-200, 5e-324])
def test_errors_whose_squares_vanish_are_not_small(value: float) -> None:
    """A float64 tensor of which nothing is left is never within a bound of the relative error."""
    found = Difference()
    was = np.full(100, value)
    found.add("float64", was.view(np.uint64), np.zeros(100).view(np.uint64))
    assert found.max_abs > 0
    assert found.rel_l2 >= 1
    found.add("float64", np.ones(1).view(np.uint64), np.ones(1).view(np.uint64))
    assert found.rel_l2 < 1e-100


@given(st.floats(1e-300, 1e300))
def test_recorded_errors_are_rounded_up(value: float) -> None:
    """A recorded error is not below the measured one, and not above it by more than 1e-5 of it."""
    found = Difference(largest=value)
    assert value <= found.max_abs <= value * (1 + 1.1e-5)


def test_a_range_knows_signs_and_nan() -> None:
    """What tells signed from unsigned codes, and what no scale can hold."""
    seen = ValueRange()
    seen.add("float32", np.array([0.0, -0.0, 2.0], np.float32).view(np.uint32))
    assert (seen.negative, seen.positive, seen.finite) == (False, True, True)
    seen.add("bfloat16", torch.tensor([-1.0]).to(torch.bfloat16).view(torch.uint16).numpy())
    assert seen.negative
    seen.add("float32", np.array([np.nan], np.float32).view(np.uint32))
    assert not seen.finite


def test_what_a_form_cannot_hold() -> None:
    """Scales have neither NaN nor more than float32 has; and 448 is the end of e4m3fn."""
    wild = ValueRange(low=-1.0, high=1.0, finite=False)
    wide = ValueRange(low=-1.0, high=500.0)
    assert "NaN" in Form.of(Encoding("int8"), signed=True).problem(wild)
    assert Form.of(Encoding("bf16"), signed=True).problem(wild) == ""
    for name in ("int8", "dynamic8"):
        scaled = Form.of(Encoding(name), signed=True)
        assert "larger" in scaled.problem(ValueRange(low=-1e39, high=1.0))
        assert scaled.problem(ValueRange(low=-3.4e38, high=3.4e38)) == ""
    assert "larger" in Form.of(Encoding("fp8_e4m3fn"), signed=True).problem(wide)
    assert Form.of(Encoding("fp8_e5m2"), signed=True).problem(wide) == ""


# --- encodings as text --------------------------------------------------------------------------
@given(
    st.sampled_from(NAMES),
    st.none() | st.integers(limits.RECIPE_BLOCK_MIN, limits.RECIPE_BLOCK_MAX),
    st.none() | st.sampled_from([0.5, 1e-3, 2.5e-7, 12.0, 1 / 3]),
    st.none() | st.floats(0, 1e300, exclude_min=True),
)
def test_the_text_of_an_encoding_is_read_back(
    name: str, block: int | None, max_abs: float | None, rel_l2: float | None
) -> None:
    """What is printed in a log or kept in a policy means the same."""
    if name == "lossless":
        max_abs = rel_l2 = None
    encoding = Encoding(
        name, block=block if name in ("int8", "dynamic8") else None, max_abs=max_abs, rel_l2=rel_l2
    )
    assert Encoding.parse(str(encoding)) == encoding


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf15", "did you mean 'bf16'"), ("", "not an encoding"), ("int8:", "not an option"),
        ("int8:blocks=3", "not an option"), ("int8:block=3", "from 8 to"),
        ("int8:block=2.5", "not a number"), ("int8:block=64,block=32", "not an option"),
        ("bf16:block=64", "no blocks"), ("bf16:rel_l2=0", "above 0"),
        ("bf16:rel_l2=nan", "above 0"), ("bf16:max_abs=inf", "above 0"),
        ("lossless:rel_l2=0.1", "no error"),
    ],
)  # fmt: skip
def test_what_is_no_encoding_is_refused(text: str, message: str) -> None:
    """The message says what is wrong, and what would be right."""
    with pytest.raises(InvalidInputError, match=message):
        Encoding.parse(text)


@pytest.mark.parametrize("value", [8, None, ["bf16"], Encoding])
def test_what_is_neither_text_nor_encoding_is_refused(value: object) -> None:
    """Nothing is guessed from other types."""
    with pytest.raises(InvalidInputError):
        Encoding.of(value)


@pytest.mark.parametrize("block", [True, 2.0, "64", 0, -8, limits.RECIPE_BLOCK_MAX + 1])
def test_blocks_are_integers_within_bounds(block: Any) -> None:  # noqa: ANN401 - what users give
    """As texts: what is no size of a block is refused at once."""
    with pytest.raises(InvalidInputError, match="block"):
        Encoding("int8", block=block)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lossless"])
def test_a_form_has_the_name_that_asks_for_it(name: str) -> None:
    """What ``show`` prints can be given to ``save``."""
    for signed in (True, False):
        form = Form.of(Encoding(name), signed=signed)
        assert form_name(form.kind, form.code, form.block, form.dtype) == name


# --- rules --------------------------------------------------------------------------------------
WIDE = (100, 100)


def _target(path: Path, role: str, dtype: str, shape: tuple[int, ...]) -> tuple[Path, TensorRecord]:
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return path, TensorRecord(dtype=dtype, shape=shape, order=None, role=role, nbytes=size)


def _wishes(
    rules: Mapping[Any, Any], *targets: tuple[Path, str], dtype: str = "float32"
) -> dict[int, str]:
    found = EncodingRules(rules).wishes(
        [_target(path, role, dtype, WIDE) for path, role in targets]
    )
    return {place: str(encoding) for place, encoding in found.items()}


def test_the_first_rule_that_matches_counts() -> None:
    """Patterns, tuples and roles, in the order of the mapping; ``lossless`` shields."""
    rules = {
        "model.head": "lossless",
        ("model", "embed"): "int8:block=64",
        "role:weights": "bf16",
        "*": Encoding("dynamic8"),
    }
    targets = [
        (("model", "head", "weight"), "weights"), (("model", "embed", "weight"), "weights"),
        (("model", "body"), "weights"), (("other",), "extra"), (("rng",), "rng"),
    ]  # fmt: skip
    assert _wishes(rules, *targets) == {1: "int8:block=64", 2: "bf16", 3: "dynamic8"}


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", "uint8", "float8_e5m2"])
def test_what_is_no_wide_float_stays(dtype: str) -> None:
    """Integers, bools, complex numbers and what is as narrow already are stored as they are."""
    assert _wishes({"*": "int8"}, (("a",), "weights"), dtype=dtype) == {}


def test_what_would_not_get_smaller_stays() -> None:
    """bfloat16 is not rounded to float16, nor to itself; but to 8 bits."""
    target = (("a",), "weights")
    assert _wishes({"*": "fp16"}, target, dtype="bfloat16") == {}
    assert _wishes({"*": "bf16"}, target, dtype="bfloat16") == {}
    assert _wishes({"*": "int8"}, target, dtype="bfloat16") == {0: "int8"}
    assert _wishes({"*": "bf16"}, target, dtype="float64") == {0: "bf16"}


def test_small_tensors_stay() -> None:
    """Norms, biases and steps are left alone: they are sensitive, and have no bytes to save."""
    count = limits.ENCODED_ELEMENTS_MIN
    rules = EncodingRules({"*": "bf16"})
    targets = [
        _target((name,), "weights", "float32", shape)
        for name, shape in (("a", (count - 1,)), ("b", (count,)), ("c", ()), ("d", (0, 9)))
    ]
    assert list(rules.wishes(targets)) == [1]


SECOND = [
    ("optimizer", "state", 0, "exp_avg_sq"), ("optimizer", "state", 0, "max_exp_avg_sq"),
    ("optimizer", "state", 0, "square_avg"), ("optimizer", "state", 0, "exp_avg_sq_row"),
    ("optimizer", "state", "w", "sum"), ("optimizer", "nu"),
    ("optimizer", "state.model.w.exp_avg_sq"),
]  # fmt: skip


@pytest.mark.parametrize("path", SECOND, ids=lambda path: str(path[-1]))
@pytest.mark.parametrize("name", ["int8", "fp16", "fp8_e4m3fn", "fp8_e5m2"])
def test_second_moments_are_never_zeroed(path: Path, name: str) -> None:
    """A form that makes zeros of them is refused by name, with what to use and why."""
    with pytest.raises(UnsafeEncodingError, match="divides") as caught:
        _wishes({"role:optimizer": name}, (path, "optimizer"))
    assert "dynamic8" in caught.value.hint
    assert is_second_moment(path, "optimizer")
    for safe in ("dynamic8", "bf16"):
        assert _wishes({"*": safe}, (path, "optimizer")) == {0: safe}


def test_the_hint_of_a_refusal_works() -> None:
    """The rule that it proposes, put before the others, is accepted."""
    path: Path = ("optimizer", "state", 0, "exp_avg_sq")
    rules = {"*.exp_avg_sq": "dynamic8", "role:optimizer": "int8"}
    targets = (path, "optimizer"), (("optimizer", "state", 0, "exp_avg"), "optimizer")
    assert _wishes(rules, *targets) == {0: "dynamic8", 1: "int8"}


def test_weights_called_v_are_no_second_moments() -> None:
    """Short names count within an optimizer only: attention has a ``v`` too."""
    assert not is_second_moment(("model", "v"), "weights")
    assert not is_second_moment(("optimizer", "state", 0, "exp_avg"), "optimizer")
    assert not is_second_moment(("optimizer", 0), "optimizer")


def test_a_rule_that_takes_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A pattern with a typing error does not go unnoticed; a role may well be absent."""
    with caplog.at_level(logging.WARNING, "ckptstore"):
        _wishes({"modle.*": "bf16", "role:data": "bf16"}, (("model", "w"), "weights"))
    assert [record.getMessage() for record in caplog.records] == [
        "the encoding bf16 of 'modle.*' takes no tensor"
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"role:wieghts": "bf16"}, "a role is one of"), ({"*": "bf17"}, "not an encoding"),
        ({7: "bf16"}, "a pattern must be"), ("bf16", "mapping"), ([("*", "bf16")], "mapping"),
    ],
)  # fmt: skip
def test_rules_that_are_none_are_refused(rules: Any, message: str) -> None:  # noqa: ANN401
    """Before anything is read: a rule is right or an error."""
    with pytest.raises(InvalidInputError, match=message):
        EncodingRules(rules)


def test_rules_as_json() -> None:
    """Rules that are kept with a run are text, in their order; a tuple has no text."""
    rules = EncodingRules({"model.*": "bf16", "role:optimizer": Encoding("int8", block=64)})
    assert list(rules.to_json().items()) == [
        ("model.*", "bf16"),
        ("role:optimizer", "int8:block=64"),
    ]
    assert not EncodingRules({})
    with pytest.raises(InvalidInputError, match="no text"):
        EncodingRules({("model", "w"): "bf16"}).to_json()
