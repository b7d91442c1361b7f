"""Loading: a version becomes a state, whole or in part, into new or existing tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, read_ranges
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.chunking import in_batches
from ckptstore.collector_pause import collector_paused
from ckptstore.events import Counted, Progress, ProgressCallback, silent
from ckptstore.format.paths import PathFilter, Pattern
from ckptstore.format.skeleton import Node, prune
from ckptstore.repo import Repo
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.restore import MapLocation, Restorer

if TYPE_CHECKING:
    from ckptstore.states.shared_load import SharedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The arguments of a load."""

    include: Sequence[Pattern] | None = None
    """Patterns; a leaf must match one. None for all."""
    exclude: Sequence[Pattern] | None = None
    map_location: MapLocation = None
    into: object = None
    """A state whose tensors are filled in place."""
    adapters: Sequence[TypeAdapter] = ()
    progress: ProgressCallback = silent
    together: SharedLoad | None = None
    """The load of a group of ranks that this one is a part of."""


def load_state(repo: Repo, content: Content, request: LoadRequest, part: Node = None) -> Any:  # noqa: ANN401 - whatever was saved
    """Return the state of a version, every byte checked; with `part`, that part of its skeleton.

    Tensors are decoded straight into their memory. Host memory beyond the tensors themselves
    stays within ``options.host_bytes``.

    Raises
    ------
    TensorNotFoundError
        A pattern of `include` matches nothing.
    CorruptTensorError
        A piece is damaged; names the tensor. Tensors given as `into` may then hold anything.
    StorageError
        The storage failed.
    """
    node: Node = content.node if part is None else part
    if part is None and (request.include is not None or request.exclude is not None):
        wanted = PathFilter(request.include, request.exclude)
        node = prune(content.node, wanted, wanted.keys_below)
        if wanted.unused:
            prune(content.node, wanted)  # sees all names, to tell what was meant
        wanted.check_all_used()
    if request.together is not None:
        content = request.together.shared(content)
    with collector_paused():
        restorer = Restorer(
            node,
            content.manifest.tensors,
            adapters=request.adapters,
            map_location=request.map_location,
            into=request.into,
            leaves=content.leaves if node is content.node else None,
        )
    sizes = {index: content.manifest.tensors[index].nbytes for index in restorer.needed}
    total = sum(sizes.values()) + sum(part.nbytes for part in restorer.parts)
    count = Counted(request.progress, "read", total)
    stay = list(filter(restorer.stays, sizes))
    # Of the others torch rounds the pinned memory up to a power of two.
    moved = {n: 1 << (sizes[n] - 1).bit_length() for n in sizes.keys() - stay}
    moved_batches = in_batches(sorted(moved), moved.__getitem__, repo.options.host_bytes)
    for batch in filter(None, itertools.chain([stay], moved_batches)):
        read_records(repo, content, restorer, batch, progress=count.beyond())
        count.done += sum(map(sizes.__getitem__, batch))
    read_parts(repo, content, restorer)
    if restorer.parts:
        request.progress(Progress(stage="read", done=total, total=total))
    return restorer.build()


def read_records(
    repo: Repo,
    content: Content,
    restorer: Restorer,
    indices: Sequence[int],
    *,
    progress: ProgressCallback = silent,
) -> None:
    """Read some of the records that a restorer needs, and finish their tensors."""
    with collector_paused():
        destinations = [(index, restorer.destination(index)) for index in indices]
        ranges = [
            Range(index=n, start=0, nbytes=len(to.view), out=to.view) for n, to in destinations
        ]
    read_ranges(
        content,
        ranges,
        backend=repo.load_backend,
        options=repo.options,
        progress=progress,
        rounding=to_bfloat16,
    )
    for _, destination in destinations:
        destination.finish()


def read_parts(repo: Repo, content: Content, restorer: Restorer) -> None:
    """Read the parts that a restorer needs of records of which it needs no more."""
    for batch in in_batches(restorer.parts, lambda part: part.nbytes, repo.options.host_bytes):
        made = [(part, *part.memory()) for part in batch]
        regions = [
            Region(
                content=content, index=part.index, offsets=part.offsets, out=out, shape=part.shape
            )
            for part, _, out in made
        ]
        regions.sort(key=lambda region: region.index)
        read_regions(regions, backend=repo.load_backend, options=repo.options, rounding=to_bfloat16)
        for part, storage, _ in made:
            restorer.finish_part(part, storage)
