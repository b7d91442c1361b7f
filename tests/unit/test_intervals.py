"""How often to save: the formulas against figures and a simulation, and what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.intervals import advise, daly, lost_share, observe_failures, young
from ckptstore.catalog.log import Build, Log
from ckptstore.catalog.state import Op
from ckptstore.errors import InvalidInputError, RunNotFoundError, VersionNotFoundError
from ckptstore.testing.environment import SimulatedEnvironment

Saving = Callable[..., Build]
TIMES = st.floats(0.01, 1e6)


def test_young_and_daly_by_hand() -> None:
    """Five minutes for a save and a failure a day."""
    assert young(300, 86_400) == pytest.approx(7200.0)
    # 7200 * (1 + sqrt(300 / 172800) / 3 + 300 / 172800 / 9) - 300 = 7200 * 1.0140817 - 300
    assert daly(300, 86_400) == pytest.approx(7001.39, abs=0.01)
    assert daly(100, 50) == 50


@given(TIMES, st.floats(3.0, 1e5))
def test_daly_loses_no_more_than_young_and_neighbours(save_s: float, ratio: float) -> None:
    """Its interval is within a thousandth of the least that any interval loses."""
    mtbf_s = save_s * ratio
    best = lost_share(daly(save_s, mtbf_s), save_s, mtbf_s)
    for factor in (0.5, 0.8, 0.9, 1.1, 1.25, 2.0):
        other = lost_share(daly(save_s, mtbf_s) * factor, save_s, mtbf_s)
        assert best <= other + 0.02 * best
    assert best <= lost_share(young(save_s, mtbf_s), save_s, mtbf_s) + 0.02 * best


def test_the_share_that_is_lost_against_a_simulation() -> None:
    """Training that fails at random takes as much longer as the formula says."""
    generator = np.random.default_rng(7)
    save_s, mtbf_s, interval_s, restart_s = 20.0, 1000.0, 200.0, 30.0
    elapsed, done = 0.0, 0
    segments = 20_000
    while done < segments:
        need = interval_s + save_s
        failure = generator.exponential(mtbf_s)
        while failure < need:
            elapsed += failure
            restart = generator.exponential(mtbf_s)
            while restart < restart_s:  # failures come while it starts again, too
                elapsed += restart
                restart = generator.exponential(mtbf_s)
            elapsed += restart_s
            failure = generator.exponential(mtbf_s)
        elapsed += need
        done += 1
    simulated = elapsed / (segments * interval_s) - 1
    assert lost_share(interval_s, save_s, mtbf_s, restart_s=restart_s) == pytest.approx(
        simulated, rel=0.03
    )


def test_times_must_be_times() -> None:
    """Nothing comes of zero, and too much is infinite and no error."""
    for wrong in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidInputError):
            young(wrong, 10)
        with pytest.raises(InvalidInputError):
            daly(10, wrong)
    assert lost_share(1e6, 1, 1) == math.inf


def test_advice_comes_from_receipts_and_the_pace(memory: MemoryBackend, saving: Saving) -> None:
    """1.5 s a save (the fixture's receipt), 100 steps every 50 s."""
    environment = SimulatedEnvironment()
    log = Log(memory, environment)
    for step in range(0, 1000, 100):
        environment.sleep(50)
        log.append(saving(step=step))
    advice = advise(log.catalog, "gpt", mtbf_s=43_200)
    assert advice.save_s == 1.5
    assert advice.young_s == pytest.approx(360.0)
    assert advice.steps == round(advice.daly_s / 0.5)
    assert advice.interval_s == pytest.approx(48.5)
    assert advice.interval_lost is not None
    assert advice.interval_lost > advice.lost > 0
    assert advise(log.catalog, "gpt", mtbf_s=43_200, save_s=6).young_s == pytest.approx(720.0)
    one = advise(log.catalog, "gpt", mtbf_s=100, restart_s=60)
    assert one.lost > advise(log.catalog, "gpt", mtbf_s=100).lost


def test_advice_wants_something_to_go_by(memory: MemoryBackend, saving: Saving) -> None:
    """A run that is not there; one version has no pace; none has no receipt."""
    log = Log(memory)
    log.append(saving(step=1))
    with pytest.raises(RunNotFoundError):
        advise(log.catalog, "gtp", mtbf_s=10)
    single = advise(log.catalog, "gpt", mtbf_s=1000)
    assert (single.steps, single.interval_s, single.interval_lost) == (None, None, None)
    with pytest.raises(InvalidInputError):
        advise(log.catalog, "gpt", mtbf_s=0)


def test_restarts_are_seen_by_their_writers(memory: MemoryBackend, saving: Saving) -> None:
    """Two changes of the process in 400 s; the saves of other runs do not count."""
    environment = SimulatedEnvironment()
    logs = {who: Log(memory, environment, by=who) for who in ("a", "b")}
    for who, run in (("a", "gpt"), ("a", "gpt"), ("b", "other"), ("b", "gpt"), ("a", "gpt")):
        environment.sleep(100)
        logs[who].append(saving(run, step=1))
    observed = observe_failures(logs["a"].commits(), "gpt")
    assert (observed.restarts_count, observed.span_s, observed.mtbf_s) == (2, 400.0, 200.0)
    assert observe_failures(logs["a"].commits(), "other").mtbf_s is None
    assert observe_failures(logs["a"].commits(), "none").span_s == 0


def test_a_run_without_receipts(memory: MemoryBackend, saving: Saving) -> None:
    """It must be said what a save takes."""
    log = Log(memory)
    log.append(saving(step=1))
    log.append(lambda catalog: _without_receipt(saving("bare", step=1)(catalog)))
    with pytest.raises(VersionNotFoundError, match="what its save took"):
        advise(log.catalog, "bare", mtbf_s=10)
    assert advise(log.catalog, "bare", mtbf_s=1000, save_s=2).save_s == 2


def _without_receipt(ops: Sequence[Op]) -> list[Op]:
    return [*ops[:-1], msgspec.structs.replace(ops[-1], receipt={})]
