"""Casts that the version before proves: cheap where nothing changed, and never believed too far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shortening import examples

import ckptstore
from ckptstore.checkpoint import derived_check, encode, write
from ckptstore.checkpoint.derived_check import KnownCasts
from ckptstore.encodings.coding import cast_elements
from ckptstore.errors import TornStateError
from ckptstore.hashing import blake3_digest
from ckptstore.model import Version
from ckptstore.objects import piece_writer
from ckptstore.objects.index import KnownPieces
from ckptstore.saver.save_job import write_job
from ckptstore.store import Store

State = dict[str, torch.Tensor]
ROWS = 700
"""Of 1000 elements: a master of three pieces in chunks of 1 MiB."""
CHUNK = 1 << 20
LOOKED_AT = 8 * 1024
"""Elements of a tensor that are compared before all of it is."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return an open store on disk."""
    with ckptstore.open(tmp_path / "ckpts", create=True, chunk_bytes=CHUNK) as opened:
        yield opened


def _state(seed: int = 0) -> State:
    random = torch.Generator().manual_seed(seed)
    master = torch.randn(ROWS, 1000, generator=random)
    moment = torch.randn(ROWS, 1000, generator=random)
    return {"low": master.to(torch.bfloat16), "master": master, "moment": moment}


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _same(one: State, two: State) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and np.array_equal(_bits(one[name]), _bits(two[name]))
        for name in one
    )


def _copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def _save(store: Store, state: State, step: int) -> Version:
    return store.run("gpt").save(state, step=step)


def _derived(version: Version) -> int:
    return int(version.receipt.get("derived_count", 0))


@contextmanager
def _casts(
    proof: Callable[..., None] = cast_elements, sample: Callable[..., None] = cast_elements
) -> Iterator[None]:
    """Have other functions cast whole tensors, and the elements that are looked at before."""

    def cast(*args: Any) -> None:  # noqa: ANN401 - as the function
        (sample if len(args[2]) <= LOOKED_AT * 4 else proof)(*args)

    with patch.object(derived_check, "cast_elements", cast):
        yield


def _no_casts() -> AbstractContextManager[None]:
    return _casts(proof=lambda *_: pytest.fail("a cast was made"))


def _checks_out(store: Store, state: State, ref: str = "gpt@latest") -> bool:
    report = store.verify([ref])
    return report.ok and _same(store.load(ref), state)


# --- what did not change ------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["blocking", "thread"])
def test_what_did_not_change_is_not_converted_again(tmp_path: Path, engine: str) -> None:
    """The second save makes no cast, stores nothing, and is the same version but for its name."""
    options: dict[str, Any] = {} if engine == "blocking" else {"engine": engine}
    state = _state()
    with ckptstore.open(tmp_path / "s", create=True, chunk_bytes=CHUNK, **options) as store:
        run = store.run("gpt")

        def save(step: int) -> Version:
            if engine == "blocking":
                return run.save(state, step=step)
            return run.save_async(state, step=step).result()

        first = save(0)
        with _no_casts():
            second = save(1)
        third = save(2)
        assert [_derived(version) for version in (first, second, third)] == [1, 1, 1]
        assert first.content == second.content == third.content
        assert second.receipt["new_bytes"] == 0
        assert _checks_out(store, state)


def test_each_byte_is_read_once(store: Store) -> None:
    """Of an unchanged state, the proof and the writer digest each byte once between them."""
    state = _state()
    _save(store, state, 0)
    seen: list[int] = []
    real = blake3_digest

    def counted(data: memoryview) -> bytes:
        seen.append(len(data))
        return real(data)

    def counted_parts(parts: Iterable[memoryview]) -> bytes:
        return counted(memoryview(b"".join(parts)))

    with (
        _no_casts(),
        patch.object(derived_check, "blake3_digest", counted),
        patch.object(derived_check, "blake3_of", counted_parts),
        patch.object(piece_writer, "blake3_digest", counted),
    ):
        _save(store, state, 1)
    assert sum(seen) == sum(tensor.nbytes for tensor in state.values())


def test_a_new_process_proves_anew(tmp_path: Path) -> None:
    """A version that another process saved proves nothing, whatever it says."""
    state = _state()
    for step in range(2):
        with ckptstore.open(tmp_path / "s", create=True, chunk_bytes=CHUNK) as store:
            if step:
                with _casts(proof=Mock(side_effect=ZeroDivisionError)):  # noqa: SIM117
                    with pytest.raises(ZeroDivisionError):
                        _save(store, state, step)
            version = _save(store, state, step)
            assert _derived(version) == 1


# --- what did change ----------------------------------------------------------------------------
def _flip(name: str, byte: int, mask: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        _bits(state[name])[byte] ^= mask

    return change


def _swap(state: State) -> None:
    low = state["low"].reshape(-1)
    low[[10, 11]] = low[[11, 10]]


def _row(state: State) -> None:
    state["master"][500] *= 3
    state["low"][500] = state["master"][500].to(torch.bfloat16)


LAST = 2 * ROWS * 1000 - 1
CHANGES: dict[str, tuple[Callable[[State], None], bool]] = {
    "first bit of low": (_flip("low", 0, 1), False),
    "last bit of low": (_flip("low", LAST, 128), False),
    "middle of low": (_flip("low", LAST // 2, 4), False),
    "two of low swapped": (_swap, False),
    "least bit of the master": (_flip("master", 0, 1), True),
    "sign in the last piece of the master": (_flip("master", 4 * ROWS * 1000 - 1, 128), False),
    "a row of both": (_row, True),
    "a moment": (_flip("moment", 77, 1), True),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.short(sample=3)
def test_a_change_is_seen(store: Store, name: str) -> None:
    """One bit of either is enough; what still follows is derived, and all loads bit for bit."""
    change, follows = CHANGES[name]
    state = _state()
    _save(store, state, 0)
    before = _copy(state)
    change(state)
    assert not _same(before, state)
    version = _save(store, state, 1)
    assert _derived(version) == follows
    assert _checks_out(store, state)
    assert _checks_out(store, before, "gpt@0")
    with _no_casts() if follows else patch.object(derived_check, "_STEP", 1 << 16):
        assert _derived(_save(store, state, 2)) == follows
    assert _derived(_save(store, before, 3)) == 1  # what an older version proved is proved anew
    assert _checks_out(store, before)


def test_a_nan_with_another_payload_is_a_change(store: Store) -> None:
    """Only the NaN that a load would make may be left out."""
    state = _state()
    state["master"][3, 3] = float("nan")
    state["low"][3, 3] = float("nan")
    assert _derived(_save(store, state, 0)) == 1
    with _no_casts():
        assert _derived(_save(store, state, 1)) == 1
    _bits(state["low"])[2 * 3003] ^= 1
    assert _derived(_save(store, state, 2)) == 0
    assert _checks_out(store, state)
    _bits(state["low"])[2 * 3003] ^= 1
    _bits(state["master"])[4 * 3003] ^= 1  # the payload of the other one: the cast is the same
    assert _derived(_save(store, state, 3)) == 1
    assert _checks_out(store, state)


@pytest.mark.parametrize("which", [torch.float16, torch.float64])
def test_another_dtype_is_another_tensor(store: Store, which: torch.dtype) -> None:
    """Masters, or weights, of another type are compared anew, though values are the same."""
    state = {"low": torch.arange(4096).remainder(200).to(torch.bfloat16)}
    state["master"] = state["low"].float()
    _save(store, state, 0)
    name = "low" if which == torch.float16 else "master"
    changed = {**state, name: state[name].to(which)}
    assert _derived(_save(store, changed, 1)) == 1
    assert _checks_out(store, changed)


def test_another_shape_is_another_tensor(store: Store) -> None:
    """The same bytes in another shape, or in another order, are found and restored as well."""
    state = _state()
    _save(store, state, 0)
    for step, state in enumerate(
        (
            {name: tensor.reshape(1000, ROWS) for name, tensor in _state().items()},
            {name: tensor.t() for name, tensor in _state().items()},
            {**_state(), "low": _state()["low"].reshape(1000, ROWS)},
        ),
        1,
    ):
        assert _derived(_save(store, state, step)) == (step < 3)
        loaded = store.load("gpt@latest")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def _two(seed: int = 0) -> State:
    state = _state(seed)
    return {**state, "half": state["master"].to(torch.float16), "tied": state["low"]}


def test_two_weights_of_one_master(store: Store) -> None:
    """Both follow; where one changed, the other one still does, and the master is written once."""
    state = _two()
    assert _derived(_save(store, state, 0)) == 2
    with _no_casts():
        assert _derived(_save(store, state, 1)) == 2
    _bits(state["half"])[5] ^= 1
    assert _derived(_save(store, state, 2)) == 1
    assert _checks_out(store, state)
    _bits(state["half"])[5] ^= 1
    version = _save(store, state, 3)  # one by the version before, the other one by a cast
    assert _derived(version) == 2
    assert version.receipt["new_bytes"] == 0
    assert _checks_out(store, state)


def test_equal_weights_of_two_masters(store: Store) -> None:
    """Masters that differ below the rounding have the same weights; each keeps its own."""
    state = _state()
    other = state["low"].float()
    other.view(torch.int32)[::2] += 1
    state = {**state, "other": other, "copy": other.to(torch.bfloat16)}
    assert _derived(_save(store, state, 0)) == 2
    with _no_casts():
        assert _derived(_save(store, state, 1)) == 2
    assert _checks_out(store, state)


# --- whom to believe ----------------------------------------------------------------------------
def _truncate(*args: Any) -> None:  # noqa: ANN401 - as the function
    given, out = args[2], args[3]
    np.frombuffer(out, np.uint16)[:] = np.frombuffer(given, np.uint16)[1::2]


def test_a_version_with_another_rounding_proves_nothing(tmp_path: Path) -> None:
    """What another implementation took for the cast is stored as it is, and loads."""
    state = _state()
    bits = state["master"].view(torch.int32) >> 16
    state["low"] = bits.to(torch.int16).view(torch.bfloat16)
    path = tmp_path / "s"
    with (
        _casts(_truncate, _truncate),
        ckptstore.open(path, create=True, chunk_bytes=CHUNK) as store,
    ):
        assert _derived(_save(store, state, 0)) == 1
    with ckptstore.open(path, chunk_bytes=CHUNK) as store:
        assert not store.verify(["gpt@0"]).ok
        with _casts(sample=_truncate):  # the samples agree
            assert _derived(_save(store, state, 1)) == 0
        assert _checks_out(store, state, "gpt@1")


def test_recipes_that_were_not_proved_here_are_no_proof(store: Store) -> None:
    """Only places that are named count, and only recipes of one source."""
    state = _state()
    version = _save(store, state, 0)
    manifest = store.repo.manifests.load(version)
    place = next(n for n, record in enumerate(manifest.tensors) if record.recipe)
    record = manifest.tensors[place]
    assert record.recipe is not None
    asked = (record.recipe.digest, record, "float32")
    assert store.repo.manifests.proved(version) == {place}
    assert len(KnownCasts(manifest, {place}).of(*asked)) == 1
    assert not KnownCasts(manifest).of(*asked)
    assert not KnownCasts(manifest, set(range(3)) - {place}).of(*asked)
    assert not KnownCasts(None, {place}).of(*asked)
    assert not KnownCasts(manifest, {place}).of(record.recipe.digest, record, "float64")
    store.repo.manifests._kept.clear()
    for step in range(1, 6):
        _save(store, _state(seed=step), step)
    assert store.repo.manifests.proved(version) == frozenset()  # forgotten with its manifest


# --- states that change meanwhile ---------------------------------------------------------------
def _before(module: object, name: str, change: Callable[[], object]) -> AbstractContextManager[Any]:
    """Have a state changed, once, right before a function is called."""
    real = getattr(module, name)
    left = [change]

    def late(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
        if left:
            left.pop()()
        return real(*args, **kwargs)

    return patch.object(module, name, late)


@pytest.mark.parametrize("name", ["low", "master"])
@pytest.mark.parametrize("place", [(derived_check, "parts_of"), (write, "write_pieces")])
def test_a_change_after_the_proof_is_not_in_the_version(
    store: Store, name: str, place: tuple[object, str]
) -> None:
    """The version holds what was proved, of both; never weights that are not those of the master.

    Between the two readings a master may change: then the cast is made of what it is now.
    """
    state = _state()
    _save(store, state, 0)
    before = _copy(state)
    with _before(*place, lambda: state[name][600].mul_(3)):
        _save(store, state, 1)
    loaded = store.load("gpt@1")
    assert store.verify(["gpt@1"]).ok
    for one, tensor in loaded.items():
        was = np.array_equal(_bits(tensor), _bits(before[one]))
        now = np.array_equal(_bits(tensor), _bits(state[one]))
        assert was or now
    if place[1] == "write_pieces":
        assert _same(loaded, before)


@pytest.mark.parametrize("torn", [False, True])
def test_pieces_that_are_gone_are_read_and_compared(store: Store, torn: bool) -> None:
    """Where the version before has them no more, what is written is what was proved, or nothing."""
    state = _state()
    _save(store, state, 0)

    def change() -> None:
        if torn:
            state["master"][600, 3] *= 3

    with (
        patch.object(KnownPieces, "find", return_value=None),
        _no_casts(),
        _before(write, "write_pieces", change),
    ):
        if torn:
            with pytest.raises(TornStateError, match="master"):
                _save(store, state, 1)
            assert len(store.run("gpt").versions()) == 1
            return
        version = _save(store, state, 1)
    assert version.receipt["new_bytes"] == state["master"].nbytes + state["moment"].nbytes
    assert _checks_out(store, state)


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_master_that_changes_between_two_proofs_is_refused(tmp_path: Path, known: int) -> None:
    """Weights that follow from the master as it was, and others from what it is, are no version.

    Whether the version before proves both, one or none of them.
    """
    state = _two()
    with ckptstore.open(tmp_path / "s", create=True, chunk_bytes=CHUNK, workers=1) as store:
        if known:
            _bits(state["half"])[5] ^= 2 - known
            _save(store, state, 0)
            _bits(state["half"])[5] ^= 2 - known
        real, found = derived_check.prove, list[object]()

        def late(*args: Any) -> Any:  # noqa: ANN401 - as the function
            found.append(real(*args))
            _bits(state["master"])[4 * 500_000] ^= len(found) == 1
            return found[-1]

        with patch.object(encode, "prove", late), pytest.raises(TornStateError, match="master"):
            _save(store, state, 1)
        assert None not in found  # below the rounding: each proof holds by itself
        assert len(found) == 2


def test_an_arena_that_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged is compared as it is read, though the version before would prove it."""
    state = _state()
    path = tmp_path / "s"
    for byte in (0, 2 * ROWS * 1000 + 64, 4 * ROWS * 1000):  # in the weights, and in the master
        with ckptstore.open(path / str(byte), create=True, engine="thread") as store:
            run = store.run("gpt")
            run.save_async(state, step=0).result()

            def scribble(*args: Any, byte: int = byte, **kwargs: Any) -> Any:  # noqa: ANN401
                np.frombuffer(args[2], np.uint8)[byte] ^= 1
                return write_job(*args, **kwargs)

            with monkeypatch.context() as patched:
                patched.setattr("ckptstore.saver.save_job.write_job", scribble)
                with pytest.raises(TornStateError):
                    run.save_async(state, step=1).result()
            assert len(run.versions()) == 1
            assert _derived(run.save_async(state, step=2).result()) == 1


# --- any order of changes -----------------------------------------------------------------------
_BITS = st.tuples(st.integers(0, 511), st.integers(0, 31))
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("low"), _BITS),
        st.tuples(st.just("master"), _BITS),
        st.tuples(st.just("round"), _BITS),
        st.tuples(st.just("undo"), _BITS),
    ),
    max_size=8,
)


@settings(max_examples=examples(40), deadline=None)
@given(st.binary(min_size=2048, max_size=2048), _STEPS)
def test_any_saves_load_as_they_were(data: bytes, steps: list[tuple[str, tuple[int, int]]]) -> None:
    """Bits of weights and masters flip, come back, are rounded anew: each version is what it was.

    And weights that are the cast, bit for bit, are always stored as recipes.
    """
    master = torch.frombuffer(bytearray(data), dtype=torch.float32)
    state = {"low": _rounded(master), "master": master}
    saved: list[State] = []
    with ckptstore.open("memory://proofs", create=True) as store:
        for step, (what, (place, bit)) in enumerate([("round", (0, 0)), *steps]):
            if what == "low":
                state["low"].view(torch.int16).numpy()[place] ^= np.int16(1 << (bit % 15))
            elif what == "master":
                state["master"].view(torch.int32).numpy()[place] ^= np.int32(1 << (bit % 31))
            elif what == "round":
                state["low"] = _rounded(state["master"])
            else:
                state = _copy(saved[place % len(saved)])
            version = _save(store, state, step)
            follows = np.array_equal(_bits(state["low"]), _bits(_rounded(state["master"])))
            assert _derived(version) == follows
            saved.append(_copy(state))
        for step, state in enumerate(saved):
            assert _same(store.load(f"gpt@{step}"), state)


def _rounded(master: torch.Tensor) -> torch.Tensor:
    """Return what a load makes of a master, NaN included."""
    out = bytearray(2 * master.numel())
    given = memoryview(master.numpy().tobytes())
    cast_elements("float32", "bfloat16", given, memoryview(out))
    return torch.frombuffer(out, dtype=torch.bfloat16)
