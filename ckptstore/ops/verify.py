"""Verify that everything the catalog names is there, and is what was written.

``records`` reads the log, every manifest and the size of every pack that a version needs;
``full`` reads every byte besides. A chunk that several versions share is read once. Nothing is
changed, and damage to one object never stops the check of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ckptstore.backends.base import ObjectInfo
from ckptstore.catalog import snapshots
from ckptstore.checkpoint.content import Content, read_content
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError, NotFoundError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format import pack as packs
from ckptstore.format.keys import SNAPSHOTS_PREFIX, pack_key, snapshot_number
from ckptstore.model import Version
from ckptstore.objects.reader import Want, read_pieces
from ckptstore.repo import Repo

__all__ = ["Level", "Problem", "VerifyReport", "verify"]

Level = Literal["records", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as it should be."""

    kind: str
    """Code of the error, as in ``CkptStoreError.kind``."""
    message: str
    version: str
    """Id of the version that it touches; empty for an object that no version needs to load."""
    run: str
    step: int
    """-1 without a version."""
    tensor: str
    """Path of the tensor that it touches; empty if it is the whole version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was checked and what was found."""

    level: Level
    versions_count: int
    packs_count: int
    chunks_count: int
    """Chunks that were read; 0 at level ``records``."""
    read_bytes: int
    """Bytes of tensors that were decoded and compared."""
    seconds: float
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether nothing was found."""
        return not self.problems

    @property
    def damaged_versions(self) -> tuple[str, ...]:
        """Return the ids of versions that do not load whole, each once."""
        return tuple(dict.fromkeys(p.version for p in self.problems if p.version))


@dataclass(slots=True)
class _Check:
    repo: Repo
    cache: Manifests
    level: Level
    progress: ProgressCallback
    problems: list[Problem] = field(default_factory=list)
    checked: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Pack, offset and inner offset of every piece read, with what is wrong with it."""
    packs: set[str] = field(default_factory=set)
    read_bytes: int = 0

    def found(self, error: CkptStoreError, version: Version | None, tensor: str = "") -> None:
        self.problems.append(
            Problem(
                kind=error.kind,
                message=error.message,
                version=version.id if version else "",
                run=version.run if version else "",
                step=version.step if version else -1,
                tensor=tensor,
            )
        )


def verify(
    repo: Repo,
    cache: Manifests,
    *,
    versions: Sequence[Version] | None = None,
    level: Level = "full",
    progress: ProgressCallback = silent,
) -> VerifyReport:
    """Check versions (all, if none are given) and report every problem.

    Raises
    ------
    StorageError
        The storage itself failed (permissions, retries used up): the check is not complete.
    CorruptObjectError
        The log is damaged; nothing above it can be trusted. The message names the commit.
    """
    began = repo.environment.monotonic()
    catalog = repo.refresh()
    check = _Check(repo=repo, cache=cache, level=level, progress=progress)
    if versions is None:
        _check_log(check)
        versions = list(catalog.versions())
    contents = _check_manifests(check, versions)
    sizes = {info.key: info for info in repo.backend.list("packs/")}
    for version, content in contents:
        _check_packs(check, version, content, sizes)
    if level == "full":
        _check_pieces(check, contents)
    return VerifyReport(
        level=level,
        versions_count=len(versions),
        packs_count=len(check.packs),
        chunks_count=len({key[:2] for key in check.checked}),
        read_bytes=check.read_bytes,
        seconds=repo.environment.monotonic() - began,
        problems=tuple(check.problems),
    )


def _check_log(check: _Check) -> None:
    """Read every commit again, not only those since the last snapshot; and the snapshots."""
    for _ in check.repo.log.commits():
        pass
    for info in check.repo.backend.list(SNAPSHOTS_PREFIX):
        try:
            if (number := snapshot_number(info.key)) is not None:
                snapshots.read_one(check.repo.backend, number)
        except (IntegrityError, FormatError, NotFoundError) as error:
            check.found(error, None)


def _check_manifests(check: _Check, versions: Iterable[Version]) -> list[tuple[Version, Content]]:
    contents = []
    for version in versions:
        try:
            contents.append((version, read_content(check.cache.load(version))))
        except (IntegrityError, FormatError) as error:
            check.found(error, version)
        check.progress(Progress(stage="manifests", done=len(contents), total=0, unit="versions"))
    return contents


def _check_packs(
    check: _Check, version: Version, content: Content, sizes: dict[str, ObjectInfo]
) -> None:
    """Check that packs are there and long enough; at level ``full`` also header and index."""
    table = content.manifest.pieces
    for place, pack in enumerate(table.packs):
        rows = np.nonzero(table.pack == place)[0]
        if not len(rows):
            continue
        info = sizes.get(pack_key(pack))
        ends = table.offset[rows] + table.stored[rows] + np.uint64(packs.CHUNK_HEADER_BYTES)
        if info is None:
            what = "is gone"
        elif info.size_bytes < int(ends.max()):
            what = f"has {info.size_bytes} bytes of at least {int(ends.max())}"
        else:
            what = ""
        if what:
            index = int(np.searchsorted(content.manifest.first, int(rows[0]), "right")) - 1
            msg = f"pack {pack} {what}; it holds pieces of {content.labels[index]} and others"
            check.found(IntegrityError(msg), version)
        elif check.level == "full" and pack not in check.packs and info is not None:
            _check_frame(check, version, pack, info)
        check.packs.add(pack)


def _check_frame(check: _Check, version: Version, pack: str, info: ObjectInfo) -> None:
    """Check header, index and trailer of a pack: what a rebuild would need, loads do not."""
    backend, key = check.repo.backend, pack_key(pack)

    def read(offset: int, size: int) -> bytes:
        memory = bytearray(size)
        backend.read_into(key, offset, [memoryview(memory)])
        return bytes(memory)

    try:
        packs.parse_header(read(0, packs.HEADER_BYTES), pack_id=pack)
        tail = read(max(0, info.size_bytes - packs.TRAILER_BYTES), packs.TRAILER_BYTES)
        offset, count, checksum = packs.parse_trailer(tail, pack_bytes=info.size_bytes, where=pack)
        index = read(offset, count * packs.INDEX_ROW_BYTES)
        packs.parse_index(index, checksum=checksum, offset=offset, where=pack)
    except (IntegrityError, FormatError, NotFoundError) as error:
        msg = f"{error.message} (needed to rebuild, not to load {version.run}@{version.step})"
        check.found(type(error)(msg), None)


def _check_pieces(check: _Check, contents: Sequence[tuple[Version, Content]]) -> None:
    total = sum(sum(r.nbytes for r in content.manifest.tensors) for _, content in contents)
    done = 0
    for version, content in contents:
        base = done
        table = content.manifest.pieces
        wants: list[Want] = []
        keys: dict[int, tuple[str, int, int]] = {}
        for index, label in enumerate(content.labels):
            for row in range(content.manifest.first[index], content.manifest.first[index + 1]):
                key = (
                    table.packs[int(table.pack[row])],
                    int(table.offset[row]),
                    int(table.inner[row]),
                )
                keys[row] = key
                if key not in check.checked:
                    check.checked[key] = ""
                    wants.append(Want(row=row, out=None, label=label))

        def failed(
            want: Want, error: CkptStoreError, keys: dict[int, tuple[str, int, int]] = keys
        ) -> None:
            check.checked[keys[want.row]] = error.message

        def step(progress: Progress, base: int = base) -> None:
            check.progress(Progress(stage="verify", done=base + progress.done, total=total))

        read_pieces(
            table,
            wants,
            backend=check.repo.backend,
            options=check.repo.options,
            progress=step,
            on_failure=failed,
        )
        check.read_bytes += sum(int(table.raw[want.row]) for want in wants)
        done += sum(record.nbytes for record in content.manifest.tensors)
        check.progress(Progress(stage="verify", done=done, total=total))
        _report(check, version, content, keys)


def _report(
    check: _Check, version: Version, content: Content, keys: dict[int, tuple[str, int, int]]
) -> None:
    """Report each tensor of a version that has a damaged piece, whoever met it first."""
    for index, label in enumerate(content.labels):
        rows = range(content.manifest.first[index], content.manifest.first[index + 1])
        wrong = [check.checked[keys[row]] for row in rows if check.checked[keys[row]]]
        if wrong:
            more = f" (and {len(wrong) - 1} more pieces)" if len(wrong) > 1 else ""
            check.found(IntegrityError(f"tensor {label}: {wrong[0]}{more}"), version, label)
