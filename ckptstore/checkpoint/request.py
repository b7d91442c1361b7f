"""The entry of a version in the catalog: its arguments, their check, and its commit."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ckptstore.catalog import run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import check_metrics
from ckptstore.catalog.state import Op
from ckptstore.checkpoint.content import content_digest
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.names import check_listed, encode_metadata
from ckptstore.manifests import relied_on
from ckptstore.model import RoleBytes
from ckptstore.objects.piece_writer import Written
from ckptstore.repo import Repo

NOWHERE: Final = ManifestPointer(key=manifest_key("0" * 32), stored_bytes=0, digest="0" * 64)
"""Where no manifest lies: for the trial that refuses bad names before a byte is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Arguments of a save by ranks or of one state: what the catalog says of the version."""

    run: str
    step: int
    directions: Mapping[str, str] = field(default_factory=dict)
    """Which way each metric gets better, for a run that is new."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    codec: str = "auto"
    derive: bool = True
    """Tensors that are another one, rounded, are stored as recipes."""

    def portable(self) -> WriteRequest:
        """Return these arguments alone, as values of their own that a pickle can hold.

        Raises
        ------
        InvalidInputError, LimitError
            A metric, or the metadata, is not accepted; or `tags` is a single text.
        """
        step = self.step
        if type(step) is not bool:
            with contextlib.suppress(Exception):  # what is no integer is refused with the rest
                step = operator.index(step)
        own = {each.name: getattr(self, each.name) for each in fields(WriteRequest)}
        return replace(
            WriteRequest(**own),
            step=step,
            directions=dict(self.directions),
            metrics=check_metrics(self.metrics),
            tags=tuple(check_listed(self.tags, "tags")),
            metadata=msgspec.json.decode(encode_metadata(self.metadata)),
        )


def check_wishes(catalog: Catalog, request: WriteRequest, *, version: str = "0" * 32) -> None:
    """Raise now what the commit would raise for a name, a metric, a tag, metadata or a step.

    Parameters
    ----------
    version
        The id that it is to have, if that is known.

    Raises
    ------
    InvalidInputError, LimitError
        One of them is not accepted.
    """
    _save_ops(catalog, request, version=version, manifest=NOWHERE, content="0" * 64)


def commit_version(
    repo: Repo,
    request: WriteRequest,
    manifest: Manifest,
    pointer: ManifestPointer,
    attempts: Sequence[Written],
    *,
    receipt: dict[str, float],
    began: float,
    blocked_since: float | None = None,
    visible_count: int | None = None,
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Make a version visible, whose packs and manifest are durable.

    Parameters
    ----------
    attempts
        What each try to save it has written; the manifest is of the last.
    receipt
        Gets the bytes, and the seconds of the commit.
    began
        When committing began, on the environment's clock.
    blocked_since
        When the caller began to wait, if it waits for all of this.
    visible_count
        How many of the tensors leaves name, the first so many; None for all.
    before_commit
        Called right before the operations are made.

    Raises
    ------
    CondemnedError
        A collection has condemned what the version needs.
    """
    roles = _role_bytes(manifest.tensors, attempts, visible_count=visible_count)
    sizes = roles.values()
    logical, new = sum(size.logical for size in sizes), sum(size.new for size in sizes)
    receipt["logical_bytes"] = float(logical)
    receipt["new_bytes"] = float(new)
    receipt["shared_bytes"] = float(logical - new)
    receipt["stored_bytes"] = float(sum(size.stored for size in sizes))
    found = {
        "version": manifest.version,
        "manifest": pointer,
        "content": content_digest(manifest),
        "roles": roles,
        "receipt": receipt,
        "relies_on": relied_on(pointer, manifest),
    }

    def clock() -> None:
        """Note how long it took up to now."""
        now = repo.environment.monotonic()
        receipt["committing_s"] = now - began
        if blocked_since is not None:
            receipt["blocked_s"] = now - blocked_since

    def build(now: Catalog) -> list[Op]:
        """Return the operations of the commit that follows a catalog."""
        before_commit()
        clock()
        return _save_ops(now, request, **found)

    try:
        repo.log.append(build)
    finally:
        clock()


def _save_ops(catalog: Catalog, request: WriteRequest, **found: Any) -> list[Op]:  # noqa: ANN401
    """Return the operations that make a version visible; `found` as in ``run_ops.save``."""
    return run_ops.save(
        catalog,
        run=request.run,
        step=request.step,
        directions=request.directions,
        metrics=request.metrics,
        tags=request.tags,
        metadata=request.metadata,
        **found,
    )


def _role_bytes(
    records: Sequence[TensorRecord],
    attempts: Sequence[Written],
    *,
    visible_count: int | None = None,
) -> dict[str, RoleBytes]:
    """Return logical, new and stored bytes by role; what was written twice is stored twice.

    Of a tensor that hidden ones stand for, as much is new as of those; one that is derived from a
    visible tensor has nothing new.

    Parameters
    ----------
    visible_count
        How many of the records leaves name, the first so many; None for all.
    """
    written, visible = attempts[-1], records[:visible_count]
    is_new = np.logical_or.reduce([part.is_new for part in attempts])
    stored_new = np.add.reduce([part.stored_new for part in attempts])
    counts = [last - first for first, last in pairwise(written.first)]
    by_piece = np.repeat(np.arange(len(records)), counts)
    raw = written.table.raw[: written.first[-1]].astype(np.float64)
    new = np.bincount(by_piece, raw * is_new, minlength=len(records)).astype(np.float64)
    stored = np.bincount(by_piece, stored_new, minlength=len(records))
    sums = {record.role: [0, 0, 0] for record in sorted(records, key=lambda one: one.role)}
    for place, record in enumerate(records):
        sums[record.role][2] += int(stored[place])
        if place < len(visible):
            sums[record.role][0] += record.nbytes
            sums[record.role][1] += _new_bytes(record, int(new[place]), records, new, len(visible))
    return {
        role: RoleBytes(logical=logical, new=new_bytes, stored=stored_bytes)
        for role, (logical, new_bytes, stored_bytes) in sums.items()
    }


def _new_bytes(
    record: TensorRecord,
    own: int,
    records: Sequence[TensorRecord],
    new: npt.NDArray[np.float64],
    visible_count: int,
) -> int:
    """Return how many bytes of a visible tensor are new."""
    if record.recipe is None:
        return own
    hidden = [place for place in record.recipe.sources if place >= visible_count]
    size = sum(records[place].nbytes for place in hidden)
    return round(record.nbytes * float(new[hidden].sum()) / size) if size else 0
