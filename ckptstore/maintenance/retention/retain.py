"""Retention by commits: versions are deleted or aged, by a policy or by hand. Torch-free.

The plan of a policy is made again inside every commit, on the catalog that it follows: a version
that was tagged or pinned meanwhile stays, and one that became the head too.

Ageing keeps less of a version: its weights, these in fewer bits, or its record. For its weights
alone no tensor is read or written, but for those that follow from one that goes; to have them in
fewer bits, they are read, rounded and written. Then comes a new manifest, which names what stays;
and one commit makes the version point to it and condemns the old manifest, and what only that one
named is a collection's to free. A crash before the commit leaves orphans, and the version as it
was.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ckptstore import limits
from ckptstore.backends.transfers import operation
from ckptstore.catalog import lifecycle_ops, retention, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.content_ops import Move
from ckptstore.catalog.levels import LEVELS, Level
from ckptstore.catalog.lifecycle_ops import pinned_error
from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention import Decision, RunPlan
from ckptstore.catalog.state import Op
from ckptstore.chunking import batches
from ckptstore.committing import commit_retrying, on_reserve
from ckptstore.errors import (
    CkptStoreError,
    ColdObjectError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    PolicyError,
    StorageFullError,
)
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.core.relocate import record_move, relocate, relocating, write_move
from ckptstore.maintenance.core.storage_times import Clock, StorageTimes
from ckptstore.maintenance.retention.reduce import Lowered, Target, lower, weigh, weights_of
from ckptstore.maintenance.retention.rounding_report import Rounding
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown, bytes_text, parts_text

_log = logging.getLogger("ckptstore")

AnyPolicy: TypeAlias = "Policy | Mapping[str, object]"
"""A policy, or its JSON form: ``{"full": "last 3", "weights": ["best 5 val_loss"]}``."""
AfterCommit: TypeAlias = "Callable[[Sequence[Version], Collection[str]], Collection[str]]"
"""Given the versions that a commit has changed, as they were, and the ids of those that it deleted;
gives the ids of versions that stay from now on as they are."""
_Key: TypeAlias = tuple[str, str, str]
_RECENT = 2
"""Versions that were written just before, whose pieces are looked through for equal ones."""
_NAMED = 5
"""Tensors that a warning names."""
_TOLD = 12
"""Parts of a state that the log names, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RetainReport(Shown):
    """Result of a retention, or of its dry run."""

    dry_run: bool
    plans: tuple[RunPlan, ...]
    """Of each run. After a run that was not dry: what was decided about versions as they were."""
    commits: tuple[int, ...] = ()
    """Numbers of the commits that carried it out."""
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    """Version id to what became of its weights, or would, where they were read for it."""
    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Version id to the parts of its state that a reduction to weights takes away, by name: bytes
    in memory. Nothing is known of them after ``quick``."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Version id to why it is not reduced, though the plan says so: it has to be thawed first."""
    clock: Clock = ""
    """The clock that rules of time went by: ``storage``; ``machine``, this one's, in a dry run
    where nothing may be written; empty if no rule asked."""

    def _summary(self) -> HtmlTable:
        gone = sum(one.fate == "gone" for one in self.changes)
        dry = "dry run: " if self.dry_run else ""
        title = f"{dry}{gone} deleted, {len(self.changes) - gone} reduced"
        title += f", {bytes_text(self.reclaimable_bytes)} for gc to free"
        every = [one for plan in self.plans for one in reversed(plan.decisions)]
        rows = [(x.version.label, x.fate, "; ".join(x.reasons), self.drops(x)) for x in every]
        return HtmlTable(title=title, columns=("VERSION", "KEPT", "WHY", "DROPS"), rows=rows)

    def drops(self, decision: Decision) -> str:
        """Return as text what a decision takes away of the state of a version."""
        return parts_text(self.dropped.get(decision.version.id, {}))

    @property
    def changes(self) -> tuple[Decision, ...]:
        """The decisions that change a version, of all runs."""
        return tuple(decision for plan in self.plans for decision in plan.changes)

    @property
    def reclaimable_bytes(self) -> int:
        """Stored bytes that no longer have to be kept; a collection frees that much at most."""
        return sum(decision.reclaimable_bytes for decision in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A change of a version that a commit can carry out: everything that it names is durable."""

    move: Move
    lowered: Lowered | None
    """The rest of the version; None for a record."""


def check_policy(policy: AnyPolicy) -> Policy:
    """Return a policy that was given in either form.

    Raises
    ------
    InvalidInputError
        It does not follow the grammar.
    PolicyError
        It has no rule, and no encoding.
    """
    if not isinstance(policy, Policy):
        return Policy.from_json(policy)
    if not policy.encodings and not policy.roles:
        policy.check()
    return policy


def set_policy(
    repo: Repo, run: str, policy: AnyPolicy | None, *, directions: Mapping[str, str] | None = None
) -> None:
    """Store the policy of a run, which is made if it is not there, or of the store.

    Roles that are stored stay unless it has others: a new policy must not lose a network.

    Parameters
    ----------
    run
        Empty for the policy of all runs that have none.
    policy
        None takes it away. One of ``roles`` alone leaves everything else as it is.

    Raises
    ------
    InvalidInputError, PolicyError
        The policy is not accepted.
    """
    given = {} if policy is None else check_policy(policy).to_json()
    alone = isinstance(policy, Mapping) and policy.keys() == {"roles"}

    def build(now: Catalog) -> list[Op]:
        """Set the policy, of a run that is new with the run itself."""
        made = run_ops.ensure_run(now, run, directions or {}) if run else []
        old: dict[str, Any] = json.loads(now.own_policy(run) or b"{}")
        roles = given.get("roles") if alone else given.get("roles", old.get("roles"))
        value = {**(old if alone else given), "roles": roles}
        value = {key: part for key, part in value.items() if part}
        if alone and value == old:
            return []
        return [*made, *lifecycle_ops.set_policy(now, run, value, is_new=bool(made))]

    repo.log.append_any(build)


@operation("retain")
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
    """Plan the fate of versions by a policy, and carry it out unless `dry_run`.

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
    IntegrityError, FormatError
        A version that is to be aged is damaged, and stays; all others were carried out.
    StorageError
        The storage failed; what was committed before stays, and a repetition goes on.
    """
    checked = None if policy is None else check_policy(policy)
    if checked is not None:
        checked.check()
    applying = _Retaining(repo, checked, run, free, after, StorageTimes(repo, strict=not dry_run))
    plans = applying.plans(repo.refresh())
    if checked is None and plans and not any(plan.policy or plan.refused for plan in plans):
        of = f"run {run!r}" if run is not None else "this store"
        msg = f"{of} has no retention policy, and none was given"
        hint = "such as 'last 3' for full, 'best 5 val_loss' for weights"
        raise InvalidInputError(msg, hint=hint)
    commits: list[int] = []
    if not dry_run:
        repo.check_writable()
        commits = applying.carry_out()
    elif not quick:
        applying.measure(plans)
    for error in applying.skipped.values():
        if not isinstance(error, ColdObjectError):
            raise error
    return RetainReport(
        dry_run=dry_run,
        plans=tuple(_measured(plan, applying.lowered) for plan in plans),
        commits=tuple(commits),
        clock=applying.times.clock,
        roundings={one: x.rounding for one, x in applying.lowered.items() if x.rounding},
        dropped=applying.dropped,
        skipped={one: error.message for one, error in applying.skipped.items()},
    )


def _measured(plan: RunPlan, lowered: Mapping[str, Lowered]) -> RunPlan:
    """Return a plan with freed bytes as measured in place of estimates."""
    decisions = tuple(
        replace(one, reclaimable_bytes=lowered[one.version.id].reclaimable_bytes)
        if one.changes and one.version.id in lowered
        else one
        for one in plan.decisions
    )
    return replace(plan, decisions=decisions)


def target_of(plan: RunPlan, decision: Decision) -> Target:
    """Return the target of a decision of a plan, which is not ``gone``."""
    assert decision.fate != "gone"  # noqa: S101 - for the type checker
    encodings = plan.policy.rounding(decision.fate) if plan.policy else ()
    return Target(level=decision.fate, encodings=encodings)


@dataclass(slots=True)
class _Retaining:
    """One call; owned by one thread."""

    repo: Repo
    policy: Policy | None
    run: str | None
    free: Collection[str] | None
    after: AfterCommit | None
    times: StorageTimes
    prepared: dict[_Key, Prepared] = field(default_factory=dict)
    recent: list[PieceTable] = field(default_factory=list)
    changed: Sequence[Version] = ()
    """Versions that the last commit has changed, as they were."""
    gone: Sequence[str] = ()
    """Ids of those that it has deleted."""
    lowered: dict[str, Lowered] = field(default_factory=dict)
    """Version id to the rest of it, where tensors had to be read to know that."""
    dropped: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """As in the report."""
    skipped: dict[str, CkptStoreError] = field(default_factory=dict)
    """Version id to the error for which it stays as it is."""

    def plans(self, catalog: Catalog) -> list[RunPlan]:
        return retention.plan(
            catalog, policy=self.policy, run=self.run, times=self.times, free=self.free
        )

    def measure(self, plans: Sequence[RunPlan]) -> None:
        """Round what would be rounded, and keep what that tells."""
        recent: list[PieceTable] = []
        for plan in plans:
            for one in () if plan.refused else plan.changes:
                if one.fate in ("gone", "record"):
                    continue
                _, self.dropped[one.version.id] = weights_of(self.repo, one.version)
                if not (target := target_of(plan, one)).encodings:
                    continue
                del recent[:-_RECENT]
                with self._skipping(one.version):
                    self.lowered[one.version.id] = weigh(self.repo, one.version, target, recent)

    def carry_out(self) -> list[int]:
        """Commit until nothing is left to do; return the numbers of the commits."""
        numbers: list[int] = []
        while True:
            left, commit = commit_retrying(self._try)
            if commit is not None:
                numbers.append(commit.number)
                for (version, _, _), found in self.prepared.items():
                    if found.lowered is not None:
                        self.dropped[version] = found.lowered.dropped
                        if found.lowered.rounding is not None:
                            self.lowered[version] = found.lowered
                if self.after is not None and self.free is not None:
                    self.free = {*self.free}.difference(self.after(self.changed, self.gone))
            elif not left:
                return numbers

    def _try(self, _: set[str]) -> tuple[bool, Commit | None]:
        """Write what one commit needs, and commit; return whether there was anything to do.

        On a full storage, what needs no new objects is committed: deletions above all.
        """
        full: StorageFullError | None = None
        try:
            left = self._prepare(self.repo.refresh())
        except StorageFullError as error:
            left, full = True, error
        commit = on_reserve(self.repo.backend, lambda: self.repo.log.append_any(self._build))
        if full is not None and commit is None:
            raise full
        return left, commit

    def _todo(self, catalog: Catalog) -> tuple[list[str], dict[_Key, Target]]:
        """Return the versions to be deleted, and those to be aged by their present state."""
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
        self.prepared = {
            key: found
            for key, found in self.prepared.items()
            # A collection without patience takes a new manifest for an orphan.
            if key in aged and not catalog.gone(found.move.relies_on)
        }
        del self.recent[:-_RECENT]
        room = limits.ROUNDED_PER_COMMIT
        for key, target in aged.items():
            if len(self.prepared) == limits.RELOCATES_PER_COMMIT or not room:
                break
            if key not in self.prepared and key[0] not in self.skipped:
                version = catalog.version(key[0])
                with self._skipping(version):
                    self.prepared[key] = prepare(self.repo, version, target, self.recent)
                    room -= bool(target.encodings)
        return bool(gone) or any(key[0] not in self.skipped for key in aged)

    @contextmanager
    def _skipping(self, version: Version) -> Iterator[None]:
        """Note a version that cannot be read and stays as it is, and go on with the others."""
        try:
            yield
        except (ColdObjectError, FormatError, IntegrityError) as error:
            _log.info("%s is not reduced: %s", version.label, error)
            self.skipped[version.id] = error

    def _build(self, now: Catalog) -> Sequence[Op]:
        gone, aged = self._todo(now)
        self.gone = gone[: limits.VERSIONS_PER_OP_MAX]
        ops = lifecycle_ops.delete(now, self.gone, reason="retention") if gone else []
        moves = [prepared.move for key, prepared in self.prepared.items() if key in aged]
        self.changed = [now.version(one) for one in (*self.gone, *(m.version for m in moves))]
        return [*ops, *relocating(now, moves)]


# --- ageing -------------------------------------------------------------------------------------


@operation("retain")
def age(
    repo: Repo, versions: Sequence[Version], target: Target, *, force: bool = False
) -> list[str]:
    """Keep less of versions, each in whole or not at all; return the ids of those that changed.

    Parameters
    ----------
    force
        Also tagged ones, and the head of a run, from which its training could then not go on.

    Raises
    ------
    PolicyError
        One is pinned; or parts of it are lost; or it is tagged or the head, and `force` is False;
        or it has no tensors of role ``weights``. Nothing was changed.
    CommitConflictError
        One was deleted or changed meanwhile.
    CorruptObjectError
        The manifest of one is damaged.
    """
    repo.check_writable()
    catalog = repo.refresh()
    each = {version.id: version for version in versions}.values()
    chosen = [one for one in each if LEVELS.index(target.level) < LEVELS.index(one.level)]
    for version in chosen:
        _check(catalog, version, target.level, force=force)
    size = limits.ROUNDED_PER_COMMIT if target.encodings else limits.RELOCATES_PER_COMMIT
    recent: list[PieceTable] = []
    for part in batches(chosen, size):

        def attempt(_: set[str], part: Sequence[Version] = part) -> None:
            """Write and commit; again where a collection took a new manifest for an orphan."""
            del recent[:-_RECENT]
            moves = [prepare(repo, one, target, recent).move for one in part]

            def checked(now: Catalog) -> Sequence[Move]:
                """Return all moves, if the versions may still age."""
                for version in part:
                    _check(now, version, target.level, force=force)
                return moves

            relocate(repo, checked)

        commit_retrying(attempt)
    return [version.id for version in chosen]


def _check(catalog: Catalog, version: Version, level: Level, *, force: bool) -> None:
    now = catalog.version(version.id)
    if now.pinned:
        raise pinned_error(now)
    if now.damaged and level != "record":
        msg = f"parts of {now.label} are lost"
        raise PolicyError(msg, hint="ckptstore repair it first, or keep only its record")
    if now.tags and not force:
        msg = f"{version.label} is tagged {', '.join(now.tags)}"
        raise PolicyError(msg, hint="take the tags away, or force it")
    if catalog.head_id(version.run) == version.id and not force:
        msg = f"{version.label} is the head of its run: training goes on from it"
        raise PolicyError(msg, hint="force it, if the run is over")
    if level != "record" and now.level == "record":
        msg = f"only the record of {now.label} is kept here"
        raise PolicyError(msg, hint="load it with refill=True first")
    if level != "record" and not any(r == "weights" and p.logical for r, p in now.roles.items()):
        msg = f"{version.label} has no tensors of role weights: nothing would be left"
        raise PolicyError(msg, hint="save with roles={PATTERN: 'weights'}")


def prepare(repo: Repo, version: Version, target: Target, recent: list[PieceTable]) -> Prepared:
    """Write the part of a version that stays, and its manifest; return the move to it.

    Parameters
    ----------
    recent
        See :func:`ckptstore.maintenance.retention.reduce.lower`.

    Raises
    ------
    CorruptObjectError
        The version's manifest is damaged.
    CorruptTensorError
        A tensor that has to be read is.
    StorageError
        The storage failed; nothing has changed.
    """
    if target.level == "record":
        return Prepared(move=record_move(version), lowered=None)
    if target.level == "full":
        msg = f"a version does not age to {target.level!r}"
        raise InvalidInputError(msg, hint=", ".join(reversed(LEVELS[:-1])))
    lowered = lower(repo, version, target, recent)
    move = write_move(repo, version, lowered.manifest, level=target.level, roles=lowered.roles)
    largest = sorted(lowered.dropped.items(), key=lambda item: -item[1])[:_TOLD]
    _warn(version, lowered.rounding)
    if lowered.dropped:
        gone = parts_text(lowered.dropped)
        _log.info("%s is reduced to %s: drops %s", version.label, target.level, gone)
    dropped = {name[: limits.ROLE_CHARS_MAX]: size for name, size in largest}
    return Prepared(move=replace(move, dropped=dropped), lowered=lowered)


def _warn(version: Version, rounding: Rounding | None) -> None:
    """Log which tensors of a version are not in the form that its level asks for."""
    problems = () if rounding is None else rounding.problems
    if problems:
        named = "; ".join(f"{one.path} ({one.problem})" for one in problems[:_NAMED])
        more = f" and {len(problems) - _NAMED} more" if problems[_NAMED:] else ""
        _log.warning("%s: kept more exactly than its level says: %s%s", version.label, named, more)
