"""What several ranks wrote becomes visible, by one commit of the rank that has all parts.

Until then nothing is visible; after it everything is. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptstore.checkpoint.assemble import RankPart, assemble
from ckptstore.checkpoint.request import WriteRequest, commit_version
from ckptstore.errors import CondemnedError
from ckptstore.format.manifest import Manifest
from ckptstore.format.paths import Path, Pattern
from ckptstore.model import Version
from ckptstore.objects.piece_writer import Written
from ckptstore.repo import Repo


def commit_parts(
    repo: Repo,
    parts: Sequence[RankPart],
    paths: Mapping[str, Path],
    request: WriteRequest,
    *,
    roles: Mapping[Pattern, str],
    receipt: Mapping[str, float] | None = None,
) -> Version:
    """Put the parts together and commit them as a new version; every pack must be durable.

    What a collection condemned since the ranks looked is not written again: the ranks hold
    the bytes, and only they. The save fails as a whole, and the next one shares nothing of it.

    Raises
    ------
    StateError, InvalidInputError
        As :func:`~ckptstore.checkpoint.assemble.assemble`; or a name, metric or step is refused.
    CondemnedError
        A collection has taken what this save wrote or shared, or may have: this process knows the
        log from a snapshot on that is newer than what a rank looked at.
    StorageError
        The storage failed; no version appeared.
    AmbiguousWriteError
        It is not known whether the version is there.
    """
    environment = repo.environment
    began = environment.monotonic()
    version = environment.random_hex(16)
    _check_known(repo, parts)
    manifest, written = assemble(
        parts, paths, version=version, chunk_bytes=repo.superblock.chunk_bytes, roles=roles
    )
    pointer = repo.manifests.put(manifest, name=version)
    try:
        commit_version(
            repo,
            request,
            manifest,
            pointer,
            [written],
            receipt={**(receipt or {}), **_receipt(parts, written, manifest)},
            began=began,
        )
    except CondemnedError as error:
        raised = CondemnedError(
            f"a collection took what this save wrote or shared, while it went on: {error.message}",
            hint="save again; collect with a longer grace, or an age of orphans above a save's",
        )
        raised.keys = error.keys
        raise raised from error
    repo.manifests.keep(pointer.digest, manifest)
    return repo.log.catalog.version(version)


def _check_known(repo: Repo, parts: Sequence[RankPart]) -> None:
    """Raise if something may have been condemned, since a rank looked, that is not known here."""
    if not repo.log.opened:
        repo.refresh()
    looked = min((part.looked for part in parts), default=repo.log.began)
    if looked < repo.log.began:
        msg = (
            f"a rank looked at the store after commit {looked}, and what was collected up to commit"
            f" {repo.log.began} is not known here"
        )
        raise CondemnedError(msg, hint="save again: nothing was committed")


def _receipt(parts: Sequence[RankPart], written: Written, manifest: Manifest) -> dict[str, float]:
    """Return seconds and counts of all ranks; ``packs_s`` is the slowest rank's."""
    return {
        "packs_s": max(part.seconds for part in parts),
        **written.seconds,
        "pack_bytes": float(written.pack_bytes),
        "packs_count": float(written.packs_count),
        "tensors_count": float(len(manifest.tensors)),
        "ranks_count": float(len(parts)),
    }
