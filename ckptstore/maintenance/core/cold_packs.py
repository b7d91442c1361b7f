"""Which packs cannot be read now, since they lie in an archive class and are not restored.

A listing tells the classes; only of packs in an archive class the state is asked for, by one
request each. On storage without classes nothing is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.cold import ColdStorage, ObjectState
from ckptstore.backends.storage_classes import class_named
from ckptstore.errors import ObjectNotFoundError
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.core.task_pool import at_once


def cold_packs(backend: Backend, packs: Iterable[tuple[str, ObjectInfo]]) -> set[str]:
    """Return the ids of packs that cannot be read unless they are restored.

    Parameters
    ----------
    packs
        Ids, and what a listing told of each.

    Raises
    ------
    StorageError
        The storage failed.
    """
    asked = [pack for pack, info in packs if class_named(info.storage_class).may_be_cold]
    cold = backend.cold_storage() if asked else None
    if cold is None:
        return set()
    found = states_of(backend, cold, asked)
    return {pack for pack, state in found.items() if state is not None and not state.is_readable}


def cold_rows(table: PieceTable, cold: Collection[str]) -> list[int]:
    """Return the rows of pieces that lie in some packs, or refer to what does."""
    if not cold or not any(pack in cold for pack in table.packs):
        return []
    lies = np.array([pack in cold for pack in table.packs])[table.pack]
    if table.base is not None:
        deltas = np.flatnonzero(table.base < len(table))
        lies[deltas] |= lies[table.base[deltas]]
    return [int(row) for row in np.flatnonzero(lies)]


def states_of(
    backend: Backend, cold: ColdStorage, packs: Sequence[str]
) -> Mapping[str, ObjectState | None]:
    """Return class and state of packs, by one request each; None for one that is gone.

    Raises
    ------
    StorageError
        The storage failed.
    """

    def ask(pack: str) -> ObjectState | None:
        """Return the state of one pack; None if it is gone."""
        try:
            return cold.restore_state(pack_key(pack))
        except ObjectNotFoundError:
            return None

    return dict(zip(packs, at_once(backend, ask, packs), strict=True))
