"""Refs: one reading for every text, precise errors, and what each form names."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import errors
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.log import Build, Log
from ckptstore.catalog.metrics import best
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.format.names import check_metric_name, check_run_name, check_tag

Saving = Callable[..., Build]


def accepted(check: Callable[[str], str], text: str) -> bool:
    """Say whether a name is accepted."""
    try:
        check(text)
    except errors.InvalidInputError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "run", "kind", "value", "number"),
    [
        ("gpt", "gpt", "latest", "", 0), ("gpt@latest", "gpt", "latest", "", 0),
        ("gpt@1200", "gpt", "step", "", 1200), ("gpt@0", "gpt", "step", "", 0),
        ("gpt@best:val_loss", "gpt", "best", "val_loss", 0),
        ("gpt@best:acc@5", "gpt", "best", "acc@5", 0),
        ("gpt@best:eval loss", "gpt", "best", "eval loss", 0),
        ("gpt@release-1", "gpt", "tag", "release-1", 0), ("gpt@v1200", "gpt", "tag", "v1200", 0),
        ("gpt@bestest", "gpt", "tag", "bestest", 0), ("gpt@best:a<9", "gpt", "best", "a<9", 0),
        ("gpt@best<9:a<9:b", "gpt", "best", "a<9:b", 0), ("gpt@~2", "gpt", "back", "", 2),
        ("1200", "1200", "latest", "", 0), ("latest", "latest", "latest", "", 0),
        ("a/b=1@x", "a/b=1", "tag", "x", 0), ("#3FA9c1", "", "id", "3fa9c1", 0),
        ("#" + "a" * 32, "", "id", "a" * 32, 0),
    ],
)  # fmt: skip
def test_the_grammar(text: str, run: str, kind: str, value: str, number: int) -> None:
    """Each form is read as documented."""
    ref = parse_ref(text)
    assert (ref.text, ref.run, ref.kind, ref.value, ref.number) == (text, run, kind, value, number)


@pytest.mark.parametrize(
    ("text", "step_min", "step_max"),
    [
        ("gpt@best:loss", 0, None), ("gpt@best<9000:loss", 0, 8999),
        ("gpt@best<=9000:loss", 0, 9000), ("gpt@best>100:loss", 101, None),
        ("gpt@best>=100<200:loss", 100, 199), ("gpt@best<200>=100<=150:loss", 100, 150),
    ],
)  # fmt: skip
def test_bounds_of_best(text: str, step_min: int, step_max: int | None) -> None:
    """Bounds stand before the colon, so that a metric may hold any sign; several all hold."""
    ref = parse_ref(text)
    assert (ref.kind, ref.value) == ("best", "loss")
    assert (ref.step_min, ref.step_max) == (step_min, step_max)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("latest", "latest"), ("1200", "step"), ("best:acc@5", "best"), ("release", "tag"),
        ("~0", "back"), ("#3fa9", "id"),
    ],
)  # fmt: skip
def test_inside_a_run_the_relative_part_stands_alone(text: str, kind: str) -> None:
    """The same forms, without the run's name."""
    ref = parse_ref(text, run="gpt")
    assert (ref.run, ref.kind) == ("gpt", kind)


@pytest.mark.parametrize(
    ("text", "run", "position", "said"),
    [
        ("", "", 1, "characters"), ("", "gpt", 1, "characters"), ("x" * 1000, "", 1, "characters"),
        ("@latest", "", 1, "run name"), ("a b@latest", "", 1, "run name"),
        ("~2", "", 1, "run name"), ("gpt@", "", 5, "nothing follows"), ("gpt@~", "", 6, "number"),
        ("gpt@~x", "", 6, "number"), ("gpt@~-1", "", 6, "number"), ("gpt@best:", "", 10, "metric"),
        ("gpt@best", "", 9, "metric"), ("gpt@best<:loss", "", 9, "a bound is"),
        ("gpt@best<9000", "", 14, "colon"), ("gpt@best<9000:", "", 15, "metric"),
        ("gpt@best<9<-1:loss", "", 11, "a bound is"), ("gpt@best<0:loss", "", 9, "no step"),
        ("gpt@best>5<5:loss", "", 9, "no step"), ("gpt@a@b", "", 6, "second @"),
        ("gpt@latest", "gpt", 4, "leave out its name"), ("gpt@#3fa9", "", 5, "stands alone"),
        ("gpt@a b", "", 5, "tag"), ("gpt@-1", "", 5, "~1 counts back"), ("gpt@-x", "", 5, "tag"),
        ("gpt@" + "9" * 20, "", 5, "above"), ("gpt@~" + "9" * 19, "", 6, "above"),
        ("#", "", 2, "hex digits"), ("#abc", "", 2, "hex digits"),
        ("#" + "a" * 33, "", 2, "hex digits"), ("#3fa9xy", "", 6, "not a hex digit"),
        ("gpt@٣", "", 5, "digits"),
    ],
)  # fmt: skip
def test_errors_have_position_and_reason(text: str, run: str, position: int, said: str) -> None:
    """Whoever mistypes learns where and why."""
    with pytest.raises(errors.InvalidRefError, match=f"character {position}:") as caught:
        parse_ref(text, run=run)
    assert said in str(caught.value)


@given(st.text(max_size=12), st.text(max_size=12))
def test_every_accepted_name_can_be_referred_to(run: str, name: str) -> None:
    """Whatever run, tag and metric names pass their check, their refs read back as meant."""
    if not accepted(check_run_name, run):
        return
    assert parse_ref(run).run == run
    if accepted(check_tag, name):
        ref = parse_ref(f"{run}@{name}")
        assert (ref.run, ref.kind, ref.value) == (run, "tag", name)
        assert parse_ref(name, run=run).kind == "tag"
    if accepted(check_metric_name, name):
        ref = parse_ref(f"{run}@best:{name}")
        assert (ref.run, ref.kind, ref.value) == (run, "best", name)


@given(st.text(max_size=30), st.sampled_from(["", "gpt"]))
def test_any_text_is_read_or_refused(text: str, run: str) -> None:
    """No text makes the parser fail in another way than by saying where."""
    said = f"character 1: {text!r} was read"
    try:
        ref = parse_ref(text, run=run)
    except errors.InvalidRefError as error:
        said = str(error)
    else:
        assert ref.text == text
    assert "character" in said


# --- resolving ----------------------------------------------------------------------------------
@pytest.fixture
def catalog(memory: MemoryBackend, saving: Saving) -> Catalog:
    """Return a catalog of two runs with steps, metrics and tags."""
    log = Log(memory)
    down = {"val_loss": "min", "acc": "max"}
    log.append(saving(step=100, metrics={"val_loss": 3.0, "acc": 0.5}, directions=down))
    log.append(saving(step=200, metrics={"val_loss": 2.0}, tags=["good", "release"]))
    log.append(saving(step=300, metrics={"val_loss": math.nan, "acc": 0.9}))
    log.append(saving(step=400, metrics={"val_loss": 2.0, "other": 1.0}))
    log.append(saving(step=300, metrics={"val_loss": 2.5}))
    log.append(saving("ft", step=7))
    return log.catalog


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("gpt", 5), ("gpt@latest", 5), ("gpt@~0", 5), ("gpt@~1", 4), ("gpt@~4", 1), ("gpt@100", 1),
        ("gpt@300", 5), ("gpt@good", 2), ("gpt@best:val_loss", 2), ("gpt@best:acc", 3),
        ("gpt@best<200:val_loss", 1), ("gpt@best>200:val_loss", 4),
        ("gpt@best>200<=300:val_loss", 5), ("ft", 6), ("#" + "0" * 31 + "4", 4),
    ],
)  # fmt: skip
def test_what_each_form_names(catalog: Catalog, text: str, number: int) -> None:
    """Head, steps (the newer of two), tags, best (ties: the earliest step) and ids."""
    assert resolve(catalog, parse_ref(text)).id == f"{number:032x}"


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("gtp", errors.RunNotFoundError, "did you mean gpt?"),
        ("gpt@relaese", errors.VersionNotFoundError, "did you mean release?"),
        ("gpt@310", errors.VersionNotFoundError, "the nearest are 300 and 400"),
        ("gpt@9", errors.VersionNotFoundError, "the nearest is 100"),
        ("gpt@500", errors.VersionNotFoundError, "the nearest is 400"),
        ("gpt@~5", errors.VersionNotFoundError, "only 4 versions come before"),
        ("gpt@best:val_los", errors.VersionNotFoundError, "did you mean val_loss?"),
        ("gpt@best:other", errors.InvalidRefError, "metrics={'other': 'min'}"),
        ("gpt@best>300:acc", errors.VersionNotFoundError, "have steps 100 to 300"),
        ("#ffff", errors.VersionNotFoundError, "no id begins so"),
        ("#0000", errors.InvalidRefError, "not unique"),
        ("ft@x", errors.VersionNotFoundError, "there is none yet"),
    ],
)
def test_what_is_not_there_comes_with_a_hint(
    catalog: Catalog, text: str, error: type[errors.CkptStoreError], said: str
) -> None:
    """The error says what there is instead."""
    with pytest.raises(error) as caught:
        resolve(catalog, parse_ref(text))
    assert said in str(caught.value)


def test_an_id_inside_a_run_must_be_of_it(catalog: Catalog) -> None:
    """``run.load("#id")`` does not load another run's version by accident."""
    text = f"#{6:032x}"
    assert resolve(catalog, parse_ref(text, run="ft")).run == "ft"
    with pytest.raises(errors.VersionNotFoundError, match="it is of run 'ft'"):
        resolve(catalog, parse_ref(text, run="gpt"))


def test_a_direction_that_only_the_caller_knows(catalog: Catalog) -> None:
    """A direction given to the run object counts before its first save has stored it."""
    ref = parse_ref("gpt@best:other")
    assert resolve(catalog, ref, directions={"other": "max"}).step == 400
    lower = resolve(catalog, parse_ref("gpt@best:acc"), directions={"acc": "min"})
    assert lower.step == 300, "what the run has declared wins"


def test_only_nan_is_no_best(memory: MemoryBackend, saving: Saving) -> None:
    """NaN never wins, not even alone."""
    log = Log(memory)
    log.append(saving(step=1, metrics={"loss": math.nan}, directions={"loss": "min"}))
    with pytest.raises(errors.VersionNotFoundError, match="NaN"):
        resolve(log.catalog, parse_ref("gpt@best:loss"))


def test_a_run_without_versions(memory: MemoryBackend) -> None:
    """A run that was only created has no latest."""
    log = Log(memory)
    log.append(lambda c: run_ops.ensure_run(c, "empty", {}))
    with pytest.raises(errors.VersionNotFoundError, match="no version yet"):
        resolve(log.catalog, parse_ref("empty"))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(width=16)), max_size=12),
    st.sampled_from(["min", "max"]),
)
def test_best_against_its_definition(values: list[tuple[int, float]], direction: str) -> None:
    """Best is what sorting by value, step and age gives, NaN left out."""
    rows = [(index, step, value) for index, (step, value) in enumerate(values)]
    sign = 1 if direction == "min" else -1
    ranked = sorted(
        (row for row in rows if not math.isnan(row[2])),
        key=lambda row: (sign * row[2], row[1], -row[0]),
    )
    expected = ranked[0][0] if ranked else None
    assert best(rows, "min" if direction == "min" else "max") == expected
