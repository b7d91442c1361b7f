"""What ``codec="auto"`` decides, and from what."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix_settings import SETTINGS
from ckptstore.backends.throttled import ThrottledBackend
from ckptstore.config import SYSTEM, Options
from ckptstore.objects.auto_codec import Pace, Rates, SpeedSample, verdict
from ckptstore.repo import create_on
from ckptstore.store.store import Store

GB = 1e9
BIG = limits.PACE_BYTES_MIN
_NOISE = st.floats(0.8, 1.25)
LOCAL = SETTINGS["local"].capabilities.write_bytes_per_s


def sample(**changes: object) -> SpeedSample:
    """Return a save of 1 GB by two threads on a storage that is no limit."""
    found = SpeedSample(
        planes=False,
        total_bytes=10**9,
        new_bytes=10**9,
        stored_bytes=10**9,
        wall_s=0.5,
        hashing_s=0.6,
        encoding_s=0.0,
        storage_s=0.4,
    )
    return replace(found, **changes)  # type: ignore[arg-type]  # fields of it


def raw_save(rate: float) -> SpeedSample:
    """Return a raw save that the storage bounds to `rate` bytes a second."""
    return sample(wall_s=1e9 / rate, storage_s=1e9 / rate)


def planes_save(rate: float, *, storage: float, stored: float = 0.82) -> SpeedSample:
    """Return a compressed save of `rate`, for a part of which the storage was busy."""
    return sample(
        planes=True,
        stored_bytes=int(stored * 1e9),
        wall_s=1e9 / rate,
        storage_s=stored * 1e9 / storage,
        encoding_s=1.0,
    )


def run(pace: Pace, *, raw: float, planes: float, storage: float, saves: int) -> list[bool]:
    """Let `pace` decide saves that then take what each way takes; return the decisions."""
    chosen = []
    for _ in range(saves):
        chosen.append(pace.choose(workers=2).planes)
        seen = planes_save(planes, storage=storage) if chosen[-1] else raw_save(raw)
        pace.note(seen)
    return chosen


def test_first_save_goes_by_the_claim() -> None:
    """Before anything was measured, two threads are too slow for a disk and not for S3 or NFS."""
    assert not verdict(Rates(storage=LOCAL), workers=2).planes
    assert verdict(Rates(storage=limits.WRITE_BYTES_PER_S_DEFAULT), workers=2).planes
    assert verdict(Rates(storage=SETTINGS["nfs"].capabilities.write_bytes_per_s), workers=2).planes


def test_many_threads_compress_on_a_disk() -> None:
    """Where encoding outruns the disk, fewer bytes are the faster save."""
    assert verdict(Rates(storage=LOCAL), workers=8).planes


def test_a_local_disk_that_is_slow_is_found_out() -> None:
    """Two raw saves at 0.2 GB/s are the storage's fault: the next one compresses, and all after."""
    pace = Pace(LOCAL)
    assert run(pace, raw=0.2 * GB, planes=0.24 * GB, storage=0.2 * GB, saves=40) == [
        False,
        False,
        *[True] * 38,
    ]


def test_an_object_store_that_is_fast_is_found_out() -> None:
    """Compressed saves that left the storage idle for most of the time were held up by encoding."""
    pace = Pace(limits.WRITE_BYTES_PER_S_DEFAULT)
    chosen = run(pace, raw=2 * GB, planes=1.1 * GB, storage=3 * GB, saves=40)
    assert chosen == [True, True, *[False] * 38]


@pytest.mark.parametrize("rates", [(1.0, 1.0), (1.19, 1.0), (1.3, 1.0), (1.0, 1.2)])
def test_noise_does_not_flap(rates: tuple[float, float]) -> None:
    """Rates that vary by a tenth, whatever their ratio, change the decision at most twice."""
    pace = Pace(LOCAL)
    chosen = []
    for turn in range(30):
        noise = 1 + 0.05 * (-1) ** turn
        chosen += run(
            pace, raw=rates[0] * noise * GB, planes=rates[1] / noise * GB, storage=1.5 * GB, saves=1
        )
    assert sum(one != other for one, other in itertools.pairwise(chosen)) <= 2


@pytest.mark.parametrize("slow", [0, 1, 3, 5])
def test_a_save_that_something_held_up_changes_nothing(slow: int) -> None:
    """One raw save that takes four times as long among equal ones, whichever: all stay raw."""
    pace = Pace(LOCAL)
    chosen: list[bool] = []
    for turn in range(10):
        raw = 1.9 * GB / (4 if turn == slow else 1)
        chosen += run(pace, raw=raw, planes=0.8 * GB, storage=1.9 * GB, saves=1)
    assert chosen == [False] * 10


@given(st.lists(st.tuples(_NOISE, _NOISE), min_size=2, max_size=40))
def test_equal_saves_that_vary_keep_one_codec(noise: list[tuple[float, float]]) -> None:
    """Rates of equal saves that vary by more than a half, in any order: every save is raw."""
    pace = Pace(LOCAL)
    for raw, planes in noise:
        speed = 1.7 * GB * raw
        chosen = run(pace, raw=speed, planes=0.8 * GB * planes, storage=speed, saves=1)
        assert chosen == [False]


@given(st.lists(st.tuples(_NOISE, _NOISE), min_size=2, max_size=40))
def test_a_way_that_was_compared_is_kept(noise: list[tuple[float, float]]) -> None:
    """Both ways known and about equal: whatever was decided stays, and the receipt says so."""
    pace = Pace(LOCAL)
    pace.note(planes_save(0.9 * GB, storage=2 * GB))
    first = run(pace, raw=GB, planes=0.9 * GB, storage=GB, saves=2)[-1]
    for raw, planes in noise[: limits.PACE_SAVES - 3]:
        found = pace.choose(workers=2)
        assert found.planes == first
        assert found.kept == ((found.raw_bytes_per_s < 1.2 * found.planes_bytes_per_s) != first)
        assert found.entries()["auto_kept"] == float(found.kept)
        pace.note(planes_save(0.9 * GB * planes, storage=GB) if first else raw_save(GB * raw))


def test_a_real_change_of_speed_changes_the_codec() -> None:
    """A disk that gets ten times slower is compressed for after two saves; and back, later."""
    pace = Pace(LOCAL)
    fast = run(pace, raw=1.9 * GB, planes=0.8 * GB, storage=1.9 * GB, saves=5)
    slow = run(pace, raw=0.19 * GB, planes=0.23 * GB, storage=0.19 * GB, saves=8)
    again = run(pace, raw=1.9 * GB, planes=0.8 * GB, storage=1.9 * GB, saves=40)
    assert fast == [False] * 5
    assert slow == [False, False, *[True] * 6]
    assert again.index(False) <= limits.PACE_SAVES
    assert not any(again[again.index(False) :])


def test_an_estimate_that_was_wrong_is_tried_seldom() -> None:
    """A storage that looks idle and is not is tried once in PACE_SAVES, not every other save."""
    pace = Pace(limits.WRITE_BYTES_PER_S_DEFAULT)
    chosen = run(pace, raw=0.9 * GB, planes=1.1 * GB, storage=4 * GB, saves=200)
    assert 1 <= chosen.count(False) <= 200 // limits.PACE_SAVES + 1


def test_equal_rates_take_fewer_bytes() -> None:
    """What is no faster by more than it is larger is not worth its room."""
    known = Rates(storage=GB, raw=(1.1 * GB,), planes=(GB,))
    assert verdict(known, workers=2).planes
    assert not verdict(replace(known, raw=(1.5 * GB,)), workers=2).planes


def test_what_does_not_compress_stays_raw() -> None:
    """After saves of noise, which planes do not shrink, encoding cannot pay on a fast disk."""
    known = Rates(storage=LOCAL).after(planes_save(1.2 * GB, storage=8 * GB, stored=1.0))
    assert not verdict(known.after(raw_save(2 * GB)), workers=2).planes


@pytest.mark.parametrize(
    "changes", [{"new_bytes": BIG - 1}, {"total_bytes": 2 * 10**9 + 1}, {"wall_s": 0.0}]
)
def test_short_saves_teach_nothing(changes: dict[str, object]) -> None:
    """A small save, one that shared most of its pieces, and a clock that stands, are no sample."""
    known = Rates(storage=LOCAL, raw=(GB,))
    assert known.after(sample(**changes)) == known


def test_seconds_of_nothing_are_not_divided_by() -> None:
    """A save whose parts took no time on the clock still gives finite rates."""
    seen = sample(planes=True, hashing_s=0.0, encoding_s=0.0, storage_s=0.0)
    known = Rates(storage=LOCAL).after(seen)
    assert (known.planes, known.hashing, known.encoding) == ((2 * GB,), 0.0, 0.0)
    assert verdict(known, workers=2).raw_bytes_per_s > 0


def store_of(bytes_per_s: float, claim: float) -> Store:
    """Return a new store on memory that takes so many bytes a second of a simulated clock."""
    environment = SimulatedEnvironment()
    inner = MemoryBackend(SYSTEM.random_hex(8))
    capabilities = replace(inner.capabilities, write_bytes_per_s=claim)

    class Slow(ThrottledBackend):
        @property
        def capabilities(self) -> object:  # type: ignore[override]
            return capabilities

    backend = Slow(inner, bytes_per_s=bytes_per_s, environment=environment)
    options = Options(workers=1, host_bytes=64 * limits.MIB, engine="thread")
    return Store(create_on(backend, environment=environment, options=options))


@pytest.mark.slow
def test_end_to_end_on_a_storage_that_is_slower_than_it_claims() -> None:
    """The first save believes the claim, the second tells a slow storage from one slow save."""
    with store_of(bytes_per_s=50e6, claim=5e9) as store:
        run = store.run("a")
        receipts = []
        for step in range(4):
            torch.manual_seed(step)
            state = {"w": torch.randn(BIG // 4)}
            version = run.save(state, step=step)
            receipts.append(version.receipt)
            assert torch.equal(store.load("a@latest")["w"], state["w"])
    assert [receipt["auto_planes"] for receipt in receipts] == [0.0, 0.0, 1.0, 1.0]
    assert [receipt["auto_kept"] for receipt in receipts] == [0.0, 1.0, 0.0, 0.0]
    assert [receipt["auto_measured"] for receipt in receipts] == [0.0, 0.0, 0.0, 1.0]
    assert [receipt["stored_bytes"] < 0.9 * BIG for receipt in receipts] == [False] * 2 + [True] * 2
    assert receipts[0]["auto_raw_bytes_per_s"] == pytest.approx(limits.PACE_HASH_BYTES_PER_S)
    assert receipts[1]["auto_raw_bytes_per_s"] == pytest.approx(50e6, rel=0.05)
    assert receipts[1]["auto_planes_bytes_per_s"] == pytest.approx(50e6 / 0.82, rel=0.05)
    assert receipts[3]["auto_planes_bytes_per_s"] > receipts[3]["auto_raw_bytes_per_s"]


def test_choices_of_the_user_are_kept() -> None:
    """``planes`` and ``raw`` are what they say on any storage, and teach what they took."""
    state = {"w": torch.randn(BIG // 4)}
    with store_of(bytes_per_s=50e6, claim=5e9) as store:
        packed = store.run("a").save(state, step=0, codec="planes")
        plain = store.run("b").save(state, step=0, codec="raw")
        assert packed.receipt["stored_bytes"] < 0.9 * plain.receipt["stored_bytes"]
        assert "auto_planes" not in packed.receipt
        rates = store.repo.pace.rates
        assert rates.planes[0] > rates.raw[0] > 0
        assert store.run("c").save(state, step=0).receipt["auto_planes"] == 1.0


def test_the_codec_does_not_decide_what_is_shared() -> None:
    """Pieces are named before the codec: an unchanged state costs nothing."""
    state = {"w": torch.randn(1 << 20)}
    with store_of(bytes_per_s=50e6, claim=5e9) as store:
        store.run("a").save(state, step=0, codec="planes")
        assert store.run("a").save(state, step=1, codec="raw").receipt["new_bytes"] == 0
        assert store.run("a").save(state, step=2).receipt["new_bytes"] == 0


def test_the_receipt_says_what_was_chosen(tmp_path: object) -> None:
    """``Receipt.auto`` of a pending save; empty where the user chose."""
    with ckptstore.open(f"{tmp_path}/store", create=True, engine="thread") as store:
        state = {"w": torch.randn(1000)}
        pending = store.run("a").save_async(state, step=0)
        pending.result()
        assert pending.receipt.auto in {"raw", "planes"}
        chosen = store.run("a").save_async(state, step=1, codec="raw")
        chosen.result()
        assert chosen.receipt.auto == ""
