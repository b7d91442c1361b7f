"""Retention: plans the fate of each version of a run under a policy, with reasons. Pure.

A version is kept at the highest level that has a rule for it, never at more than it has, and not at
all if no level has one. Whatever the rules say,

- a pinned version stays as it is,
- the head of a run stays as it is: training goes on from it,
- a tagged version stays as it is where the policy does not say ``tagged`` at some level,
- the newest verified version stays as it is, where no other verified one would,
- a damaged version stays as it is, since it may be mended, and takes no other's place,
- a version whose tensors have no role ``weights`` is not reduced to them: nothing would be left.

Versions that a rollback abandoned count for no rule but ``tagged``, ``abandoned`` and ``all``.
A version that has only its record takes no place of ``last``, ``every`` and ``best`` at
the levels above. A plan that was carried out and is made again on what is left changes nothing.

A policy that keeps the content of no version is refused, as a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ckptstore.catalog import lifecycle_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.levels import LEVELS, Level
from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention_rules import CONTESTED, Tagged, Times, View
from ckptstore.catalog.state import Op
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.format.paths import Pattern
from ckptstore.model import RoleBytes, Version

Fate = Level | Literal["gone"]
"""The level at which a version is kept, or ``gone``: deleted."""

_ORDER: Final[tuple[Fate, ...]] = ("gone", *LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fate of one version, with its reasons."""

    version: Version
    fate: Fate
    reasons: tuple[str, ...]
    """Rules, and what holds whatever the rules say; for what loses something, why nothing held."""
    reclaimable_bytes: int
    """Stored bytes that no longer have to be kept for it: what a collection frees at most, since
    later versions may share a part of them."""

    @property
    def changes(self) -> bool:
        """Whether the version changes."""
        return self.fate != self.version.level


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The fates of the versions of one run."""

    run: str
    policy: Policy | None
    """None: the run has none, nothing is changed."""
    decisions: tuple[Decision, ...]
    """Oldest version first."""
    refused: str = ""
    """Why this plan must not be carried out; empty if it may be."""

    @property
    def changes(self) -> tuple[Decision, ...]:
        """The decisions that change a version."""
        return tuple(decision for decision in self.decisions if decision.changes)


def plan(
    catalog: Catalog,
    *,
    policy: Policy | None = None,
    run: str | None = None,
    times: Times,
    free: Container[str] | None = None,
) -> list[RunPlan]:
    """Return the plan of a run, or of all runs.

    Parameters
    ----------
    policy
        For all these runs; None for the policy that each has, or the store's.
    times
        Tells the ages of versions; asked by rules of time alone.
    free
        Ids of versions that may change; all others stay as they are. None: all may.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    """
    names = [run] if run is not None else [info.name for info in catalog.runs()]
    plans = []
    for name in names:
        try:
            found = policy or stored_policy(catalog, name)
        except CkptStoreError as error:
            plans.append(_untouched(catalog, name, refused=str(error)))
            continue
        if found is None:
            plans.append(_untouched(catalog, name))
        else:
            plans.append(plan_run(catalog, name, found, times=times, free=free))
    return plans


def stored_policy(catalog: Catalog, run: str) -> Policy | None:
    """Return the policy that holds for a run: its own, the store's, or None.

    A policy that has encodings alone leaves the rules to the other one.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    InvalidInputError
        The policy that is stored has something that this version does not know.
    """
    for text in catalog.policies(run):
        if (policy := Policy.from_json(json.loads(text))).has_rules:
            return policy
    return None


def fixed_roles(catalog: Catalog, run: str) -> dict[Pattern, str]:
    """Return the roles of tensors that are fixed for a run, by its policy or else by the store's.

    Raises
    ------
    InvalidInputError
        What is stored are no roles.
    """
    for text in catalog.policies(run):
        if found := Policy.from_json({"roles": json.loads(text).get("roles", {})}).roles:
            return dict[Pattern, str](found.items())
    return {}


def inherit_roles(target: Catalog, run: str, roles: Mapping[Pattern, str]) -> list[Op]:
    """Return the operation that fixes roles for a run, unless it has its own.

    A fork or a copy must not lose a network that the run at its source keeps. The same commit may
    make the run.
    """
    own = json.loads(target.own_policy(run) or b"{}")
    if not roles or own.get("roles") or roles == fixed_roles(target, run):
        return []
    return lifecycle_ops.set_policy(target, run, {**own, "roles": roles}, is_new=True)


def stored_encodings(catalog: Catalog, run: str) -> Mapping[str, str]:
    """Return the encodings of a run's saves by its policy, or else by the store's.

    Parameters
    ----------
    run
        Need not be there yet.

    Raises
    ------
    InvalidInputError
        The policy that is stored has something that this version does not know.
    """
    for text in catalog.policies(run):
        if found := Policy.from_json(json.loads(text)).encodings:
            return found
    return {}


def plan_run(
    catalog: Catalog, run: str, policy: Policy, *, times: Times, free: Container[str] | None = None
) -> RunPlan:
    """Return the plan of one run under a policy; as :func:`plan`.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    PolicyError
        The policy has no rule.
    """
    policy.check()
    try:
        return _Planning(catalog, run, policy, times, free).plan()
    except InvalidInputError as error:
        return _untouched(catalog, run, policy=policy, refused=str(error))


def chosen_by(catalog: Catalog, run: str, policy: Policy, *, times: Times) -> list[Version]:
    """Return the versions of a run that a rule of level ``full`` names, oldest first.

    Unlike :func:`plan_run` by the rules alone: not those that are kept whatever the rules say.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    InvalidInputError
        A rule does not fit the run: the metric has no direction, say.
    """
    planning = _Planning(catalog, run, policy, times, None)
    chosen = planning.matched("full")
    return [version for version in planning.versions if version.id in chosen]


def reclaimable(version: Version, fate: Fate) -> int:
    """Return the stored bytes of a version that are not kept for it at a level.

    From the catalog alone: for levels that are written again this is an estimate, which takes the
    weights for float32; :mod:`ckptstore.maintenance.retention.rounding_report` has the measured
    bytes.
    """
    if _ORDER.index(fate) >= _ORDER.index(version.level) or version.level == "record":
        return 0
    weights = version.roles.get("weights", RoleBytes(logical=0, new=0, stored=0)).stored
    rest = sum(part.stored for part in version.roles.values()) - weights
    if fate in _WRITTEN_BITS:
        before = _WRITTEN_BITS.get(version.level, 32)
        return rest + weights * (before - _WRITTEN_BITS[fate]) // before
    return rest if fate == "weights" else rest + weights + version.manifest_bytes


_WRITTEN_BITS: Final[dict[Fate, int]] = {"weights-bf16": 16, "weights-int8": 8}
"""Bits of an element at the levels that are written again; 32 is assumed for other weights."""


def _untouched(
    catalog: Catalog, run: str, *, policy: Policy | None = None, refused: str = ""
) -> RunPlan:
    why = "refused" if refused else "no policy"
    decisions = tuple(
        Decision(version=version, fate=version.level, reasons=(why,), reclaimable_bytes=0)
        for version in catalog.versions(run)
    )
    return RunPlan(run=run, policy=policy, decisions=decisions, refused=refused)


class _Planning:
    """One run and one policy."""

    def __init__(
        self, catalog: Catalog, run: str, policy: Policy, times: Times, free: Container[str] | None
    ) -> None:
        self.versions = list(catalog.versions(run))
        """Oldest first."""
        self.policy = policy
        self.head = catalog.head_id(run)
        self.free = free
        self._run = run
        self._view = View(directions=catalog.run(run).metrics, times=times)

    def plan(self) -> RunPlan:
        """Decide on every version: what the rules say, then what holds whatever they say."""
        fates: dict[str, tuple[Fate, list[str]]] = {}
        for version in self.versions:
            why = "abandoned, and no rule for that" if version.abandoned else "no rule"
            fates[version.id] = ("gone", [why])
        having = {v.id for v in self.versions if v.level != "record" and not v.damaged}
        kept_content = False
        for level in LEVELS:  # from the least: what a higher level says replaces it
            matched = self.matched(level)
            kept_content = kept_content or (level != "record" and bool(having & matched.keys()))
            for version_id, reasons in matched.items():
                fates[version_id] = (level, reasons)
        for version in self.versions:
            fates[version.id] = self._held(version, *fates[version.id])
        self._keep_a_verified(fates)
        self._keep_a_full(fates)
        refused = ""
        if having and not kept_content:
            refused = f"it would keep the content of none of {len(having)} versions"
        decisions = tuple(
            Decision(
                version=version,
                fate=fates[version.id][0],
                reasons=tuple(fates[version.id][1]),
                reclaimable_bytes=reclaimable(version, fates[version.id][0]),
            )
            for version in self.versions
        )
        return RunPlan(run=self._run, policy=self.policy, decisions=decisions, refused=refused)

    def _held(self, version: Version, fate: Fate, reasons: list[str]) -> tuple[Fate, list[str]]:
        """Return the fate of a version that the rules cannot change."""
        if _ORDER.index(fate) >= _ORDER.index(version.level):
            return version.level, reasons
        held = []
        if version.pinned:
            held.append(lifecycle_ops.pinned_text(version))
        if version.id == self.head:
            held.append("head")
        if version.tags and not any(Tagged() in self.policy.rules(level) for level in LEVELS):
            held.append("tagged " + ", ".join(version.tags))
        if self.free is not None and version.id not in self.free:
            held.append("not in the other store yet")
        if version.damaged:
            held.append("damaged: repair it, or rm it")
        weights = version.roles.get("weights")
        if fate not in ("gone", "record") and not (weights and weights.logical):
            held.append("no tensors of role weights")
        if held:
            return version.level, [*held, *([] if fate == "gone" else reasons)]
        return fate, reasons

    def _keep_a_verified(self, fates: dict[str, tuple[Fate, list[str]]]) -> None:
        """Keep the newest verified version as it is, if no verified one would stay so."""
        sound = [v for v in self.versions if v.verified and v.level != "record"]
        if sound and not any(fates[v.id][0] == v.level for v in sound):
            chosen = ([v for v in sound if not v.abandoned] or sound)[-1]
            fates[chosen.id] = (chosen.level, ["the only verified one"])

    def _keep_a_full(self, fates: dict[str, tuple[Fate, list[str]]]) -> None:
        """Keep the newest complete version if a rollback left it for a head that is reduced."""
        full = [v for v in self.versions if v.level == "full" and not v.damaged]
        heads = [v for v in self.versions if v.id == self.head and v.level != "full"]
        if heads and full and full[-1].abandoned:
            fates[full[-1].id] = ("full", ["the newest complete one: the head is reduced"])

    def matched(self, level: Level) -> dict[str, list[str]]:
        """Return the versions that have a rule at a level, and which."""
        rivals = [v for v in self.versions if not v.abandoned]
        if level != "record":
            rivals = [v for v in rivals if v.level != "record" and not v.damaged]
        found: dict[str, list[str]] = {}
        for rule in self.policy.rules(level):
            among = rivals if isinstance(rule, CONTESTED) else self.versions
            for version_id in rule.chosen(among, self._view):
                found.setdefault(version_id, []).append(str(rule))
        return found
