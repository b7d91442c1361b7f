"""Carries out what retention plans: deletes and ages versions by commits, never more. Torch-free.

The plan is made again inside every commit, on the catalog that it follows: a version that was
tagged or pinned meanwhile stays, and one that became the head too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ckptstore import limits
from ckptstore.catalog import lifecycle_ops, retention, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.lifecycle_ops import SetPolicy
from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention import Decision, RunPlan
from ckptstore.catalog.state import Op
from ckptstore.committing import commit_retrying
from ckptstore.errors import InvalidInputError, PolicyError
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.core.relocate import relocating
from ckptstore.maintenance.retention import ageing
from ckptstore.maintenance.retention.ageing import Prepared, Target
from ckptstore.maintenance.retention.reduce import Lowered, weigh
from ckptstore.maintenance.retention.rounding_report import Rounding
from ckptstore.model import Version
from ckptstore.repo import Repo

__all__ = ["AfterCommit", "AnyPolicy", "RetainReport", "check_policy", "retain", "set_policy"]

AnyPolicy: TypeAlias = "Policy | Mapping[str, object]"
"""A policy, or its JSON form: ``{"full": "last 3", "weights": ["best 5 val_loss"]}``."""
AfterCommit: TypeAlias = "Callable[[Sequence[Version], Collection[str]], Collection[str]]"
"""Given the versions that a commit has changed, as they were, and the ids of those that it deleted;
gives the ids of versions that stay from now on as they are."""
_Key: TypeAlias = tuple[str, str, str]
_RECENT = 2
"""Versions that were written just before, whose pieces are looked through for equal ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainReport:
    """What retention did, or would do."""

    dry_run: bool
    plans: tuple[RunPlan, ...]
    """Of each run. After a run that was not dry: what was decided about versions as they were."""
    commits: tuple[int, ...] = ()
    """Numbers of the commits that carried it out."""
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    """Version id to what became of its weights, or would, where they were read for it."""

    @property
    def changes(self) -> tuple[Decision, ...]:
        """The decisions that change a version, of all runs."""
        return tuple(decision for plan in self.plans for decision in plan.changes)

    @property
    def reclaimable_bytes(self) -> int:
        """Stored bytes that no longer have to be kept; a collection frees that much at most."""
        return sum(decision.reclaimable_bytes for decision in self.changes)


def check_policy(policy: AnyPolicy) -> Policy:
    """Return a policy that was given in either form.

    Raises
    ------
    InvalidInputError
        It does not follow the grammar.
    PolicyError
        It has no rule, and no encoding.
    """
    found = policy if isinstance(policy, Policy) else Policy.from_json(policy)
    if not found.encodings:
        found.check()
    return found


def set_policy(
    repo: Repo, run: str, policy: AnyPolicy | None, *, directions: Mapping[str, str] | None = None
) -> None:
    """Store the policy of a run, which is made if it is not there, or of the store.

    Parameters
    ----------
    run
        Empty for the policy of all runs that have none.
    policy
        None takes it away.

    Raises
    ------
    InvalidInputError, PolicyError
        The policy is not accepted.
    """
    value = {} if policy is None else check_policy(policy).to_json()

    def build(now: Catalog) -> list[Op]:
        """Set the policy, of a run that is new with the run itself."""
        made = run_ops.ensure_run(now, run, directions or {}) if run else []
        if run and not now.has_run(run):
            store = lifecycle_ops.set_policy(now, "", value)[0]
            assert isinstance(store, SetPolicy)  # noqa: S101 - for the type checker
            return [*made, SetPolicy(run=run, policy=store.policy)]
        return [*made, *lifecycle_ops.set_policy(now, run, value)]

    repo.log.append(build)


def retain(
    repo: Repo,
    *,
    policy: AnyPolicy | None = None,
    run: str | None = None,
    dry_run: bool,
    quick: bool = False,
    free: Collection[str] | None = None,
    after: AfterCommit | None = None,
) -> RetainReport:
    """Plan what becomes of versions, and carry it out unless `dry_run`.

    Parameters
    ----------
    quick
        A dry run reads no tensor: what rounding frees is estimated, and its errors are not known.
    free
        Ids of versions that may change; all others, those that come meanwhile too, stay as they
        are. None: all may.
    after
        With `free`: called after each commit; see :data:`AfterCommit`.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    InvalidInputError
        No policy was given, and none is stored; or it does not follow the grammar.
    PolicyError
        The plan of a run is refused: its policy would keep no content. Nothing was changed.
    CorruptObjectError
        The manifest of a version that is to be aged is damaged; what was committed before stays.
    StorageError
        The storage failed; what was committed before stays, and a repetition goes on.
    """
    checked = None if policy is None else check_policy(policy)
    if checked is not None:
        checked.check()
    applying = _Retaining(repo=repo, policy=checked, run=run, free=free, after=after)
    plans = applying.plans(repo.refresh())
    if checked is None and plans and not any(plan.policy or plan.refused for plan in plans):
        of = f"run {run!r}" if run is not None else "this store"
        msg = f"{of} has no retention policy, and none was given"
        raise InvalidInputError(
            msg, hint="such as 'last 3' for full, 'best 5 val_loss' for weights"
        )
    commits: list[int] = []
    if not dry_run:
        repo.check_writable()
        commits = applying.carry_out()
    elif not quick:
        applying.measure(plans)
    return RetainReport(
        dry_run=dry_run,
        plans=tuple(_measured(plan, applying.lowered) for plan in plans),
        commits=tuple(commits),
        roundings={one: x.rounding for one, x in applying.lowered.items() if x.rounding},
    )


def _measured(plan: RunPlan, lowered: Mapping[str, Lowered]) -> RunPlan:
    """Return a plan with what was found to be freed in place of what was estimated."""
    decisions = tuple(
        replace(one, reclaimable_bytes=lowered[one.version.id].reclaimable_bytes)
        if one.changes and one.version.id in lowered
        else one
        for one in plan.decisions
    )
    return replace(plan, decisions=decisions)


def target_of(plan: RunPlan, decision: Decision) -> Target:
    """Return what a decision of a plan, which is not ``gone``, does to its version."""
    assert decision.fate != "gone"  # noqa: S101 - for the type checker
    encodings = plan.policy.rounding(decision.fate) if plan.policy else ()
    return Target(level=decision.fate, encodings=encodings)


class _Retaining:
    """One call; owned by one thread."""

    def __init__(
        self,
        *,
        repo: Repo,
        policy: Policy | None,
        run: str | None,
        free: Collection[str] | None,
        after: AfterCommit | None,
    ) -> None:
        self._free = None if free is None else set(free)
        self._after = after
        self._repo = repo
        self._policy = policy
        self._run = run
        self._now_ms = repo.environment.now_ms()
        self._prepared: dict[_Key, Prepared] = {}
        self._recent: list[PieceTable] = []
        self._changed: list[Version] = []
        self._gone: list[str] = []
        self.lowered: dict[str, Lowered] = {}
        """Version id to what is left of it, where tensors had to be read to know that."""

    def plans(self, catalog: Catalog) -> list[RunPlan]:
        return retention.plan(
            catalog, policy=self._policy, run=self._run, now_ms=self._now_ms, free=self._free
        )

    def measure(self, plans: Sequence[RunPlan]) -> None:
        """Round what would be rounded, and keep what that tells."""
        recent: list[PieceTable] = []
        for plan in plans:
            for one in () if plan.refused else plan.changes:
                if one.fate == "gone" or not (target := target_of(plan, one)).encodings:
                    continue
                del recent[:-_RECENT]
                found = weigh(self._repo, one.version, target, recent)
                self.lowered[one.version.id] = found

    def carry_out(self) -> list[int]:
        """Commit until nothing is left to do; return the numbers of the commits."""
        numbers: list[int] = []
        while True:
            left, commit = commit_retrying(self._try)
            if commit is not None:
                numbers.append(commit.number)
                self._note()
                self._look()
            elif not left:
                return numbers

    def _try(self, _: set[str]) -> tuple[bool, Commit | None]:
        """Write what one commit needs, and commit; return whether there was anything to do."""
        return self._prepare(self._repo.refresh()), self._repo.log.append_any(self._build)

    def _todo(self, catalog: Catalog) -> tuple[list[str], dict[_Key, Target]]:
        """Return what is to be deleted and what is to be aged, by what it is now."""
        gone: list[str] = []
        aged: dict[_Key, Target] = {}
        for plan in self.plans(catalog):
            if plan.refused:
                policy = f" ({plan.policy})" if plan.policy else ""
                msg = f"the policy of run {plan.run!r}{policy} is refused: {plan.refused}"
                raise PolicyError(msg, hint="give the run a policy of its own, or mend this one")
            for decision in plan.changes:
                version = decision.version
                if decision.fate == "gone":
                    gone.append(version.id)
                else:
                    target = target_of(plan, decision)
                    aged[version.id, version.manifest_digest, decision.fate] = target
        return gone, aged

    def _prepare(self, catalog: Catalog) -> bool:
        """Write manifests for one commit; return whether there was anything to do."""
        gone, aged = self._todo(catalog)
        self._prepared = {
            key: found
            for key, found in self._prepared.items()
            # A collection without patience takes a new manifest for an orphan.
            if key in aged and not catalog.gone(found.move.relies_on)
        }
        del self._recent[:-_RECENT]
        room = limits.ROUNDED_PER_COMMIT
        for key, target in aged.items():
            if len(self._prepared) == limits.RELOCATES_PER_COMMIT or not room:
                break
            if key not in self._prepared:
                version = catalog.version(key[0])
                self._prepared[key] = ageing.prepare(self._repo, version, target, self._recent)
                room -= bool(target.encodings)
        return bool(gone or aged)

    def _build(self, now: Catalog) -> Sequence[Op]:
        gone, aged = self._todo(now)
        ops: list[Op] = []
        self._gone = gone[: limits.VERSIONS_PER_OP_MAX]
        if gone:
            ops += lifecycle_ops.delete(now, self._gone, reason="retention")
        moves = [prepared.move for key, prepared in self._prepared.items() if key in aged]
        self._changed = [now.version(one) for one in (*self._gone, *(m.version for m in moves))]
        return [*ops, *relocating(now, moves)]

    def _look(self) -> None:
        """Let the caller look at what was committed, and hold on to what must stay from now on."""
        if self._after is not None and self._free is not None:
            self._free -= set(self._after(self._changed, self._gone))

    def _note(self) -> None:
        """Remember what the moves that were committed have made of their versions."""
        for (version, _, _), prepared in self._prepared.items():
            if prepared.lowered is not None and prepared.lowered.rounding is not None:
                self.lowered[version] = prepared.lowered
