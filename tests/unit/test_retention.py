"""Retention plans: rules as text and JSON, each rule, what holds anyhow; a plan settles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shortening import examples
from simulated_environment import SimulatedEnvironment

from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops, lifecycle_ops, run_ops
from ckptstore.catalog.content_ops import Move
from ckptstore.catalog.levels import LEVELS, Level
from ckptstore.catalog.log import Log
from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention import RunPlan, plan, plan_run
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
from ckptstore.errors import InvalidInputError, PolicyError, RunNotFoundError
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.format.names import check_metric_name
from ckptstore.model import RoleBytes, Version

BOTH = {
    "weights": RoleBytes(logical=100, new=100, stored=60),
    "optimizer": RoleBytes(logical=200, new=200, stored=150),
}
_names = itertools.count()


class Story:
    """A log that things happen to, one version an hour."""

    def __init__(self, directions: Mapping[str, str] | None = None) -> None:
        self.environment = SimulatedEnvironment()
        self.log = Log(MemoryBackend(f"retention/{next(_names)}"), self.environment)
        self._directions = directions or {"loss": "min"}
        self._ids = itertools.count(1)

    def save(
        self,
        step: int,
        loss: float | None = None,
        *,
        tags: Sequence[str] = (),
        roles: Mapping[str, RoleBytes] | None = None,
        run: str = "gpt",
    ) -> str:
        """Save a version; return its id."""
        named = f"{next(self._ids):032x}"
        self.environment.sleep(3600)
        self.log.append(
            lambda catalog: run_ops.save(
                catalog, run=run, version=named, step=step, manifest=_pointer(named),
                content="2" * 64, directions=self._directions,
                metrics={} if loss is None else {"loss": loss}, tags=tags, roles=roles or BOTH,
            )
        )  # fmt: skip
        return named

    def rollback(self, version: str) -> None:
        """Roll the run back."""
        self.log.append_any(lambda now: lifecycle_ops.rollback(now, run="gpt", version=version))

    def age(self, version: str, level: Level) -> None:
        """Relocate a version to less than it has."""
        found = self.log.catalog.version(version)
        named = f"{next(self._ids):032x}"
        move = Move(
            version=version, based_on=found.manifest_digest, level=level,
            manifest=None if level == "record" else _pointer(named), content="3" * 64,
            roles={} if level == "record" else {"weights": BOTH["weights"]},
        )  # fmt: skip
        self.log.append(lambda now: content_ops.relocate(now, [move]))

    def plan(self, *, hours_later: float = 0, **rules: Any) -> RunPlan:  # noqa: ANN401
        """Plan for the run under a policy."""
        times = Recorded(self.environment.now_ms() / 1000 + hours_later * 3600)
        return plan_run(self.log.catalog, "gpt", Policy.parse(**rules), times=times)

    def carry_out(self, found: RunPlan) -> None:
        """Do what a plan says."""
        gone = [d.version.id for d in found.changes if d.fate == "gone"]
        if gone:
            self.log.append(lambda now: lifecycle_ops.delete(now, gone))
        for decision in found.changes:
            if decision.fate != "gone":
                self.age(decision.version.id, decision.fate)


@dataclass
class Recorded:
    """A storage that stores a version when its writer says that it was saved."""

    now_s: float

    def saved_s(self, version: Version) -> float:
        """Return the time that was recorded."""
        return version.created_at.timestamp()

    def age_s(self, version: Version) -> float:
        """Return the age by that."""
        return self.now_s - self.saved_s(version)


def _pointer(named: str) -> ManifestPointer:
    digest = (named * 2)[:64]
    return ManifestPointer(key=manifest_key(named), stored_bytes=7, digest=digest)


def fates(found: RunPlan) -> dict[int, str]:
    """Return the fate of each step."""
    return {d.version.step: d.fate for d in found.decisions}


def kept(found: RunPlan) -> list[int]:
    """Return the steps that stay at all."""
    return [step for step, fate in fates(found).items() if fate != "gone"]


def reasons(found: RunPlan) -> dict[int, str]:
    """Return why each step stays or goes."""
    return {d.version.step: "; ".join(d.reasons) for d in found.decisions}


@pytest.fixture
def story() -> Story:
    """Return ten versions, 100 steps and an hour apart; the loss is least at 600."""
    made = Story()
    for step in range(100, 1100, 100):
        made.save(step, abs(step - 600) / 100)
    return made


@pytest.mark.parametrize(
    ("rules", "steps"),
    [
        ("last 1", [1000]), ("last 3", [800, 900, 1000]), ("last 99", list(range(100, 1100, 100))),
        ("every 300 steps", [100, 300, 600, 900, 1000]), ("every 1000 steps", [100, 1000]),
        ("best 1 loss", [600, 1000]), ("best 3 loss", [500, 600, 700, 1000]),
        ("within 3h", [800, 900, 1000]), ("last 1, best 1 loss", [600, 1000]),
        ("all", list(range(100, 1100, 100))),
    ],
)  # fmt: skip
def test_each_rule_alone(story: Story, rules: str, steps: list[int]) -> None:
    """A rule keeps what it says, and the head besides."""
    assert kept(story.plan(full=rules)) == steps


def test_every_time_keeps_the_first_of_each_stretch(story: Story) -> None:
    """Stretches begin at multiples of the time since 1970."""
    hours = [v.created_at.hour for v in story.log.catalog.versions("gpt")]
    found = story.plan(full="every 3h")
    expected, seen = [], set()
    for decision, hour in zip(found.decisions, hours, strict=True):
        if (decision.version.created_at.date(), hour // 3) not in seen:
            expected.append(decision.version.step)
        seen.add((decision.version.created_at.date(), hour // 3))
    assert kept(found) == sorted({*expected, 1000})


def test_levels_are_asked_from_the_top(story: Story) -> None:
    """A version stays at the highest level that has a rule for it, and says which."""
    found = story.plan(full="last 2", weights=["best 3 loss", "every 500 steps"], record="all")
    assert fates(found) == {
        100: "weights", 200: "record", 300: "record", 400: "record", 500: "weights", 600: "weights",
        700: "weights", 800: "record", 900: "full", 1000: "full",
    }  # fmt: skip
    why = reasons(found)
    assert why[500] == "best 3 loss; every 500 steps"
    assert why[900] == "last 2"
    assert why[1000] == "last 2"
    freed = {d.version.step: d.reclaimable_bytes for d in found.decisions}
    assert (freed[100], freed[200], freed[900]) == (150, 217, 0)


def test_nan_is_never_best_and_missing_is_a_choice() -> None:
    """NaN counts as a value, and the worst; what has no value goes or stays by the rule."""
    story = Story({"loss": "max"})
    for step, loss in enumerate([math.nan, 3.0, None, 5.0, math.inf, None]):
        story.save(step, loss)
    story.save(9)
    assert kept(story.plan(full="best 2 loss")) == [3, 4, 9]
    assert kept(story.plan(full="best 9 loss")) == [1, 3, 4, 9]
    assert kept(story.plan(full="best 2 loss missing keep")) == [2, 3, 4, 5, 9]


def test_a_direction_that_is_not_known_is_refused(story: Story) -> None:
    """Nothing is deleted by a guess."""
    found = story.plan(full="best 3 acc")
    assert "low or high" in found.refused
    assert not found.changes


def test_a_policy_that_keeps_no_content_is_refused(story: Story) -> None:
    """That would be all but everything deleted."""
    for found in (
        story.plan(full="tagged"),
        story.plan(record="all"),
        story.plan(weights="abandoned 9d", record="all"),
    ):
        assert "keep the content of none" in found.refused


def test_pinned_tagged_and_head_stay() -> None:
    """Whatever the rules say; a policy that says `tagged` decides about tags."""
    story = Story()
    pinned = story.save(1)
    story.save(2, tags=["paper"])
    for step in (3, 4, 5):
        story.save(step)
    head = story.save(6)
    story.log.append(lambda now: lifecycle_ops.pin(now, pinned))
    story.save(7)
    story.rollback(head)
    found = story.plan(full="every 5 steps", record="all")
    assert fates(found) == {
        1: "full", 2: "full", 3: "record", 4: "record", 5: "full", 6: "full", 7: "record"
    }  # fmt: skip
    why = reasons(found)
    assert why[1] == "every 5 steps"
    assert reasons(story.plan(full="last 1"))[1] == "pinned"
    assert why[2].startswith("tagged paper")
    assert why[6].startswith("head")
    assert fates(story.plan(full="last 1", weights="tagged"))[2] == "weights"
    assert fates(story.plan(full="last 1"))[1] == "full"


def test_abandoned_versions_count_for_few_rules() -> None:
    """Only `tagged`, `abandoned` and `all` keep what a rollback left."""
    story = Story()
    ids = [story.save(step, 10 - step) for step in range(6)]
    story.log.append(lambda now: run_ops.tag(now, "gpt", ids[4], "look"))
    story.rollback(ids[2])
    story.save(10, 9)
    assert kept(story.plan(full="last 9")) == [0, 1, 2, 4, 10]
    assert kept(story.plan(full="best 1 loss")) == [2, 4, 10]
    assert kept(story.plan(full="every 1 steps")) == [0, 1, 2, 4, 10]
    assert kept(story.plan(full="within 99h")) == [0, 1, 2, 4, 10]
    assert kept(story.plan(full="last 1, abandoned 99h")) == [3, 4, 5, 10]
    assert kept(story.plan(full="last 1, abandoned 3h", hours_later=1)) == [4, 5, 10]
    assert fates(story.plan(full="last 9", record="all"))[3] == "record"
    assert reasons(story.plan(full="last 9"))[3] == "abandoned, and no rule for that"


def test_the_only_verified_version_stays() -> None:
    """The newest of those that were verified, where none of them would stay."""
    story = Story()
    ids = [story.save(step) for step in range(6)]
    digests = {i: story.log.catalog.version(i).manifest_digest for i in (ids[1], ids[2])}
    story.log.append(lambda now: content_ops.verified(now, digests, ()))
    found = story.plan(full="last 2")
    assert kept(found) == [2, 4, 5]
    assert reasons(found)[2] == "the only verified one"
    assert kept(story.plan(full="last 4")) == [2, 3, 4, 5]
    assert fates(story.plan(full="last 1", weights="all"))[2] == "full"


def test_a_damaged_version_stays_and_takes_no_place() -> None:
    """It may be mended; a sound one is kept in its stead."""
    story = Story()
    ids = [story.save(step, 10 - step) for step in range(5)]
    lost = {ids[3]: story.log.catalog.version(ids[3]).manifest_digest}
    story.log.append(lambda now: content_ops.quarantine(now, lost))
    found = story.plan(full="last 2")
    assert kept(found) == [2, 3, 4]
    assert reasons(found)[3].startswith("damaged")


def test_a_version_without_weights_is_not_reduced_to_them() -> None:
    """Nothing would be left of it."""
    story = Story()
    story.save(1, roles={"extra": RoleBytes(logical=5, new=5, stored=5)})
    story.save(2)
    story.save(3)
    found = story.plan(full="last 1", weights="all")
    assert fates(found) == {1: "full", 2: "weights", 3: "full"}
    assert reasons(found)[1].startswith("no tensors of role weights")


def test_what_was_reduced_takes_no_place_above_and_comes_not_back() -> None:
    """A record is not one of the best that are kept; less never becomes more."""
    story = Story()
    ids = [story.save(step, step) for step in range(6)]
    story.age(ids[0], "record")
    story.age(ids[1], "weights")
    found = story.plan(full="best 2 loss", record="all")
    assert fates(found) == {
        0: "record", 1: "weights", 2: "full", 3: "record", 4: "record", 5: "full",
    }  # fmt: skip
    assert fates(story.plan(full="all"))[0] == "record"
    assert not story.plan(full="all").changes


def test_runs_have_their_own_policy_or_the_stores() -> None:
    """A run without either is left alone; one that is not understood is refused."""
    story = Story()
    for run in ("gpt", "own", "odd"):
        for step in range(4):
            story.save(step, run=run)
    assert all(p.policy is None for p in plan(story.log.catalog, times=Recorded(0)))
    for run, policy in (("", {"full": ["last 2"]}), ("own", {"full": ["all"]}), ("odd", {"x": 1})):
        story.log.append(partial(lifecycle_ops.set_policy, run=run, policy=policy))
    gpt, own, odd = plan(story.log.catalog, times=Recorded(0))
    assert (kept(gpt), len(kept(own))) == ([2, 3], 4)
    assert "no 'x'" in odd.refused
    with pytest.raises(RunNotFoundError):
        plan(story.log.catalog, run="none", times=Recorded(0))


RULES = st.sampled_from(
    ["last 1", "last 3", "every 3 steps", "every 2h", "within 4h", "best 2 loss", "tagged",
     "best 1 loss missing keep", "abandoned 3h", "all"]
)  # fmt: skip
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 12), st.sampled_from([None, 1.0, 2.0, math.nan])),
        st.tuples(st.just("rollback"), st.integers(0, 9), st.none()),
        st.tuples(st.just("tag"), st.integers(0, 9), st.none()),
        st.tuples(st.just("pin"), st.integers(0, 9), st.none()),
        st.tuples(st.just("verify"), st.integers(0, 9), st.none()),
        st.tuples(st.just("weights"), st.integers(0, 9), st.none()),
        st.tuples(st.just("record"), st.integers(0, 9), st.none()),
    ),
    max_size=18,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    EVENTS, st.lists(RULES, max_size=3), st.lists(RULES, max_size=3), st.lists(RULES, max_size=2)
)
def test_plans_are_safe_and_settle(
    events: list[tuple[str, int, float | None]],
    full: list[str],
    weights: list[str],
    record: list[str],
) -> None:
    """What must stay stays, less never becomes more, and a second plan changes nothing."""
    story = Story()
    ids = [story.save(0, 3.0)]
    levels: dict[str, Level] = {"weights": "weights", "record": "record"}
    for what, number, loss in events:
        if what == "save":
            ids.append(story.save(number, loss))
            continue
        version = story.log.catalog.version(ids[number % len(ids)])
        if what == "rollback":
            story.rollback(version.id)
        elif what == "tag":
            story.log.append(partial(run_ops.tag, run="gpt", version=version.id, name="keep"))
        elif what == "pin":
            story.log.append_any(partial(lifecycle_ops.pin, version=version.id))
        elif what == "verify":
            sound = {version.id: version.manifest_digest}
            story.log.append_any(partial(content_ops.verified, sound=sound, known=()))
        elif version.pinned:
            continue
        elif LEVELS.index(levels[what]) < LEVELS.index(version.level):
            story.age(version.id, levels[what])
    if not full + weights + record:
        full = ["last 2"]
    found = story.plan(full=full, weights=weights, record=record)
    if found.refused:
        assert "none of" in found.refused
        return
    head = story.log.catalog.head_id("gpt")
    for decision in found.decisions:
        version = decision.version
        assert decision.reasons
        if version.pinned or version.id == head:
            assert not decision.changes
        if version.tags:
            assert decision.fate != "gone"
        if decision.changes:
            order = ("gone", *LEVELS)
            assert order.index(decision.fate) < order.index(version.level)
            assert decision.reclaimable_bytes > 0 or version.level == "record"
    whole = [d for d in found.decisions if d.version.verified and d.version.level != "record"]
    assert not whole or any(not d.changes for d in whole)
    story.carry_out(found)
    again = story.plan(full=full, weights=weights, record=record)
    assert not again.changes
    assert not again.refused
    assert story.log.catalog.head_id("gpt") == head


COUNTS = st.integers(1, 10**18 - 1)
SECONDS = st.integers(1, 10**9)


def _named(text: str) -> bool:
    try:
        check_metric_name(text)
    except InvalidInputError:
        return False
    return True


POLICY_RULES: st.SearchStrategy[Rule] = st.one_of(
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


@given(st.lists(POLICY_RULES, min_size=1, max_size=6))
def test_rules_read_back_as_meant(rules: list[Rule]) -> None:
    """Whatever the metrics are called, the text of rules is those rules."""
    assert parse_rules(", ".join(map(str, rules))) == tuple(rules)


@given(
    st.dictionaries(
        st.sampled_from(["full", "weights", "record"]), st.lists(POLICY_RULES, max_size=4)
    )
)
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
        ("last 3", Last(3)), ("every 1000 steps", EverySteps(1000)),
        ("every 1 step", EverySteps(1)), ("every 6h", EveryTime(21_600)),
        ("every 1d12h", EveryTime(129_600)), ("within 2w", Within(1_209_600)),
        ("best 5 val_loss", Best(5, "val_loss")),
        ("best 5 acc@5 missing keep", Best(5, "acc@5", "keep")),
        ("best 5 acc missing drop", Best(5, "acc")), ("best 1 missing", Best(1, "missing")),
        ("best 1 missing missing keep", Best(1, "missing", "keep")),
        ('best 2 "eval loss, dev"', Best(2, "eval loss, dev")), ("tagged", Tagged()),
        ("abandoned 7d", Abandoned(604_800)), ("all", All()),
    ],
)  # fmt: skip
def test_each_rule(text: str, rule: Rule) -> None:
    """Each form is read as documented."""
    assert parse_rules(text) == (rule,)


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("", 1, "a rule must follow"), ("newest 3", 1, "not a rule"),
        ("last", 5, "a number must follow"), ("last 0", 6, "from 1 on"),
        ("last -1", 6, "from 1 on"), ("last " + "9" * 19, 6, "from 1 on"),
        ("every 1000", 11, "must follow"), ("every 1000, all", 11, "steps"),
        ("every 6x", 7, "duration"), ("within 0h", 8, "duration"),
        ("best 3", 7, "a metric must follow"), ("best 3, all", 7, "a metric must follow"),
        ('best 3 ""', 8, "name of a metric"), ('best 3 "a', 8, "quote"),
        ("best 3 a missing", 17, "keep or drop must follow"),
        ("best 3 a missing maybe", 18, "keep or drop"), ("last 3 all", 8, "comma"),
        ("last 3,", 8, "a rule must follow"), (", all", 1, "not a rule"),
    ],
)  # fmt: skip
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
        ({"full": "all", "encodings": {"role:nothing": "bf16"}}, "a role is one of"),
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
