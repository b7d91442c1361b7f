"""Ageing: less of a version is kept: its weights only, then its record only. Torch-free.

No tensor is read or written. A new manifest names what stays, where it lies; one commit makes the
version point to it and condemns the old manifest, and what only that one named is a collection's
to free. A crash before the commit leaves an orphan, and the version as it was.

What the weights part is: the tensors of role ``weights``, as the roles were when they were saved;
and plain values, but those of a part of the state whose tensors all go, or which the conventions of
:mod:`ckptstore.format.roles` count to the optimizer, the generators or the data. A tensor that
the weights share with another part of the state stays with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.catalog import lifecycle_changes
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.lifecycle import LEVELS
from ckptstore.catalog.lifecycle_changes import Move
from ckptstore.catalog.retention import reclaimable
from ckptstore.checkpoint.content import Content, content_digest, read_content
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.checkpoint.parts import part_of
from ckptstore.encodings.encoding import Encoding
from ckptstore.errors import CondemnedError, InvalidInputError, PolicyError
from ckptstore.format import manifest as manifests
from ckptstore.format.commit import Op
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key, pack_key
from ckptstore.format.lifecycle import Level
from ckptstore.format.manifest import Manifest
from ckptstore.format.paths import Path
from ckptstore.format.roles import RoleRules
from ckptstore.format.skeleton import prune
from ckptstore.hashing import blake3_hex
from ckptstore.model import RoleBytes, Version
from ckptstore.ops.remove import Removal
from ckptstore.repo import Repo

__all__ = ["Target", "age", "foresee", "prepare", "relocating", "weights_part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How much of a version is to be kept, and how."""

    level: Level
    rounding: Encoding | None = None
    """What weights are rounded to, and how far they may change by it; None: they are not."""


def age(
    repo: Repo,
    cache: Manifests,
    versions: Sequence[Version],
    target: Target,
    *,
    force: bool = False,
) -> list[str]:
    """Keep less of versions, each in whole or not at all; return the ids of those that changed.

    Parameters
    ----------
    force
        Also tagged ones, and the head of a run, from which its training could then not go on.

    Raises
    ------
    PolicyError
        One is pinned; or tagged or the head, and `force` is False; or has no tensors of role
        ``weights``. Nothing was changed.
    CommitConflictError
        One was deleted or changed meanwhile.
    CorruptObjectError
        The manifest of one is damaged.
    """
    repo.check_writable()
    catalog = repo.refresh()
    chosen = _concerned(versions, target.level)
    for version in chosen:
        _check(catalog, version, target.level, force=force)
    for start in range(0, len(chosen), limits.RELOCATES_PER_COMMIT):
        part = chosen[start : start + limits.RELOCATES_PER_COMMIT]
        _commit(repo, cache, part, target, force=force)
    return [version.id for version in chosen]


def foresee(
    repo: Repo, versions: Sequence[Version], level: Level, *, force: bool = False
) -> list[Removal]:
    """Return the versions that :func:`age` would change, and what is in the way of each."""
    catalog = repo.refresh()
    found = []
    for version in _concerned(versions, level):
        obstacle = ""
        try:
            _check(catalog, version, level, force=force)
        except PolicyError as error:
            obstacle = error.message
        frees = reclaimable(version, level)
        found.append(Removal(version=version, obstacle=obstacle, reclaimable_bytes=frees))
    return found


def _concerned(versions: Sequence[Version], level: Level) -> list[Version]:
    """Return those of which more than this is kept, each once."""
    each = {version.id: version for version in versions}.values()
    return [version for version in each if LEVELS.index(level) < LEVELS.index(version.level)]


def _check(catalog: Catalog, version: Version, level: Level, *, force: bool) -> None:
    named = f"{version.run}@{version.step} (#{version.id[:8]})"
    now = catalog.version(version.id)
    if now.pinned:
        msg = f"{named} is pinned"
        raise PolicyError(msg, hint="unpin it first")
    if now.tags and not force:
        msg = f"{named} is tagged {', '.join(now.tags)}"
        raise PolicyError(msg, hint="take the tags away, or force it")
    if catalog.head_id(version.run) == version.id and not force:
        msg = f"{named} is the head of its run: training goes on from it"
        raise PolicyError(msg, hint="force it, if the run is over")
    if level != "record" and not any(r == "weights" and p.logical for r, p in now.roles.items()):
        msg = f"{named} has no tensors of role weights: nothing would be left"
        raise PolicyError(msg, hint="save with roles={PATTERN: 'weights'}")


def _commit(
    repo: Repo, cache: Manifests, versions: Sequence[Version], target: Target, *, force: bool
) -> None:
    for attempt in range(limits.CONDEMNED_TRIES_MAX):
        moves = [prepare(repo, cache, version, target) for version in versions]

        def build(now: Catalog, moves: Sequence[Move] = moves) -> list[Op]:
            for version in versions:
                _check(now, version, target.level, force=force)
            return relocating(now, moves)

        try:
            repo.log.append(build)
        except CondemnedError:  # a collection without patience took a new manifest for an orphan
            if attempt + 1 == limits.CONDEMNED_TRIES_MAX:
                raise
        else:
            return


def relocating(catalog: Catalog, moves: Sequence[Move]) -> list[Op]:
    """Return what carries moves out and condemns the manifests that they replace.

    Raises
    ------
    CommitConflictError, CondemnedError, PolicyError
        As :func:`ckptstore.catalog.lifecycle_changes.relocate`.
    """
    replaced = [catalog.version(move.version).manifest_key for move in moves]
    return [
        *lifecycle_changes.relocate(catalog, moves),
        *lifecycle_changes.condemn(catalog, replaced),
    ]


def prepare(repo: Repo, cache: Manifests, version: Version, target: Target) -> Move:
    """Write the manifest of what is to stay of a version, and return the move to it.

    Raises
    ------
    CorruptObjectError
        The version's manifest is damaged.
    StorageError
        The storage failed; nothing has changed.
    """
    if target.level == "record":
        return Move(
            version=version.id,
            based_on=version.manifest_digest,
            level=target.level,
            manifest=None,
            content=version.content,
        )
    if target.level != "weights":
        msg = f"a version does not age to {target.level!r}"
        raise InvalidInputError(msg, hint="weights, or record")
    part = weights_part(cache.load(version))
    data = manifests.encode(part)
    key = manifest_key(repo.environment.random_hex(16))
    repo.backend.put(key, data)
    pointer = ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data))
    return Move(
        version=version.id,
        based_on=version.manifest_digest,
        level=target.level,
        manifest=pointer,
        content=content_digest(part),
        roles=_roles(part, version.roles),
        relies_on=(key, *map(pack_key, part.pieces.packs)),
    )


def weights_part(manifest: Manifest) -> Manifest:
    """Return the manifest of what of a state is weights; see the module for what that is."""
    content = read_content(manifest)
    wanted, roles = _weights(content)
    return part_of(manifest, prune(content.node, wanted), roles=roles)


def _weights(content: Content) -> tuple[Callable[[Path], bool], dict[int, str]]:
    """Return which leaves are part of the weights, and tensors that take on their role."""
    paths = [leaf.path for leaf in content.leaves]
    by_index: dict[int, list[Path]] = {}
    for leaf in content.leaves:
        by_index.setdefault(leaf.index, []).append(leaf.path)
    firsts = [found[0] for found in by_index.values()]
    rules = RoleRules(flat=RoleRules.is_flat(firsts))
    kept: set[Path] = set()
    changed: dict[int, str] = {}
    for index, found in by_index.items():
        if content.manifest.tensors[index].role == "weights":
            # Further paths of a weight may lie in the optimizer, say; the first one decided.
            kept.update(p for p in found if p == found[0] or rules(p) in ("weights", "extra"))
        elif len(found) > 1 and any(rules(path) == "weights" for path in found):
            kept.update(path for path in found if rules(path) == "weights")
            changed[index] = "weights"
    gone = _prefixes(paths) - _prefixes(kept)
    tensors = set(paths)
    fate: dict[Path, bool] = {}

    def wanted(path: Path) -> bool:
        if path in tensors:
            return path in kept
        parent = path[:-1]
        if parent not in fate:
            fate[parent] = not any(parent[:length] in gone for length in range(1, len(path)))
        return fate[parent] and path not in gone and rules(path) in ("weights", "extra")

    return wanted, changed


def _prefixes(paths: Sequence[Path] | set[Path]) -> set[Path]:
    return {path[:length] for path in paths for length in range(1, len(path))}


def _roles(part: Manifest, before: Mapping[str, RoleBytes]) -> dict[str, RoleBytes]:
    """Return the bytes of what stays; what was new, and what that took, is as it was at most."""
    logical: dict[str, int] = {}
    for record in part.tensors:
        logical[record.role] = logical.get(record.role, 0) + record.nbytes
    none = RoleBytes(logical=0, new=0, stored=0)
    return {
        role: RoleBytes(
            logical=size,
            new=min(before.get(role, none).new, size),
            stored=before.get(role, none).stored,
        )
        for role, size in logical.items()
    }
