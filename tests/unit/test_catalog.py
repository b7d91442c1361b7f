"""The fold: what each operation does, and what no sequence of operations may do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from simulated_environment import SimulatedEnvironment

from ckptstore import errors, limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import OPS, Commit, CommitBody, encode_commit, extended
from ckptstore.catalog.content_ops import Condemn, Move, Quarantine, Relocate, Swept
from ckptstore.catalog.levels import Level, Part
from ckptstore.catalog.lifecycle_ops import Delete, Pin
from ckptstore.catalog.log import Build, Log
from ckptstore.catalog.metrics import check_directions, check_metrics
from ckptstore.catalog.run_ops import Annotate, CreateRun, Declare, Save, Tag, Untag
from ckptstore.catalog.state import Op
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import commit_key, manifest_key, pack_key
from ckptstore.model import RoleBytes

Saving = Callable[..., Build]

A, B = "a" * 32, "b" * 32


def save_op(version: str = A, run: str = "r", parent: str = "", **fields: Any) -> Save:  # noqa: ANN401
    """Return a save with the least that it needs."""
    pointer = ManifestPointer(key=manifest_key(version), stored_bytes=1, digest="1" * 64)
    return Save(
        version=version, run=run, step=fields.pop("step", 0), parent=parent, manifest=pointer,
        content="2" * 64, **fields,
    )  # fmt: skip


_NEW = manifest_key(B)
_PACK = pack_key(B)


def move_op(based_on: str = "1" * 64, level: Part = "weights") -> Relocate:
    """Return the move of version A to another manifest."""
    pointer = ManifestPointer(key=_NEW, stored_bytes=1, digest="3" * 64)
    return Relocate(version=A, based_on=based_on, level=level, manifest=pointer, content="2" * 64)


def commit_after(catalog: Catalog, *ops: Op) -> Commit:
    """Return a commit that follows `catalog` by number and digest."""
    body = CommitBody(
        magic="ckptstore-commit", format=1, number=catalog.number + 1, previous=catalog.digest,
        write_id="c" * 32, at_ms=1_700_000_000_000, by="", ops=ops,
    )  # fmt: skip
    return encode_commit(body)[1]


def folded(*ops: Op) -> Catalog:
    """Return the catalog after one commit for each operation; all must be allowed."""
    catalog = Catalog()
    for op in ops:
        catalog, error = extended(catalog, [commit_after(catalog, op)])
        assert error is None, error
    return catalog


def concrete(kind: type[Op]) -> Iterator[type[Op]]:
    """Yield the operations of a kind: its subclasses that have none themselves."""
    for each in kind.__subclasses__():
        yield from concrete(each) if each.__subclasses__() else (each,)


def test_every_operation_of_the_format_is_folded() -> None:
    """Every operation that is defined is decoded, and says by itself what it does."""
    assert set(OPS) == set(concrete(Op))
    assert len({op.__struct_config__.tag for op in OPS}) == len(OPS)
    assert all("apply" in vars(op) for op in OPS)


def test_a_save_shows_all_it_was_given(
    memory: MemoryBackend, environment: SimulatedEnvironment
) -> None:
    """Every field of a version is what the writer said."""
    log = Log(memory, environment)
    log.append(
        lambda catalog: run_ops.save(
            catalog, run="gpt", version=A, step=1200,
            manifest=ManifestPointer(key=manifest_key(A), stored_bytes=77, digest="d" * 64),
            content="e" * 64, metrics={"loss": 2, "nan": math.nan}, tags=["b", "a", "b"],
            metadata={"lr": 1e-4, "nested": {"x": [1, None, True]}},
            roles={"weights": RoleBytes(logical=10, new=5, stored=4)}, receipt={"durable_s": 1.5},
        )
    )  # fmt: skip
    version = Log(memory).refresh().version(A)
    assert (version.run, version.step, version.parent, version.commit) == ("gpt", 1200, "", 1)
    assert version.metrics["loss"] == 2.0
    assert math.isnan(version.metrics["nan"])
    assert version.tags == ("a", "b")
    assert version.created_at == datetime.fromtimestamp(environment.now_ms() / 1000, UTC)
    assert version.metadata == {"lr": 1e-4, "nested": {"x": [1, None, True]}}
    assert version.roles == {"weights": RoleBytes(logical=10, new=5, stored=4)}
    assert (version.content, version.manifest_digest) == ("e" * 64, "d" * 64)
    assert (version.manifest_key, version.manifest_bytes) == (manifest_key(A), 77)
    assert version.receipt == {"durable_s": 1.5}


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        ([CreateRun(run="r")], "exists"),
        ([Declare(run="x", metrics={"a": "min"})], "no run 'x'"),
        ([Declare(run="r", metrics={"loss": "max"})], "changes its direction"),
        ([Declare(run="r", metrics={f"m{i}": "min" for i in range(1000)})], "more than"),
        ([save_op(A, parent=A)], "exists"),
        ([save_op(B, run="x")], "no run 'x'"),
        ([save_op(B, parent="f" * 32)], "no version ffff"),
        ([Annotate(version=B, metrics={"a": 1.0})], "no version bbbb"),
        ([Annotate(version=A, metrics={f"m{i}": 1.0 for i in range(1000)})], "more than"),
        ([Tag(run="r", tag="t", version=B)], "no version bbbb"),
        ([CreateRun(run="x"), Tag(run="x", tag="t", version=A)], "tags a version of run 'r'"),
        ([Untag(run="r", tag="nope")], "no tag 'nope'"),
        ([Untag(run="x", tag="t")], "no run 'x'"),
        ([Condemn(keys=(_NEW,)), move_op()], "was condemned"),
        ([Delete(versions=(A,)), move_op()], "changed before"),
        ([move_op(), move_op()], "changed before"),
        ([move_op(), move_op("3" * 64, "full")], "more than it has"),
        ([Pin(version=A), Delete(versions=(A,))], "pinned"),
        ([Swept(keys=(_PACK,))], "not condemned"),
    ],
)
def test_operations_that_break_an_invariant(ops: list[Op], said: str) -> None:
    """They are corruption that names the commit, and nothing of their commit counts."""
    before = folded(CreateRun(run="r", metrics={"loss": "min"}), save_op(A, metrics={"loss": 1.0}))
    good = CreateRun(run="innocent")
    after, error = extended(before, [commit_after(before, good, *ops)])
    assert isinstance(error, errors.CorruptObjectError)
    assert commit_key(3) in str(error)
    assert said in str(error)
    assert after.number == 2
    assert not after.has_run("innocent")
    assert [v.id for v in after.versions()] == [A]


def test_a_commit_must_follow_by_number_and_digest() -> None:
    """A commit of another history, or out of order, is refused."""
    catalog = folded(CreateRun(run="r"))
    other = folded(CreateRun(run="other"))
    skipped = commit_after(folded(CreateRun(run="r"), CreateRun(run="s")), CreateRun(run="t"))
    for commit, said in [
        (commit_after(other, CreateRun(run="x")), "history was changed"),
        (skipped, "2 should"),
    ]:
        after, error = extended(catalog, [commit])
        assert said in str(error)
        assert after.number == 1


def test_commits_before_a_bad_one_are_folded() -> None:
    """The prefix of a batch counts, whatever follows."""
    catalog = Catalog()
    first = commit_after(catalog, CreateRun(run="r"))
    after_first, _ = extended(catalog, [first])
    second = commit_after(after_first, CreateRun(run="r"))
    after, error = extended(catalog, [first, second])
    assert error is not None
    assert (after.number, [run.name for run in after.runs()]) == (1, ["r"])
    assert catalog.runs() == []


def test_folding_one_by_one_or_at_once_is_the_same() -> None:
    """Batches are an optimisation and nothing else."""
    ops: list[Op] = [CreateRun(run="r"), save_op(A, tags=["t"]), save_op(B, parent=A, tags=["t"])]
    ops += [Annotate(version=A, metrics={"x": 1.0}), Untag(run="r", tag="t")]
    catalog, commits = Catalog(), []
    for op in ops:
        commits.append(commit_after(catalog, op))
        catalog, _ = extended(catalog, commits[-1:])
    at_once, error = extended(Catalog(), commits)
    assert error is None
    assert at_once.to_snapshot() == catalog.to_snapshot()


def test_a_tag_is_of_one_version_and_moves() -> None:
    """Tagging another version takes the tag from the first; untag takes it from all."""
    catalog = folded(
        CreateRun(run="r"),
        save_op(A, tags=["t", "u"]),
        save_op(B),
        Tag(run="r", tag="t", version=B),
    )
    assert (catalog.version(A).tags, catalog.version(B).tags) == (("u",), ("t",))
    assert [v.tags for v in catalog.versions("r")] == [("u",), ("t",)]
    found = catalog.by_tag("r", "t")
    assert found is not None
    assert found.id == B


def test_annotating_replaces_and_adds() -> None:
    """Later values win; other metrics stay."""
    catalog = folded(
        CreateRun(run="r"),
        save_op(A, metrics={"a": 1.0, "b": 2.0}),
        Annotate(version=A, metrics={"b": math.inf, "c": 3.0}),
    )
    assert catalog.version(A).metrics == {"a": 1.0, "b": math.inf, "c": 3.0}
    assert catalog.metric_names("r") == {"a", "b", "c"}


def test_the_head_is_the_last_save_of_the_run() -> None:
    """Saves of other runs do not move it."""
    catalog = folded(CreateRun(run="r"), CreateRun(run="s"), save_op(A), save_op(B, run="s"))
    head = catalog.head("r")
    assert head is not None
    assert (head.id, catalog.head_id("s"), catalog.head_id("none")) == (A, B, "")
    assert catalog.head_id("r") == catalog.run("r").head
    with pytest.raises(errors.RunNotFoundError):
        catalog.head("none")


def test_listing_is_in_order_of_commits_and_lazy() -> None:
    """Both directions, all runs or one; a run that is not there is refused at the call."""
    catalog = folded(CreateRun(run="r"), CreateRun(run="s"), save_op(A), save_op(B, run="s"))
    assert [v.id for v in catalog.versions()] == [A, B]
    assert [v.id for v in catalog.versions(newest_first=True)] == [B, A]
    assert [v.id for v in catalog.versions("s")] == [B]
    assert [run.versions_count for run in catalog.runs()] == [1, 1]
    with pytest.raises(errors.RunNotFoundError, match="there is r, s"):
        catalog.versions("xyz")
    assert next(itertools.islice(catalog.versions(), 1)).id == A


def test_prefixes_find_what_begins_so() -> None:
    """An exact id wins; a prefix gives all, up to a bound."""
    catalog = folded(CreateRun(run="r"), *(save_op(f"{i:032x}") for i in range(20)))
    assert [v.id for v in catalog.by_prefix(f"{3:032x}")] == [f"{3:032x}"]
    assert len(catalog.by_prefix("0000")) == 10
    assert catalog.by_prefix("f") == []


def test_what_is_not_there() -> None:
    """Each question about nothing has an error or None, as documented."""
    catalog = folded(CreateRun(run="r"))
    assert catalog.head("r") is None
    assert catalog.by_step("r", 1) is None
    assert catalog.by_tag("r", "t") is None
    assert list(catalog.versions("r")) == []
    with pytest.raises(errors.VersionNotFoundError):
        catalog.version(A)
    with pytest.raises(errors.VersionNotFoundError):
        list(catalog.ancestors(A))
    with pytest.raises(errors.InvalidInputError):
        Catalog().to_snapshot()


def test_ancestors_cross_runs() -> None:
    """A parent may be in another run, and is followed there."""
    catalog = folded(CreateRun(run="r"), CreateRun(run="s"), save_op(A), save_op(B, "s", parent=A))
    assert [v.id for v in catalog.ancestors(B)] == [B, A]


# --- what callers ask for -----------------------------------------------------------------------
def test_directions_merge_and_conflict() -> None:
    """New metrics join what a run declares, in the commit that needs them; none may turn."""
    catalog = folded(CreateRun(run="r", metrics={"loss": "min"}))
    assert run_ops.ensure_run(catalog, "r", {"loss": "min"}) == []
    assert run_ops.ensure_run(catalog, "r", {"loss": "min", "acc": "max"}) == [
        Declare(run="r", metrics={"acc": "max"})
    ]
    assert run_ops.ensure_run(catalog, "new", {"a": "max"}) == [
        CreateRun(run="new", metrics={"a": "max"})
    ]
    with pytest.raises(errors.InvalidInputError, match="has the direction 'min'"):
        run_ops.ensure_run(catalog, "r", {"loss": "max"})
    with pytest.raises(errors.InvalidInputError, match="'min' or 'max'"):
        run_ops.ensure_run(catalog, "r", {"x": "up"})
    with pytest.raises(errors.LimitError):
        run_ops.ensure_run(catalog, "r", {f"m{i}": "min" for i in range(1000)})


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"step": -1}, errors.InvalidInputError),
        ({"step": 2**63}, errors.InvalidInputError),
        ({"step": 1.0}, errors.InvalidInputError),
        ({"step": True}, errors.InvalidInputError),
        ({"run": "a@b"}, errors.InvalidInputError),
        ({"tags": ["latest"]}, errors.InvalidInputError),
        ({"tags": [f"t{i}" for i in range(101)]}, errors.LimitError),
        ({"metrics": {"a": "1.0"}}, errors.InvalidInputError),
        ({"metrics": {"a": None}}, errors.InvalidInputError),
        ({"metrics": {"a": [1.0]}}, errors.InvalidInputError),
        ({"metrics": {f"m{i}": 1.0 for i in range(1001)}}, errors.LimitError),
        ({"metadata": {"a": object()}}, errors.InvalidInputError),
        ({"metadata": {"a": "x" * limits.METADATA_BYTES_MAX}}, errors.LimitError),
        ({"directions": {"a": "down"}}, errors.InvalidInputError),
        ({"version": A}, errors.CommitConflictError),
    ],
    ids=[str(number) for number in range(15)],
)
def test_wishes_that_are_refused(changed: dict[str, Any], error: type[Exception]) -> None:
    """A save with a wrong argument raises before anything is written."""
    catalog = folded(CreateRun(run="r"), save_op(A))
    wish: dict[str, Any] = {
        "run": "r",
        "version": B,
        "step": 1,
        "manifest": ManifestPointer(key=manifest_key(B), stored_bytes=1, digest="1" * 64),
        "content": "2" * 64,
    }
    assert len(run_ops.save(catalog, **wish)) == 1
    with pytest.raises(error):
        run_ops.save(catalog, **{**wish, **changed})


@pytest.mark.parametrize(
    ("before", "level", "error"),
    [
        ([], "full", None),
        ([], "record", None),
        ([Pin(version=A)], "full", None),
        ([Pin(version=A)], "weights", errors.PolicyError),
        ([Pin(version=A)], "record", errors.PolicyError),
        ([Delete(versions=(A,))], "full", errors.CommitConflictError),
        ([Condemn(keys=(_NEW,))], "full", errors.CondemnedError),
        ([Condemn(keys=(_PACK,))], "weights", errors.CondemnedError),
        ([Condemn(keys=(_PACK,)), Swept(keys=(_PACK,))], "full", errors.CondemnedError),
        ([Condemn(keys=(pack_key(A),))], "full", None),
        ([Quarantine(versions=(A,))], "full", None),
    ],
    ids=[str(number) for number in range(11)],
)
def test_moves_that_are_refused(
    before: list[Op], level: Level, error: type[Exception] | None
) -> None:
    """A pinned version loses no content, and no version moves to a condemned manifest or pack."""
    catalog = folded(CreateRun(run="r"), save_op(A), *before)
    move = Move(
        version=A, based_on="1" * 64, level=level,
        manifest=None if level == "record" else move_op().manifest, content="2" * 64,
        relies_on=() if level == "record" else (_NEW, _PACK),
    )  # fmt: skip
    if error is None:
        (op,) = content_ops.relocate(catalog, [move])
        assert extended(catalog, [commit_after(catalog, op)])[1] is None
    else:
        with pytest.raises(error):
            content_ops.relocate(catalog, [move])


def test_tags_and_annotations_name_what_is_there() -> None:
    """Wishes about what does not exist are refused with the right kind."""
    catalog = folded(CreateRun(run="r"), CreateRun(run="s"), save_op(A, tags=["good"]))
    assert run_ops.tag(catalog, "r", A, "t") == [Tag(run="r", tag="t", version=A)]
    assert run_ops.untag(catalog, "r", "good") == [Untag(run="r", tag="good")]
    with pytest.raises(errors.InvalidInputError, match="tag it in run 'r'"):
        run_ops.tag(catalog, "s", A, "t")
    with pytest.raises(errors.RunNotFoundError):
        run_ops.tag(catalog, "x", A, "t")
    with pytest.raises(errors.VersionNotFoundError):
        run_ops.tag(catalog, "r", B, "t")
    with pytest.raises(errors.VersionNotFoundError, match="did you mean good"):
        run_ops.untag(catalog, "r", "god")
    with pytest.raises(errors.VersionNotFoundError):
        run_ops.annotate(catalog, B, {"a": 1.0})
    with pytest.raises(errors.InvalidInputError):
        run_ops.annotate(catalog, A, {})
    many = Annotate(version=A, metrics={f"m{i}": 0.0 for i in range(999)})
    full, _ = extended(catalog, [commit_after(catalog, many)])
    with pytest.raises(errors.LimitError):
        run_ops.annotate(full, A, {"x": 1, "y": 2})


def test_metrics_accept_what_is_a_number() -> None:
    """Ints, bools, decimals and anything with a float; not text."""
    given: dict[str, object] = {"a": 1, "b": True, "c": Decimal("0.5"), "d": math.nan}
    checked = check_metrics(given)
    assert {name: type(value) for name, value in checked.items()} == dict.fromkeys("abcd", float)
    assert [checked["a"], checked["b"], checked["c"]] == [1.0, 1.0, 0.5]
    refused: list[object] = ["1", b"1", None, [], 10**400]
    for value in refused:
        with pytest.raises(errors.InvalidInputError, match="'loss'"):
            check_metrics({"loss": value})
    with pytest.raises(errors.LimitError):
        check_directions({f"m{i}": "min" for i in range(1001)})
