"""Policies as text and as JSON: one reading for every text, errors with their place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention_rules import (
    Abandoned,
    All,
    Best,
    EverySteps,
    EveryTime,
    Last,
    Rule,
    Tagged,
    Within,
    duration_text,
    parse_duration,
    parse_rules,
)
from ckptstore.encodings.encoding import Encoding
from ckptstore.errors import InvalidInputError, PolicyError
from ckptstore.format.names import check_metric_name

COUNTS = st.integers(1, 10**18 - 1)
SECONDS = st.integers(1, 10**9)


def _named(text: str) -> bool:
    try:
        check_metric_name(text)
    except InvalidInputError:
        return False
    return True


RULES: st.SearchStrategy[Rule] = st.one_of(
    st.builds(Last, COUNTS),
    st.builds(EverySteps, COUNTS),
    st.builds(EveryTime, SECONDS),
    st.builds(Within, SECONDS),
    st.builds(Abandoned, SECONDS),
    st.builds(Best, COUNTS, st.text(min_size=1, max_size=12).filter(_named)),
    st.builds(Best, COUNTS, st.sampled_from(["missing", 'a"b', "a, b", "\\"]), st.just("keep")),
    st.just(Tagged()),
    st.just(All()),
)


@given(st.lists(RULES, min_size=1, max_size=6))
def test_rules_read_back_as_meant(rules: list[Rule]) -> None:
    """Whatever the metrics are called, the text of rules is those rules."""
    assert parse_rules(", ".join(map(str, rules))) == tuple(rules)


@given(st.dictionaries(st.sampled_from(["full", "weights", "record"]), st.lists(RULES, max_size=4)))
def test_policies_read_back_from_json(levels: dict[str, list[Rule]]) -> None:
    """The JSON form of a policy is that policy; one without rules is refused."""
    unique = {level: tuple(dict.fromkeys(rules)) for level, rules in levels.items()}
    policy = Policy(**unique)  # type: ignore[arg-type]  # names of levels alone
    if any(unique.values()):
        assert Policy.from_json(policy.to_json()) == policy
    else:
        with pytest.raises(PolicyError, match="delete everything"):
            Policy.from_json(policy.to_json())


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the parser fail in another way than by saying where."""
    said = "at character"
    try:
        rules = parse_rules(text)
    except InvalidInputError as error:
        said = str(error)
    else:
        assert parse_rules(", ".join(map(str, rules))) == rules
    assert "at character" in said


@given(SECONDS)
def test_durations_read_back(seconds: int) -> None:
    """Units add up."""
    assert parse_duration(duration_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("last 3", Last(3)),
        ("every 1000 steps", EverySteps(1000)),
        ("every 1 step", EverySteps(1)),
        ("every 6h", EveryTime(21_600)),
        ("every 1d12h", EveryTime(129_600)),
        ("within 2w", Within(1_209_600)),
        ("best 5 val_loss", Best(5, "val_loss")),
        ("best 5 acc@5 missing keep", Best(5, "acc@5", "keep")),
        ("best 5 acc missing drop", Best(5, "acc")),
        ("best 1 missing", Best(1, "missing")),
        ("best 1 missing missing keep", Best(1, "missing", "keep")),
        ('best 2 "eval loss, dev"', Best(2, "eval loss, dev")),
        ("tagged", Tagged()),
        ("abandoned 7d", Abandoned(604_800)),
        ("all", All()),
    ],
)
def test_each_rule(text: str, rule: Rule) -> None:
    """Each form is read as documented."""
    assert parse_rules(text) == (rule,)


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("", 1, "a rule must follow"),
        ("newest 3", 1, "not a rule"),
        ("last", 5, "a number must follow"),
        ("last 0", 6, "from 1 on"),
        ("last -1", 6, "from 1 on"),
        ("last " + "9" * 19, 6, "from 1 on"),
        ("every 1000", 11, "must follow"),
        ("every 1000, all", 11, "steps"),
        ("every 6x", 7, "duration"),
        ("within 0h", 8, "duration"),
        ("best 3", 7, "a metric must follow"),
        ("best 3, all", 7, "a metric must follow"),
        ('best 3 ""', 8, "name of a metric"),
        ('best 3 "a', 8, "quote"),
        ("best 3 a missing", 17, "keep or drop must follow"),
        ("best 3 a missing maybe", 18, "keep or drop"),
        ("last 3 all", 8, "comma"),
        ("last 3,", 8, "a rule must follow"),
        (", all", 1, "not a rule"),
    ],
)
def test_errors_have_place_and_reason(text: str, place: int, said: str) -> None:
    """Whoever mistypes learns where and why."""
    with pytest.raises(InvalidInputError, match=f"at character {place}:") as caught:
        parse_rules(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"ful": ["all"]}, "no 'ful'"),
        ({"full": 3}, "neither a text"),
        ({"full": [3]}, "neither a text"),
        ({"full": ["all, nothing"]}, "not a rule"),
        ({"full": ["all"] * 70 + [f"last {n}" for n in range(1, 70)]}, "more than"),
        ({"full": ", ".join(f"last {n}" for n in range(1, 70))}, "more than"),
        ({"full": "all" + " " * 20_000}, "are allowed"),
    ],
)
def test_json_that_is_no_policy(value: dict[str, object], said: str) -> None:
    """Unknown levels and values are named."""
    with pytest.raises(InvalidInputError, match=said):
        Policy.from_json(value)


def test_levels_take_one_text_or_several() -> None:
    """Commas and lists are the same; a rule that is there twice counts once."""
    policy = Policy.parse(full="last 3, tagged", weights=["best 5 a", "every 1d, best 5 a"])
    assert policy == Policy.from_json(
        {"full": ["last 3", "tagged"], "weights": "best 5 a, every 1d"}
    )
    assert str(policy) == "full: last 3, tagged; weights: best 5 a, every 1d"


def test_rounded_levels_have_rules_and_bounds() -> None:
    """Each level has its own key; bounds are by the name of the encoding."""
    policy = Policy.from_json(
        {
            "full": "last 1",
            "weights-bf16": ["last 5"],
            "weights-int8": "all",
            "lossy": ["int8:block=64,rel_l2=0.02", "bf16:rel_l2=0.004"],
        }
    )
    assert policy.rounding("full") == policy.rounding("weights") == policy.rounding("record") == ()
    assert policy.rounding("weights-bf16") == (Encoding("bf16", rel_l2=0.004),)
    assert policy.rounding("weights-int8") == (
        Encoding("int8", block=64, rel_l2=0.02),
        Encoding("bf16", rel_l2=0.004),
    )
    assert Policy.parse(full="all").rounding("weights-int8") == (Encoding("int8"), Encoding("bf16"))
    assert Policy.from_json(policy.to_json()) == policy
    assert str(policy) == (
        "full: last 1; weights-bf16: last 5; weights-int8: all; "
        "lossy: int8:block=64,rel_l2=0.02, bf16:rel_l2=0.004"
    )


def test_encodings_of_saves_are_kept_with_the_policy() -> None:
    """They are texts in the order that was given; alone they say nothing of what is kept."""
    policy = Policy.from_json({"encodings": {"*.exp_avg_sq": "bf16", "role:optimizer": "int8"}})
    assert list(policy.encodings.items()) == [("*.exp_avg_sq", "bf16"), ("role:optimizer", "int8")]
    assert not policy.has_rules
    assert Policy.from_json(policy.to_json()) == policy
    assert str(policy) == "encodings: *.exp_avg_sq=bf16, role:optimizer=int8"
    with pytest.raises(PolicyError, match="delete everything"):
        policy.check()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"full": "all", "lossy": "int9"}, "'int9' is not an encoding"),
        ({"full": "all", "lossy": "fp16"}, "fp16 is not for ageing"),
        ({"full": "all", "lossy": ["bf16", "bf16:rel_l2=1"]}, "twice"),
        ({"full": "all", "lossy": {"bf16": 1}}, "neither a text"),
        ({"full": "all", "encodings": {"role:nothing": "bf16"}}, "not a role"),
        ({"full": "all", "encodings": ["bf16"]}, "mapping"),
        ({"full": "all", "encodings": {"a": 3}}, "neither an Encoding nor a text"),
        ({"full": "all", "encodings": {f"p{n}": "bf16" for n in range(99)}}, "more than"),
        ({"weights-fp8": "all"}, "no 'weights-fp8'"),
    ],
)
def test_bounds_and_encodings_that_are_none(value: dict[str, object], said: str) -> None:
    """They are refused by name when the policy is made, not when it is carried out."""
    with pytest.raises(InvalidInputError, match=said):
        Policy.from_json(value)
