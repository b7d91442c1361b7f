"""What two catalogs say of each other: records, metrics, tags, heads, and who has what."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from ckptstore.catalog import replica_ops, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.levels import LEVELS
from ckptstore.catalog.state import Op
from ckptstore.errors import CkptStoreError
from ckptstore.maintenance.replicas.remote_pins import Pins
from ckptstore.maintenance.replicas.replication_context import Sides, read_back
from ckptstore.model import Version

_log = logging.getLogger("ckptstore")

# Records whose operations are made at once: a commit takes no more of them.
_RECORDS_AT_ONCE = 256


def begin(sides: Sides, run: str) -> None:
    """Make the first commit of an empty target: a run.

    A copy that dies before its own first commit leaves a manifest; in a store without any commit
    this would look like a log that was lost.
    """
    ways = sides.source.catalog.run(run).metrics

    def build(now: Catalog) -> list[Op]:
        return run_ops.ensure_run(now, run, ways) if not now.number else []

    sides.target.log.append_any(build)


def bring_records(sides: Sides, records: Sequence[Version]) -> None:
    """Make versions known in the target, without their content.

    Parameters
    ----------
    records
        In the order of their commits, each after its parent, unless that is there already.
    """
    source = sides.source
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        batch = records[start : start + _RECORDS_AT_ONCE]

        def build(now: Catalog, batch: Sequence[Version] = batch) -> list[Op]:
            """Return what of the batch is not known yet, as far as one commit holds it."""
            return replica_ops.fitting(
                replica_ops.arrive(
                    now, source.catalog, batch, store=source.superblock.store_id, arrivals={}
                )
            )

        while sides.target.log.append_any(build) is not None:
            pass


def follow(sides: Sides, runs: Sequence[str]) -> None:
    """Bring metrics, tags and heads of runs to where the source has them.

    As many commits as it takes; each decides anew on the catalog that it follows.
    """
    before = sides.source.catalog
    store = sides.source.superblock.store_id

    def build(now: Catalog) -> list[Op]:
        return replica_ops.fitting(replica_ops.follow(now, before, runs, store=store))

    while sides.target.log.append_any(build) is not None:
        pass


def note(sides: Sides, copied: Iterable[str], present: Iterable[str]) -> str:
    """Say in the source's catalog what the target has; return why that cannot be, or "".

    Of what was there already only what is known to have been read back there, or was first saved
    there, is not damaged, and of which the target keeps as much.
    """
    source, store = sides.source, sides.target.superblock.store_id
    came = list(copied)
    ids = [one for one in (*came, *present) if _is_sound(sides, one)]
    pins = Pins(here=sides.target, there=source)
    back = [one for one in came if one in ids and pins.has(one)]
    if not (back or replica_ops.replicated(source.catalog, ids, store)):
        return ""
    try:
        source.check_writable()
        while source.log.append_any(lambda now: replica_ops.replicated(now, ids, store)):
            pass
        pins.take_away(back)  # the target has let them go, and has them again
    except CkptStoreError as error:
        _log.warning("%s does not say who has its versions: %s", source.url, error)
        return str(error)
    return ""


def _is_sound(sides: Sides, version_id: str) -> bool:
    there = sides.target.catalog.version(version_id)
    here = sides.source.catalog.version(version_id)
    as_much = LEVELS.index(there.level) >= LEVELS.index(here.level)
    return as_much and read_back(there) and not (there.damaged or there.deleted)
