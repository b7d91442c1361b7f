"""Loading with ``torch.distributed.checkpoint``: each rank reads only the pieces it needs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptstore.backends.transfers import operation
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.chunking import in_batches
from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.skeleton import Node, iter_leaves
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.dcp.flat_version import Adapted, Entry, entries_of, metadata_of
from ckptstore.integrations.dcp.plain_bytes import pickled
from ckptstore.model import Version
from ckptstore.states.load import LoadRequest, load_state
from ckptstore.states.shared_load import SharedLoad
from ckptstore.store import Run, Store, resume_check
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.overlaps import overlaps_itself
from ckptstore.tensors.tensor_bytes import as_elements, dtype_named

_log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A version that is being loaded."""

    version: Version
    content: Content
    entries: dict[str, Entry]


class CkptStoreReader(StorageReader):
    """Reads any version with ``dcp.load``, onto any number of ranks and any layout; one a rank.

    Also versions that :meth:`ckptstore.Run.save` saved, or that were imported. Each rank reads the
    manifest, and only the pieces of packs that hold elements of its shards; every byte is checked.
    If ranks resolve a ref differently, all load the coordinator's version. A reader can be reused,
    by one thread at a time.

    Parameters
    ----------
    source
        A store, or a run of one.
    ref
        Names the version: ``"gpt@1200"`` of a store, ``"latest"`` or ``1200`` of a run; by default
        the run's newest. It may also come as `checkpoint_id` of each load; a store needs
        one of the two. ``latest-valid`` makes every rank read the whole
        version: resolve it on one rank, and give the others its id.
    adapters
        Adapters with which objects were saved.
    progress
        Called with the bytes that this rank has read.
    group
        A process group whose ranks read shared pieces once and send them to the others. All of its
        ranks take part in each load. If one fails, all raise its error. Nothing else may use the
        group meanwhile.

    Raises
    ------
    InvalidInputError
        `source` is neither.
    """

    def __init__(
        self,
        source: Store | Run,
        ref: str | int | None = None,
        *,
        adapters: Sequence[TypeAdapter] = (),
        progress: ProgressCallback = silent,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(source, Store):
            check_run(source)
        self._source = source
        self._session = source._session
        self._given = ref
        self._asked: str | None = None
        self._adapters = tuple(adapters)
        self._progress = progress
        self._group = group
        self._opened: _Opened | None = None
        self.checkpoint_id: str = ""
        """Id that the caller of the load passed, if any; for torch's log."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: another process would need a store of its own."""
        msg = "a reader cannot be sent to another process, since its store is open in this one"
        raise InvalidInputError(msg, hint="make one there")

    @property
    def version(self) -> Version | None:
        """The version that was loaded last; None before the first load."""
        return None if self._opened is None else self._opened.version

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Set the ref of the next load; torch calls it on every rank if there is one.

        Parameters
        ----------
        checkpoint_id
            A ref, of a run also as the writer takes it; None for the one that the reader was made
            with.
        """
        id_ = "" if checkpoint_id is None else checkpoint_id
        self.checkpoint_id = os.fspath(id_) if isinstance(id_, os.PathLike) else str(id_)
        self._asked = None if checkpoint_id is None else self.checkpoint_id
        if self._asked is not None and not isinstance(self._source, Store):
            self._asked = self._asked.removeprefix(f"{self._source.name}@")

    # Not ``**kwargs``: where torch finds that name, a rank whose first try fails retries
    # without the others, and those wait for it.
    def read_metadata(self, *_: Any, **_options: Any) -> Metadata:
        """Return the content of the version, by the names of planners; torch calls it on all ranks.

        Raises
        ------
        VersionNotFoundError, RunNotFoundError, InvalidRefError
            The ref names no version.
        InvalidInputError
            The ref is missing, and the reader is of a store, which has many runs.
        CorruptObjectError
            The manifest is damaged.
        """
        ref = self._given if self._asked is None else self._asked
        self._asked = None
        if not isinstance(self._source, Store):
            version = self._source.resolve("latest" if ref is None else ref)
        elif ref is None:
            msg = "the reader is of a store, and has no ref"
            raise InvalidInputError(msg, hint="name a run: RUN@latest, or give store.run('gpt')")
        else:
            version = self._source.resolve(str(ref))
        self._opened = self._open(version)
        return metadata_of(version, self._opened.entries)

    def _open(self, version: Version) -> _Opened:
        resume_check.chosen(self._session.repo, version.run, version=version.id)
        content = self._session.replicas.content(version)
        adapted = Adapted(self._adapters, lambda node: self._built(content, [node])[0])
        return _Opened(version=version, content=content, entries=entries_of(content, adapted))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take part in a load; torch calls it on every rank. There is nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Add the version, which every rank loads, to all plans; the coordinator calls it."""
        version = self._current().version
        decided = replace(version, metadata={}, metrics={}, receipt={}, roles={})
        return [replace(plan, storage_data=decided) for plan in plans]

    def _current(self) -> _Opened:
        if self._opened is None:
            raise InvalidInputError("no version is open in this reader: call read_metadata first")
        return self._opened

    @operation("load")
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items into the planner's tensors; complete on return.

        Raises
        ------
        CorruptTensorError
            A piece that this rank needs is damaged; names the tensor.
        TensorNotFoundError
            The coordinator's version is not this rank's, and differs in a planned item;
            or there are containers where the state has values.
        RankFailedError
            Another rank of the reader's group is gone.
        StorageError
            The storage failed.
        """
        group = self._group
        with nullcontext() if group is None else SharedLoad(group, alike=False) as together:
            found = self._current()
            if isinstance(plan.storage_data, Version):
                found = self._opened = self._agreed(plan, plan.storage_data, found)
            if together is not None:
                found = replace(found, content=together.shared(found.content))
            self._read(found, plan, planner, together)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(
        self, found: _Opened, plan: LoadPlan, planner: LoadPlanner, together: SharedLoad | None
    ) -> None:
        """Read the items of a plan."""
        values: Items = []
        tensors: Items = []
        for item in plan.items:
            entry = found.entries[item.storage_index.fqn]
            if entry.is_container and getattr(planner, "flatten_state_dict", False):
                if getattr(planner, "allow_partial_load", False):
                    continue
                msg = f"{item.storage_index.fqn!r} is a container in this version, and not a value"
                raise TensorNotFoundError(msg, hint="load it into a state of the same structure")
            direct = item.type is LoadItemType.TENSOR and entry.index is not None
            (tensors if direct else values).append((item, entry))
        _check_kept(plan, planner)
        room = self._session.repo.options.host_bytes
        parts = iter([tensors]) if together is None else in_windows(together, tensors, room)
        for part in parts:
            self._read_tensors(found, part, planner)
        self._read_values(found, values, planner)

    def _agreed(self, plan: LoadPlan, version: Version, mine: _Opened) -> _Opened:
        """Return the coordinator's version; it must have all items of this rank's plan."""
        if version.id == mine.version.id:
            return mine
        theirs = self._open(version)
        for item in plan.items:
            name = item.storage_index.fqn
            one, other = mine.entries[name], theirs.entries.get(name)
            if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
                both = f"#{mine.version.id[:8]} and #{version.id[:8]}"
                msg = f"ranks see different versions, {both}, which differ in {name!r}"
                raise TensorNotFoundError(msg, hint="name the version by its id or step")
        return theirs

    def _read_tensors(self, found: _Opened, items: Items, planner: LoadPlanner) -> None:
        """Read boxes of tensors; into the targets themselves if these are in host memory."""
        aims = (_aim(planner, item, entry) for item, entry in items)
        limit = self._session.repo.options.host_bytes
        for batch in in_batches(aims, lambda aim: aim.new_bytes, limit):
            self._read_batch(found.content, batch, planner)
            batch.clear()  # its memory is free before the next one is filled

    def _read_batch(self, content: Content, batch: Sequence[_Aim], planner: LoadPlanner) -> None:
        """Read boxes of tensors, and pass each tensor to the planner."""
        regions = []
        for aim in batch:
            offsets, out = tuple(aim.item.storage_offsets), as_elements(aim.memory)
            regions.append(Region(content=content, index=aim.record, offsets=offsets, out=out))
        repo, progress = self._session.repo, self._progress
        words: Any = {"options": repo.options, "progress": progress, "rounding": to_bfloat16}
        read_regions(regions, backend=repo.load_backend, **words)
        for item, _, target, memory in batch:
            if memory is not target:
                target.copy_(memory)
            planner.commit_tensor(item, target)

    def _read_values(self, found: _Opened, items: Items, planner: LoadPlanner) -> None:
        """Read plain values, views, and composed tensors, in batches by their bytes."""
        records, limit = found.content.manifest.tensors, self._session.repo.options.host_bytes

        def size(one: tuple[ReadItem, Entry]) -> int:
            return sum(records[leaf.index].nbytes for leaf in iter_leaves(one[1].node))

        for batch in in_batches(items, size, limit):
            values = self._built(found.content, [entry.node for _, entry in batch])
            for (item, _), value in zip(batch, values, strict=True):
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, pickled(value))
                    continue
                target = planner.resolve_tensor(item)
                _fill(target, value, item)
                planner.commit_tensor(item, target)

    def _built(self, content: Content, nodes: Sequence[Node]) -> list[Any]:
        """Return the objects of some nodes of a version."""
        node: Node = ["l", *nodes]
        part = replace(content, node=node, leaves=tuple(iter_leaves(node)), hidden=frozenset())
        request = LoadRequest(adapters=self._adapters)
        built: list[Any] = load_state(self._session.repo, part, request)
        return built

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id could be a ref."""
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta | None:
        """Return the loaded version, for logging."""
        if self._opened is None:
            return None
        version = self._opened.version
        return StorageMeta(checkpoint_id=f"{version.run}@{version.step}", load_id=version.id)


class _Aim(NamedTuple):
    """An item of a tensor, and where it goes."""

    item: ReadItem
    record: int
    """Its place in the manifest."""
    target: torch.Tensor
    memory: torch.Tensor
    """Host memory to read into: the target's own, if it has some."""

    @property
    def new_bytes(self) -> int:
        """Bytes of host memory that it takes beside the target."""
        return 0 if self.memory is self.target else self.memory.nbytes


def _aim(planner: LoadPlanner, item: ReadItem, entry: Entry) -> _Aim:
    """Return where an item is read to: the target's own memory, or new memory of its shape."""
    assert entry.index is not None  # noqa: S101  # for the type checker: that is how it was chosen
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        msg = f"{item.dest_index.fqn!r}: {list(item.lengths)} is read into {list(target.shape)}"
        raise InvalidInputError(msg)
    dtype = dtype_named(entry.dtype)
    plain = type(target) in (torch.Tensor, torch.nn.Parameter) and target.layout == torch.strided
    fits = plain and target.is_cpu and target.dtype == dtype and not target.is_conj()
    fits = fits and not target.is_neg() and not overlaps_itself(target)
    memory = target if fits else torch.empty(tuple(item.lengths), dtype=dtype, device="cpu")
    return _Aim(item, entry.index, target, memory)


def _check_kept(plan: LoadPlan, planner: LoadPlanner) -> None:
    """Warn of a planner of torch that puts plain values and dicts into a copy of the state."""
    flat = getattr(planner, "flatten_state_dict", True)
    names = [i.dest_index.fqn for i in plan.items if i.type is LoadItemType.BYTE_IO]
    if names and not flat and getattr(planner, "flatten_sharded_tensors", False):
        _log.warning(
            "%s of torch reads %s, and does not put it into the state -- give it "
            "flatten_sharded_tensors=False too",
            type(planner).__name__,
            ", ".join(map(repr, names[:5])),
        )


def _fill(target: torch.Tensor, value: torch.Tensor, item: ReadItem) -> None:
    """Copy an item's part of a tensor, by the copy operation of the tensor's class."""
    if value.is_quantized and (not target.is_quantized or not _has_scheme(target)):
        msg = f"{item.dest_index.fqn!r} is quantized, and cannot be read into a tensor that is not"
        raise InvalidInputError(msg, hint="give a quantized tensor, or load it with store.load")
    if tuple(item.lengths) != tuple(value.shape):
        box = zip(item.storage_offsets, item.lengths, strict=True)
        value = value[tuple(slice(start, start + size) for start, size in box)]
    with torch.no_grad():
        if target.layout not in (torch.strided, torch.sparse_coo) and target.layout == value.layout:
            target.resize_as_sparse_(value)  # copying wants as many elements as there are
        target.copy_(value)


def _has_scheme(tensor: torch.Tensor) -> bool:
    """Return whether a quantized tensor has a quantizer; one that was only allocated has none."""
    try:
        tensor.qscheme()
    except RuntimeError:
        return False
    return True


Items = list[tuple[ReadItem, Entry]]
_ROW = np.dtype([("index", "<i4"), ("nbytes", "<i8")])


def in_windows(together: SharedLoad, items: Items, room: int) -> Iterator[Items]:
    """Yield items of this rank in windows; the others yield the same tensors at the same time.

    A window has the tensors of which at least two ranks want a part, and at most the least `room`
    of bytes of each rank, or one tensor. The items of tensors that only this rank wants come last.
    """
    rows = [
        (entry.index, math.prod(item.lengths) * ITEM_BYTES[entry.dtype]) for item, entry in items
    ]
    mine = np.array([(-1, room), *rows], _ROW)
    count: dict[int, int] = {}
    most: dict[int, int] = {}
    for data in together.peers.gather(mine.tobytes()):
        theirs = np.frombuffer(data, _ROW)
        room, theirs = min(room, int(theirs["nbytes"][0])), theirs[1:]
        indices, where = np.unique(theirs["index"], return_inverse=True)
        sums = np.bincount(where, theirs["nbytes"], len(indices))
        for index, nbytes in zip(indices.tolist(), sums.tolist(), strict=True):
            count[index] = count.get(index, 0) + 1
            most[index] = max(most.get(index, 0), int(nbytes))
    shared = sorted(index for index, ranks in count.items() if ranks > 1)
    for window in in_batches(shared, most.__getitem__, room):
        wanted = set(window)
        yield [one for one in items if one[1].index in wanted]
        together.settle()
    rest = set(most) - set(shared)
    yield [one for one in items if one[1].index in rest]
