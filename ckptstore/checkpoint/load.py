"""Loading: a version becomes a state, whole or in part, into new or existing tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore.checkpoint.content import Content
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.paths import PathFilter, Pattern
from ckptstore.format.skeleton import Node, prune
from ckptstore.objects.reader import Want, read_pieces
from ckptstore.repo import Repo
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.restore import MapLocation, Restorer

__all__ = ["LoadRequest", "Part", "load_state", "wants_of"]


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
    if request.include is not None or request.exclude is not None:
        node = prune(node, wanted)
        wanted.check_all_used()
    restorer = Restorer(
        node,
        content.manifest.tensors,
        adapters=request.adapters,
        map_location=request.map_location,
        into=request.into,
    )
    total = sum(content.manifest.tensors[index].nbytes for index in restorer.needed)
    done = 0
    for batch in restorer.batches(repo.options.host_bytes):
        destinations = {index: restorer.destination(index) for index in batch}
        wants: list[Want] = []
        for index, destination in destinations.items():
            wants.extend(wants_of(content, index, destination.view))
        read_pieces(
            content.manifest.pieces,
            wants,
            backend=repo.backend,
            options=repo.options,
            progress=_from(request.progress, done, total),
        )
        done += sum(content.manifest.tensors[index].nbytes for index in batch)
        for destination in destinations.values():
            destination.finish()
    return restorer.build()


def _from(progress: ProgressCallback, done: int, total: int) -> ProgressCallback:
    """Count on from what earlier batches have read."""
    return lambda step: progress(Progress(stage=step.stage, done=done + step.done, total=total))


def wants_of(content: Content, index: int, memory: memoryview | None) -> Iterator[Want]:
    """Yield what is to be read for one tensor.

    Parameters
    ----------
    memory
        The tensor's bytes in stored order; None to check the pieces only.
    """
    manifest = content.manifest
    at = 0
    for row in range(manifest.first[index], manifest.first[index + 1]):
        end = at + int(manifest.pieces.raw[row])
        out = None if memory is None else memory[at:end]
        yield Want(row=row, out=out, label=content.labels[index])
        at = end


class Part:
    """Some consecutive bytes of a tensor, to be read together with others.

    Parameters
    ----------
    start
        The first byte, in stored order.
    out
        Where they go; its length is how many are wanted.
    """

    def __init__(self, content: Content, index: int, start: int, out: memoryview) -> None:
        manifest = content.manifest
        self.wants: list[Want] = []
        """What must be read for them; whole pieces, some into memory of their own."""
        self._edges: list[tuple[memoryview, int]] = []
        self._start, self._out = start, out
        end = start + len(out)
        first, last = manifest.first[index], manifest.first[index + 1]
        ends = np.cumsum(manifest.pieces.raw[first:last], dtype=np.int64)
        row = first + int(np.searchsorted(ends, start, "right"))
        at = int(ends[row - first - 1]) if row > first else 0
        while at < end and len(out):
            size = int(manifest.pieces.raw[row])
            if start <= at and at + size <= end:
                memory = out[at - start : at - start + size]
            else:
                memory = memoryview(bytearray(size))
                self._edges.append((memory, at))
            self.wants.append(Want(row=row, out=memory, label=content.labels[index]))
            at += size
            row += 1

    def finish(self) -> None:
        """Bring what was read to where it goes; every want must have been read."""
        for memory, at in self._edges:
            low = max(at, self._start)
            high = min(at + len(memory), self._start + len(self._out))
            self._out[low - self._start : high - self._start] = memory[low - at : high - at]
