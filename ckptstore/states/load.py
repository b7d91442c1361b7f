"""Loading: a version becomes a state, whole or in part, into new or existing tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, read_ranges
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.paths import PathFilter, Pattern
from ckptstore.format.skeleton import Leaf, Node, prune
from ckptstore.repo import Repo
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.restore import MapLocation, Restorer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What the user asks for."""

    include: Sequence[Pattern] | None = None
    """Patterns of which a leaf must match one; None for all."""
    exclude: Sequence[Pattern] | None = None
    map_location: MapLocation = None
    into: object = None
    """A state whose tensors are filled in place."""
    adapters: Sequence[TypeAdapter] = ()
    progress: ProgressCallback = silent


def load_state(repo: Repo, content: Content, request: LoadRequest) -> Any:  # noqa: ANN401
    """Return the state of a version, every byte checked.

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
    wanted = PathFilter(request.include, request.exclude)
    node: Node = content.node
    leaves: Sequence[Leaf] | None = content.leaves
    if request.include is not None or request.exclude is not None:
        node, leaves = prune(node, wanted), None
        wanted.check_all_used()
    restorer = Restorer(
        node,
        content.manifest.tensors,
        adapters=request.adapters,
        map_location=request.map_location,
        into=request.into,
        leaves=leaves,
    )
    total = sum(content.manifest.tensors[index].nbytes for index in restorer.needed)
    done = 0
    for batch in restorer.batches(repo.options.host_bytes):
        destinations = {index: restorer.destination(index) for index in batch}
        read_ranges(
            content,
            [
                Range(index=index, start=0, nbytes=len(to.view), out=to.view)
                for index, to in destinations.items()
            ],
            backend=repo.backend,
            options=repo.options,
            progress=_from(request.progress, done, total),
            rounding=to_bfloat16,
        )
        done += sum(content.manifest.tensors[index].nbytes for index in batch)
        for destination in destinations.values():
            destination.finish()
    return restorer.build()


def _from(progress: ProgressCallback, done: int, total: int) -> ProgressCallback:
    """Count on from what earlier batches have read."""
    return lambda step: progress(Progress(stage=step.stage, done=done + step.done, total=total))
