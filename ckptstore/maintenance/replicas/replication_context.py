"""The two stores of a replication, and where in the target chunks of the source are likely."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptstore.backends.base import Backend
from ckptstore.backends.throttled import ThrottledBackend
from ckptstore.catalog.replica_ops import CHECKED_KEY, UNCHECKED_KEY
from ckptstore.engine.engine import Engine
from ckptstore.maintenance.replicas.copy_manifest import Copier, copier_between
from ckptstore.maintenance.replicas.known_near import nearest, newest_heads
from ckptstore.maintenance.replicas.orphan_packs import Orphans
from ckptstore.maintenance.replicas.replicate_report import ReplicateRequest
from ckptstore.model import Version
from ckptstore.objects.copy_tasks import SpreadCopy
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Source and target, and what is asked for."""

    source: Repo
    target: Repo
    request: ReplicateRequest
    spread: SpreadCopy | None = None
    """Who copies by tasks of an engine; None: threads of this process, without tasks."""
    orphans: Orphans | None = None
    """Finds what an interrupted copy left in the target; None looks for nothing."""

    @classmethod
    def of(
        cls,
        source: Repo,
        target: Repo,
        request: ReplicateRequest,
        engine: Engine | None = None,
    ) -> Sides:
        """Return both sides.

        Raises
        ------
        InvalidInputError
            Processes of the engine cannot reach one of the storages.
        """
        return cls(
            source=source,
            target=target,
            request=request,
            orphans=Orphans(target) if request.resume else None,
            spread=None
            if engine is None
            else SpreadCopy(
                engine=engine,
                source=engine.share_storage(source.backend),
                target=engine.share_storage(target.backend),
                options=target.options,
                bytes_per_s=request.bytes_per_s,
                check=request.check,
            ),
        )

    def copier(self) -> Copier:
        """Return who copies chunks to the target."""
        if self.spread is not None:
            return self.spread.copy
        source, check = self.source.backend, self.request.check
        return copier_between(source, self.backend(), self.target, check=check)

    def backend(self) -> Backend:
        """Return what chunks reach the target through: at the bandwidth that is allowed."""
        if not self.request.bytes_per_s:
            return self.target.backend
        return ThrottledBackend(
            self.target.backend,
            bytes_per_s=self.request.bytes_per_s,
            environment=self.target.environment,
        )


@dataclass(slots=True, kw_only=True)
class Near:
    """Finds the versions of the target that are likely to have chunks of one of the source."""

    sides: Sides
    heads: tuple[str, ...] = ()
    """Of the target's runs, as they were before: the newest."""
    _places: dict[str, int] = field(default_factory=dict)
    """Of versions in their runs of the source."""

    def note_heads(self) -> None:
        """Remember the newest heads of the target."""
        self.heads = tuple(newest_heads(self.sides.target.catalog))

    def of(self, version: Version, *, last: str) -> list[str]:
        """Return ids of the target's versions, the likeliest first.

        With what is to be checked, none that was not: what they hold may be anything.

        Parameters
        ----------
        last
            Id of the version that was copied just before; empty for none.
        """
        ids = self.sides.source.catalog.ids(version.run)
        if version.id not in self._places:
            self._places.update((one, place) for place, one in enumerate(ids))
        head = self.sides.target.catalog.head_id(version.run)
        near = nearest(ids, self._places[version.id], self._shares)
        others = filter(self._shares, (version.parent, last, head, *self.heads))
        itself = [version.id] if self._shares(version.id) else []
        return list(dict.fromkeys((*itself, *near, *others)))

    def _shares(self, version_id: str) -> bool:
        here = self.sides.target.catalog
        if not here.has_version(version_id):
            return False
        found = here.version(version_id)
        if found.deleted or found.damaged or found.level == "record":
            return False
        return read_back(found) or not self.sides.request.check


def read_back(version: Version) -> bool:
    """Return whether a store has saved a version itself, or has read back all that came of it.

    What was saved here, let go, and came back unchecked, is as unsure as what came from elsewhere.
    """
    if UNCHECKED_KEY in version.receipt:
        return False
    return not version.origin or CHECKED_KEY in version.receipt
