"""Packs in an archive class are restored: exactly those that a version, or a part of it, needs.

Stateless, as archiving is: which packs are cold, asked for, or readable is what the storage says.
A wait that was interrupted goes on with the next call, which asks for nothing twice.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckptstore import errors, limits
from ckptstore.argument_checks import check_between, integer
from ckptstore.backends.storage_classes import Access, ColdStorage, ObjectState, class_named
from ckptstore.catalog.retention import fixed_roles
from ckptstore.checkpoint.cold_reads import thaw_command
from ckptstore.checkpoint.selection import Selection, select
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.keys import pack_key
from ckptstore.maintenance.core.live_set import Footprint, Tally, states_of
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.maintenance.core.task_pool import at_once
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import Shown

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThawRequest:
    """Options of a thaw, besides the version."""

    selection: Selection = field(default_factory=Selection)
    """The part of it that is to be loaded."""
    days: int = limits.THAW_DAYS
    """Days for which it is to be readable."""
    tier: str = "Standard"
    """Speed and price by the storage's names: ``Expedited``, ``Standard`` or ``Bulk``."""
    wait: bool = False
    """Return when everything can be read."""
    poll_s: float | None = None
    """Seconds between two looks while waiting; None for the tier's own."""
    dry_run: bool = False
    """Ask for nothing."""
    progress: ProgressCallback = silent
    """Told the bytes that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ThawReport(Shown):
    """State of the packs of a version, or of the part of it that is asked for."""

    version: str
    """Its id."""
    dry_run: bool
    packs: Tally
    """All that are needed."""
    readable: Tally
    """Those of them that can be read now."""
    requested: Tally
    """Those that this call has asked for; with `dry_run`, would have."""
    restoring: Tally
    """Those that were asked for, by this call or before, and cannot be read yet."""
    tier: str
    days: int
    expected_s: tuple[float, float] | None = None
    """Usual duration in the tier from the request on, in seconds, from and to; None if nothing
    was asked for, or it is not known."""
    restored_until: float | None = None
    """When the first of the restored packs is cold again, in seconds since 1970."""
    for_good: bool = False
    """Restored packs stay readable: the storage moves them back, and `days` have no effect."""
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        """Return whether everything can be read."""
        return self.readable.count == self.packs.count


def thaw(repo: Repo, version: Version, request: ThawRequest) -> ThawReport:
    """Ask for the restore of what a version needs; return how far that is.

    On storage that needs no restore, everything is readable.

    Raises
    ------
    VersionNotFoundError
        Only the record of the version is kept.
    TensorNotFoundError, InvalidInputError
        A pattern, a role, the days or the tier is none.
    CorruptObjectError
        The manifest is damaged.
    ObjectNotFoundError
        A pack is gone.
    StorageError
        The storage failed, or does not restore what it was asked for.
    """
    began = repo.environment.monotonic()
    integer("days", request.days, 1, limits.THAW_DAYS_MAX)
    check_between("poll_s", 1 if request.poll_s is None else request.poll_s, 0.001)
    if version.level == "record":
        msg = f"only the record of {version.run}@{version.step} is kept"
        raise errors.VersionNotFoundError(msg, hint=_elsewhere(repo, version))
    fixed = fixed_roles(repo.catalog, version.run)
    manifest = repo.manifests.load(version)
    part = select(manifest, request.selection, version=version.id, fixed=fixed)
    packs = sorted(Footprint.of(part).packs)
    work = _Thawing(repo=repo, cold=repo.backend.cold_storage(), version=version, request=request)
    work.look(packs)
    work.ask()
    if request.wait and not request.dry_run:
        work.wait()
    return work.report(repo.environment.monotonic() - began)


@dataclass(slots=True, kw_only=True)
class _Thawing:
    """One call; owned by the calling thread."""

    repo: Repo
    cold: ColdStorage | None
    """None where everything can be read at any time."""
    version: Version
    request: ThawRequest
    states: dict[str, ObjectState] = field(default_factory=dict)
    """By pack."""
    asked: dict[str, int] = field(default_factory=dict)
    """Number of requests of this call for a pack."""
    expected_s: tuple[float, float] | None = None
    for_good: bool = False

    def look(self, packs: Sequence[str]) -> None:
        """Find out where some packs are and whether they can be read."""
        for pack, state in states_of(self.repo.backend, self.cold, packs).items():
            if state is None:
                where = f"{self.version.run}@{self.version.step}"
                msg = f"{pack_key(pack)}, which {where} needs, is gone"
                raise errors.ObjectNotFoundError(msg, hint="run ckptstore verify")
            self.states[pack] = state

    def ask(self) -> None:
        """Ask for cold packs, and for more days of those restored for fewer than wanted."""
        if self.cold is None:
            return
        cold, restored = self._packs("cold"), self._packs("restored")
        now_s = StorageTimes(self.repo).now_s() if restored else 0.0
        enough = now_s + (self.request.days - 1) * _DAY_S
        short = [
            pack
            for pack in restored
            if (until := self.states[pack].restored_until) is not None and until < enough
        ]
        for pack in cold:
            self._expect(self.states[pack].storage_class)
        if not self.request.dry_run:
            self._ask([*cold, *short])
        self.asked.update(dict.fromkeys(cold, 1))
        self._tell()

    def _expect(self, name: str) -> None:
        """Take a class into account in what the tier usually takes."""
        tiers, self.for_good = class_named(name).tiers, class_named(name).restored_for_good
        if tiers and self.request.tier not in tiers:
            msg = f"{name} is not restored by tier {self.request.tier!r}"
            raise errors.InvalidInputError(msg, hint="one of " + ", ".join(tiers))
        if tiers:
            low, high = tiers[self.request.tier]
            before = self.expected_s or (0.0, 0.0)
            self.expected_s = (max(low, before[0]), max(high, before[1]))

    def _ask(self, packs: Sequence[str]) -> None:
        """Request restores; if this is interrupted, the next call asks for the rest."""
        days, tier, cold = self.request.days, self.request.tier, self.cold
        if cold is None:
            return

        def request(pack: str) -> bool:
            return cold.request_restore(pack_key(pack), days=days, tier=tier)

        for pack, _ in zip(packs, at_once(self.repo.backend, request, packs), strict=True):
            state = self.states[pack]
            if state.access == "cold":
                self.states[pack] = replace(state, access="restoring", restored_until=None)

    def wait(self) -> None:
        """Look again and again until everything can be read, at a part of the packs each time."""
        poll_s = self.request.poll_s or self._poll_s()
        while waiting := self._packs("cold", "restoring"):
            part = waiting[: limits.THAW_POLL_PACKS]
            self.look(part)
            lapsed = [pack for pack in part if self.states[pack].access == "cold"]
            for pack in lapsed:
                self.asked[pack] = self.asked.get(pack, 0) + 1
                if self.asked[pack] > limits.THAW_REQUESTS_MAX:
                    msg = f"{pack_key(pack)} was asked for again and again, and is cold still"
                    hint = "look at the bucket's policies, or try later"
                    raise errors.StorageError(msg, hint=hint)
            self._ask(lapsed)
            self._tell()
            if any(not self.states[pack].is_readable for pack in part):
                self.repo.environment.sleep(poll_s)

    def _poll_s(self) -> float:
        low = self.expected_s[0] if self.expected_s else limits.THAW_POLL_MAX_S
        return min(max(low / 20, limits.THAW_POLL_MIN_S), limits.THAW_POLL_MAX_S)

    def _packs(self, *access: Access) -> list[str]:
        return [pack for pack, state in self.states.items() if state.access in access]

    def _tell(self) -> None:
        total = self._tally([*self.states]).size_bytes
        done = self._tally(self._packs("readable", "restored")).size_bytes
        detail = ""
        if self.expected_s and done < total:
            low, high = (f"{seconds / 3600:.2g}" for seconds in self.expected_s)
            detail = f"{self.request.tier} takes {low} to {high} h"
        self.request.progress(Progress(stage="thaw", done=done, total=total, detail=detail))

    def report(self, seconds: float) -> ThawReport:
        """Return the state of all packs."""
        until = [s.restored_until for s in self.states.values() if s.restored_until is not None]
        return ThawReport(
            version=self.version.id,
            dry_run=self.request.dry_run,
            packs=self._tally(list(self.states)),
            readable=self._tally(self._packs("readable", "restored")),
            requested=self._tally(list(self.asked)),
            restoring=self._tally(self._packs("restoring")),
            tier=self.request.tier,
            days=self.request.days,
            expected_s=self.expected_s,
            restored_until=min(until, default=None),
            for_good=self.for_good,
            seconds=seconds,
        )

    def _tally(self, packs: Sequence[str]) -> Tally:
        size = sum(self.states[pack].size_bytes for pack in packs)
        return Tally(count=len(packs), size_bytes=size)


def _elsewhere(repo: Repo, version: Version) -> str:
    """Return a hint for a version that this store keeps as a record alone."""
    for replica in repo.catalog.replicas.values():
        if replica.store in version.replicas:
            return thaw_command(version.id, replica.url)
    here = shlex.join(["ckptstore", "replicate", version.id[:12], "--to", repo.backend.url])
    return f"bring it back from a store that has it: {here} --store URL"
