"""Remembers from one collection to the next which packs live manifests name.

A collection with something to condemn reads every live manifest, whatever a record says. One that
finds nothing to do by the newest record reads only the manifests that came since. Loss, damage or
age of records change nothing but that: docs/design/0024-reference-records.md.
"""

from __future__ import annotations

import logging

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import CkptStoreError, ObjectNotFoundError
from ckptstore.format.keys import REFERENCES_PREFIX, is_references_key, references_key
from ckptstore.format.references import References, decode_references, encode_references
from ckptstore.maintenance.core.live_set import Reach
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")


class ReferenceCache:
    """The reference records of a store; owned by one collection."""

    def __init__(self, repo: Repo) -> None:
        self._repo = repo
        self._newest: References | None = None

    def read(self, catalog: Catalog, reach: Reach) -> References | None:
        """Return what the manifests live in `catalog` name, by the newest record.

        Manifests that it lacks are read. None if there is no sound record, or one of a manifest
        that is not live any more: what else named its packs is not known then.

        Raises
        ------
        CorruptObjectError, UnsupportedFeatureError, StorageError
            As :meth:`ckptstore.maintenance.core.live_set.Reach.of`.
        """
        known = self._newest = self._read_newest()
        live = {details.manifest_digest for _, details in reach.contents(catalog)}
        if known is None or not known.manifests <= live:
            return None
        new = reach.by_manifest(catalog, without=known.manifests)
        packs = dict(known.packs)
        for need in new.values():
            for pack, chunks in zip(need.packs, need.chunks, strict=True):
                packs[pack] = max(chunks.size_bytes, packs.get(pack, 0))
        return References(
            manifests=known.manifests | new.keys(),
            packs=packs,
            # A collection that looked at new deltas may have stopped before it wrote a record.
            deltas_settled=known.deltas_settled and not any(need.deltas for need in new.values()),
        )

    def write(self, references: References, number: int) -> None:
        """Write a record in place of all others, unless it is the one that was read; never raises.

        Parameters
        ----------
        number
            The newest commit: of several records the one with the highest counts.
        """
        if references == self._newest:
            return
        backend = self._repo.backend
        try:
            data = encode_references(references)
            older = self._keys()
            backend.put(references_key(number, self._repo.environment.random_hex(4)), data)
            for key in older:
                backend.delete(key)
        except CkptStoreError as error:
            _log.debug("could not write a reference record: %s", error)

    def _read_newest(self) -> References | None:
        try:
            for key in self._keys()[-1:]:
                data = self._repo.backend.get(key, bytes_max=limits.REFERENCES_BYTES_MAX)
                return decode_references(data, where=key)
        except ObjectNotFoundError:
            return None  # another collection has just replaced it
        except CkptStoreError as error:
            _log.warning("skipped a reference record, manifests are read instead: %s", error)
        return None

    def _keys(self) -> list[str]:
        """Return the keys of all records, the newest last."""
        infos = self._repo.backend.list(REFERENCES_PREFIX)
        return sorted(info.key for info in infos if is_references_key(info.key))


def gathered(catalog: Catalog, reach: Reach, *, settled: frozenset[bytes] | None) -> References:
    """Return what those manifests name that are live in `catalog` and were read.

    Parameters
    ----------
    settled
        Digests of manifests with no delta to store by itself, as long as all of them are live.
        None: there may be such deltas.
    """
    needs = reach.by_manifest(catalog, read=False)
    deltas = {digest for digest, need in needs.items() if need.deltas}
    return References(
        manifests=frozenset(needs),
        packs={pack: chunks.size_bytes for pack, chunks in reach.chunks(catalog, read=False)},
        # A version that came or went since may have brought deltas, or needed a base as it is.
        deltas_settled=settled is not None and (not deltas or (deltas <= settled <= needs.keys())),
    )
