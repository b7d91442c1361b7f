"""What is left of a version at a level: its manifest, and what of it had to be written. Torch-free.

What the weights part is: the tensors of role ``weights``, as the roles were when they were saved;
and plain values, but those of a part of the state whose tensors all go, or which the conventions of
:mod:`ckptstore.format.roles` count to the optimizer, the generators or the data. A tensor that
the weights share with another part of the state stays with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptstore.backends.base import Backend, Buffer, ObjectWriter
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog.levels import Level
from ckptstore.checkpoint.content import Content, logical_bytes, read_content
from ckptstore.checkpoint.subset_manifest import part_of
from ckptstore.checkpoint.write import shareable
from ckptstore.encodings.encoding import Encoding
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.paths import Path
from ckptstore.format.roles import RoleRules
from ckptstore.format.skeleton import prune
from ckptstore.maintenance.retention.rewrite import Rewritten, needs_rewriting, rewrite
from ckptstore.maintenance.retention.rounding_report import Rounding
from ckptstore.model import RoleBytes, Version
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How much of a version is to be kept, and how."""

    level: Level
    encodings: tuple[Encoding, ...] = ()
    """What weights are rounded to, and how far they may change by it: the first that a tensor is
    within the bounds of. None: they stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """What is to stay of a version, of which more than the record is kept."""

    manifest: Manifest
    roles: dict[str, RoleBytes]
    rounding: Rounding | None
    """What became of its tensors; None if none had to be written."""
    reclaimable_bytes: int
    """Stored bytes that no longer have to be kept for it, less what was written. Below 0 where
    other versions go on to need what is replaced."""


def lower(
    repo: Repo,
    version: Version,
    target: Target,
    recent: list[PieceTable],
    *,
    backend: Backend | None = None,
) -> Lowered:
    """Return what is left of a version at a level above ``record``; packs for it are durable.

    Parameters
    ----------
    recent
        Where pieces lie that this process has written for others and not committed yet; those of
        this version are added.
    backend
        Where packs go; None for the store's.

    Raises
    ------
    CorruptObjectError
        The version's manifest is damaged.
    CorruptTensorError
        A tensor that has to be read is.
    StorageError
        The storage failed; nothing has changed.
    """
    held = repo.manifests.load(version)
    part = weights_part(held) if version.level == "full" else held
    rewritten = None
    if target.encodings or needs_rewriting(part):
        shared = [*recent, *_alike(repo, version, target.level)]
        keys = {pack_key(pack): pack for table in shared for pack in table.packs}
        gone = repo.catalog.gone(keys)
        rewritten = rewrite(
            repo,
            part,
            target.encodings,
            shared=shared,
            without=[keys[key] for key in gone],
            backend=backend,
        )
        recent.append(rewritten.manifest.pieces)
    manifest = part if rewritten is None else rewritten.manifest
    return Lowered(
        manifest=manifest,
        roles=_roles(manifest, version, rewritten),
        rounding=None if rewritten is None else rewritten.rounding,
        reclaimable_bytes=_reclaimable(version, rewritten),
    )


def weigh(repo: Repo, version: Version, target: Target, recent: list[PieceTable]) -> Lowered:
    """Return what :func:`lower` would, and keep nothing: all is read and encoded, nothing stored.

    Raises
    ------
    CkptStoreError
        As :func:`lower`.
    """
    return lower(repo, version, target, recent, backend=_Scales(repo.backend))


def _alike(repo: Repo, version: Version, level: Level) -> list[PieceTable]:
    """Return the pieces of the versions of the run next to one that are at a level, if any are."""
    before: Version | None = None
    after: Version | None = None
    for one in repo.catalog.versions(version.run):
        if one.id == version.id or one.level != level:
            continue
        if one.commit < version.commit:
            before = one
        elif after is None:
            after = one
    return [table for one in (before, after) if one is not None for table in shareable(repo, one)]


def _roles(
    manifest: Manifest, version: Version, rewritten: Rewritten | None
) -> dict[str, RoleBytes]:
    """Return the bytes of what stays; what was new, and what that took, is as it was at most."""
    none = RoleBytes(logical=0, new=0, stored=0)
    share = 1.0 if rewritten is None else rewritten.rounding.kept_share
    found = {}
    for role, size in logical_bytes(manifest).items():
        before = version.roles.get(role, none)
        more = none if rewritten is None else rewritten.new.get(role, none)
        found[role] = RoleBytes(
            logical=size,
            new=min(int(before.new * share) + more.new, size),
            stored=int(before.stored * share) + more.stored,
        )
    return found


def _reclaimable(version: Version, rewritten: Rewritten | None) -> int:
    """Return what goes of what the version had brought, less what was written."""
    weights = sum(part.stored for role, part in version.roles.items() if role == "weights")
    rest = sum(part.stored for part in version.roles.values()) - weights
    if rewritten is None:
        return rest
    return (
        rest + int(weights * (1 - rewritten.rounding.kept_share)) - rewritten.rounding.written_bytes
    )


class _Scales(WrapperBackend):
    """Reads from a store; takes packs, and keeps nothing of them."""

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that drops what it is given."""
        return _Nowhere()


class _Nowhere(ObjectWriter):
    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Drop it."""

    def commit(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""


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
        """Say whether a leaf stays; a plain one does unless a container of it loses all tensors."""
        if path in tensors:
            return path in kept
        parent = path[:-1]
        if parent not in fate:
            fate[parent] = not any(parent[:length] in gone for length in range(1, len(path)))
        return fate[parent] and path not in gone and rules(path) in ("weights", "extra")

    return wanted, changed


def _prefixes(paths: Sequence[Path] | set[Path]) -> set[Path]:
    return {path[:length] for path in paths for length in range(1, len(path))}
