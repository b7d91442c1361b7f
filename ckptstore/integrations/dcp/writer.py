"""Saving with ``torch.distributed.checkpoint``: each rank writes packs, one commit covers all.

The default planner gives a replica to the rank with the least so far, in the order of the state,
and counts a shard as large as its whole tensor. Here each rank first lists the items that it could
write, and the coordinator gives shared ones to the rank with the least, the largest first. Values
that are no tensors stay with the first rank that has them, since they may differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.backends.transfers import operation
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.refs import parse_ref
from ckptstore.checkpoint.assemble import RankPart, commit_parts
from ckptstore.checkpoint.request import WriteRequest, check_wishes
from ckptstore.checkpoint.write import shareable
from ckptstore.config import Options, check_choice
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.manifest import PieceTable
from ckptstore.format.names import check_listed, encode_metadata
from ckptstore.format.paths import Path, Pattern
from ckptstore.hashing import blake3_digest
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.dcp.flat_version import PLANNERS_OWN, set_version
from ckptstore.integrations.dcp.plain_bytes import from_planner
from ckptstore.model import Version
from ckptstore.repo import open_on
from ckptstore.states.shards import Shard, is_box, write_part
from ckptstore.store import Run, Store, resume_check
from ckptstore.tensors.adapters import TypeAdapter

_PART: Final = "ckptstore.part"


class CkptStoreWriter(StorageWriter):
    """Writes a version of a run with ``dcp.save`` or ``dcp.async_save``; one on each rank.

    Each rank writes its items into packs, and shares the chunks that the run's head has already.
    Items on several ranks are written once. The coordinator commits when all have written. If any
    rank fails, all raise ``CheckpointException`` (of torch) with the ranks and their errors, and
    there is no version.

    :meth:`ckptstore.Store.load` returns the state nested, with whole tensors;
    :class:`CkptStoreReader` loads it at any number of ranks. Nothing is pickled: other values are
    stored as by :meth:`ckptstore.Run.save`, and so are quantized and sparse tensors and tensor
    subclasses, which one rank must hold whole.

    A writer can be reused, for one save at a time.

    Parameters
    ----------
    run
        The run, of a store that this rank has opened.
    step
        Training step. It may also come as `checkpoint_id` of each save: ``"1200"``.
    metrics, tags, metadata, roles, codec, adapters
        As in :meth:`ckptstore.Run.save`; those of the coordinator count, but `codec`, `adapters`
        and `share` are each rank's own.
    share
        Share chunks with the run's head, whose manifest this rank then reads: 87 MB for 10 TB.
        False writes all chunks again.
    retain
        As in :meth:`ckptstore.Run.save`; of the coordinator.
    progress
        Called with the bytes done by this rank.

    Raises
    ------
    InvalidInputError
        `run` is no run of a store.
    """

    def __init__(
        self,
        run: Run,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        roles: Mapping[Pattern, str] | None = None,
        codec: str | None = None,
        adapters: Sequence[TypeAdapter] = (),
        share: bool = True,
        retain: bool | None = None,
        progress: ProgressCallback = silent,
    ) -> None:
        check_run(run)
        self._run = run
        self._session = run._session
        self._repo = self._session.repo
        self._step = step
        self._asked: int | None = None
        self._saved_step = step
        self._metadata = dict(metadata or {})
        self._wishes: dict[str, Any] = {
            "metrics": dict(metrics or {}),
            "tags": tuple(check_listed(tags, "tags")),
            "codec": check_choice(codec or self._repo.options.codec),
        }
        self._roles = dict(roles or {})
        self._adapters = tuple(adapters)
        self._share = share
        self._retain = run._retains if retain is None else retain
        self._progress = progress
        self._began = 0.0
        self.checkpoint_id: str | os.PathLike[str] = ""
        """Id that the caller of the save passed, if any; for torch's log."""
        self.version: Version | None = None
        """The version of the last save, on the coordinator. Every rank finds its id in the result
        of ``dcp.save``: ``metadata.storage_meta.save_id``."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle for another process (``AsyncCheckpointerType.PROCESS``), which opens the store."""
        words = {
            **self._wishes,
            "step": self._step,
            "metadata": self._session.metadata(self._run.name, self._metadata),
            "roles": self._roles,
            "adapters": self._adapters,
            "share": self._share,
            "retain": self._retain,
        }
        store = (self._repo.backend, self._repo.options)
        run = (self._run.name, dict(self._run._directions))
        resumed = resume_check.is_chosen(self._repo, self._run.name)
        return _in_another_process, (store, run, resumed, words)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the step of the next save; torch calls it on every rank if there is one.

        Parameters
        ----------
        checkpoint_id
            A step, or ``run@step`` of this run; None for the step that the writer was made with.

        Raises
        ------
        InvalidInputError
            The id is neither, or contradicts the writer's.
        """
        self.checkpoint_id = "" if checkpoint_id is None else checkpoint_id
        self._asked = None
        if checkpoint_id is None:
            return
        step = _step_of(checkpoint_id, self._run.name)
        if self._step is not None and step != self._step:
            msg = f"checkpoint_id is {str(checkpoint_id)!r}, but the writer is of {self._step}"
            raise errors.InvalidInputError(msg)
        self._asked = step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check early whether this rank could save; torch calls it on every rank.

        Raises
        ------
        InvalidInputError
            A name, metric or step is not accepted; ``use_collectives=False`` is given; or the
            run has no policy to retain by.
        ReadOnlyError, UnsafeBackendError
            The store cannot be written to.
        """
        self._began = self._repo.environment.monotonic()
        self.version = None
        self._saved_step = self._step if self._asked is None else self._asked
        self._asked = None
        if not kwargs.get("use_collectives", True):
            msg = "use_collectives=False is refused: a version needs one commit by one rank"
            raise errors.InvalidInputError(msg)
        self._repo.check_open()
        if self._repo.options.read_only:
            raise errors.ReadOnlyError(f"{self._repo.url} was opened read-only")
        request = self._request()
        if is_coordinator:
            self._repo.check_writable()
            self._repo.refresh()
            check_wishes(self._repo.catalog, request)
            if self._retain:
                self._run._check_policy(self._repo.catalog)

    def _request(self) -> WriteRequest:
        if self._saved_step is None:
            msg = "the writer has no step"
            hint = "CkptStoreWriter(run, step=...), or checkpoint_id"
            raise errors.InvalidInputError(msg, hint=hint)
        return WriteRequest(
            run=self._run.name,
            step=self._saved_step,
            directions=self._run._directions,
            metadata=self._session.metadata(self._run.name, self._metadata),
            **self._wishes,
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank's items to its plan, before replicas are given to other ranks."""
        return dataclasses.replace(plan, storage_data=offers(plan.items))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Distribute items that several ranks hold; torch calls it on the coordinator."""
        return balance(plans)

    @operation("save")
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into packs; they are durable when this returns.

        Raises
        ------
        StateError
            An item cannot be represented; names it. Nothing of this rank was written.
        LimitError
            An item is nested too deep; names it. Nothing of this rank was written.
        StorageError
            The storage failed.
        """
        shards: list[Shard] = []
        values: dict[str, object] = {}
        for item in plan.items:
            name: object = item.index.fqn
            if not isinstance(name, str):
                msg = f"the planner gives the key {name!r} as a name, which must be text"
                raise errors.StateError(msg, hint="use text as keys, or flatten_state_dict=True")
            if item.type is WriteItemType.BYTE_IO:
                values[name] = from_planner(planner, item)
                continue
            tensor = _tensor(item, planner)
            data = item.tensor_data
            whole = data is not None and tuple(data.chunk.sizes) == tuple(data.size)
            if is_box(tensor) or not whole:
                shards.append(_shard(item, tensor))
            else:  # a composed tensor is stored like a value
                values[name] = tensor
        catalog = self._repo.refresh()
        part = write_part(
            self._repo,
            shards,
            values,
            paths=_paths(plan.planner_data, [item.index.fqn for item in plan.items]),
            shared=self._shared(catalog),
            looked=catalog.number,
            codec=self._wishes["codec"],
            adapters=self._adapters,
            progress=self._progress,
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(_PART), part.written.pack_bytes, part)])
        return future

    def _shared(self, catalog: Catalog) -> list[PieceTable]:
        """Return the pieces of the run's head, as this rank sees it.

        Ranks may see different heads. That costs sharing at most: on commit the coordinator
        checks that no shared object was condemned.
        """
        if not self._share:
            return []
        run = self._run.name
        return shareable(self._repo, catalog.head(run) if catalog.has_run(run) else None)

    @operation("save")
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the version; torch calls it on the coordinator, once all ranks have written.

        Raises
        ------
        StateError
            The ranks did not write the whole state; or the planner's metadata cannot be stored.
        CondemnedError
            A collection condemned written or shared objects during the save: save again.
        StorageError
            The storage failed; no version appeared.
        """
        told = [result.storage_data for rank in results for result in rank]
        parts = [one for one in told if isinstance(one, RankPart)]
        if len(parts) != len(results):
            msg = f"{len(results)} ranks took part, and {len(parts)} say that they wrote"
            raise errors.StateError(msg)
        request = self._request()
        own = _planners_own(metadata)
        if own:
            request = dataclasses.replace(request, metadata={**request.metadata, PLANNERS_OWN: own})
        waited = self._repo.environment.monotonic() - self._began
        self.version = commit_parts(
            self._repo,
            parts,
            _paths(metadata.planner_data, metadata.state_dict_metadata),
            request,
            roles=self._roles,
            receipt={"ranks_s": waited},
        )
        done = self.version
        resume_check.saved(self._repo, done.run, done.step, done.id)
        self._session.tell_durable(done)
        metadata.storage_meta = StorageMeta(f"{done.run}@{done.step}", save_id=done.id)
        set_version(metadata)
        if self._retain:
            self._run._retain_after_save()

    def storage_meta(self) -> StorageMeta | None:
        """Return the storage information for planners: the run and the step."""
        step = self._step if self._asked is None else self._asked
        return StorageMeta(checkpoint_id=f"{self._run.name}@{step}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id is a step, or a ref with one."""
        try:
            _step_of(checkpoint_id, "")
        except errors.InvalidInputError:
            return False
        return True


def _in_another_process(
    store: tuple[Backend, Options], run: tuple[str, dict[str, str]], resumed: bool, words: Any
) -> CkptStoreWriter:
    """Return a writer on a store that is opened here, and closed when the process ends."""
    (backend, options), (name, directions) = store, run
    opened = Store(open_on(backend, options=options))
    if resumed:
        resume_check.chosen(opened.repo, name)
    return CkptStoreWriter(opened.run(name, metrics=directions), **words)


def _step_of(checkpoint_id: str | os.PathLike[str] | int, run: str) -> int:
    """Return the step in a checkpoint id: ``1200``, or ``run@1200``."""
    text = str(checkpoint_id) if isinstance(checkpoint_id, int) else os.fspath(checkpoint_id)
    hint = "checkpoint_id is the step: '1200', or 'run@1200'"
    try:
        ref = parse_ref(text, run=run or "run") if "@" not in text else parse_ref(text)
    except errors.InvalidRefError as error:
        raise errors.InvalidInputError(f"{text!r} is no step", hint=hint) from error
    if ref.kind != "step" or (run and ref.run != run):
        raise errors.InvalidInputError(f"{text!r} is no step of the run {run!r}", hint=hint)
    return ref.number


def _tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor that a planner has for an item, of the size that is in the plan."""
    tensor = planner.resolve_data(item)
    data = item.tensor_data
    if not isinstance(tensor, torch.Tensor) or data is None:
        msg = f"the planner gives a {type(tensor).__name__} for the tensor {item.index.fqn!r}"
        raise errors.StateError(msg)
    if tuple(tensor.shape) != tuple(data.chunk.sizes):
        here, planned = list(tensor.shape), list(data.chunk.sizes)
        raise errors.StateError(f"{item.index.fqn!r} is {here} here, but {planned} in the plan")
    return tensor


def _shard(item: WriteItem, tensor: torch.Tensor) -> Shard:
    name, data = item.index.fqn, item.tensor_data
    assert data is not None  # noqa: S101  # for the type checker: _tensor has looked
    if not is_box(tensor):
        msg = f"{name!r} is a part of a tensor, whose elements are in a {type(tensor).__name__}"
        hint = "only a whole tensor of this kind can be kept: replicate it, or use full_state_dict"
        raise errors.StateError(msg, hint=hint)
    shape, offsets = tuple(data.size), tuple(data.chunk.offsets)
    return Shard(name=name, shape=shape, offsets=offsets, tensor=tensor)


def _paths(planner_data: object, names: Iterable[str]) -> dict[str, Path]:
    """Return the path in the state of each name, in the order of the state."""
    mapping = planner_data if isinstance(planner_data, Mapping) else {}
    wanted = dict.fromkeys(names)
    found = {n: tuple(path) for n, path in mapping.items() if n in wanted and _is_path(path)}
    return {**found, **{name: (name,) for name in wanted if name not in found}}


def _is_path(value: object) -> bool:
    return isinstance(value, tuple | list) and bool(value)


def _planners_own(metadata: Metadata) -> dict[str, Any]:
    """Return a planner's own entries in the metadata, without the paths of names.

    Raises
    ------
    StateError
        A value is not plain JSON; names it.
    """
    standard = {field.name for field in dataclasses.fields(metadata)}
    own = {name: value for name, value in vars(metadata).items() if name not in standard}
    data = metadata.planner_data
    if isinstance(data, Mapping):
        names = metadata.state_dict_metadata
        data = {name: one for name, one in data.items() if name not in names or not _is_path(one)}
    if data is not None and data != {}:
        own["planner_data"] = data
    for name, value in own.items():
        try:
            kept = json.loads(encode_metadata({name: value})) == {name: value}
        except errors.CkptStoreError:
            kept = False
        if not kept:
            msg = f"the planner put {name} into the metadata, which is no plain JSON"
            hint = "give it dicts with text as keys, lists, text and numbers"
            raise errors.StateError(msg, hint=hint)
    return own


_MARK_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Offers:
    """Items that a rank holds, before the coordinator distributes them; sent with its plan."""

    marks: bytes
    """8 bytes an item: the beginning of a digest of its name and offsets. Two items of one mark
    could be mistaken for each other: a rank would refuse an item that it lacks, and the save
    fail."""


def offers(items: Iterable[WriteItem]) -> Offers:
    """Return the items of a local plan."""
    return Offers(b"".join(_mark(item) for item in items))


def _mark(item: WriteItem) -> bytes:
    offset = item.index.offset
    text = f"{item.index.fqn}\0{None if offset is None else tuple(offset)}"
    return blake3_digest(text.encode("utf-8", "surrogatepass"))[:_MARK_BYTES]


def balance(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans with each item that several ranks hold at only one of them.

    Plans stay unchanged if the planner keeps them for later saves: it would then
    combine decisions of its own with some of these.
    """
    if _kept_by_planner(plans) or not all(isinstance(p.storage_data, Offers) for p in plans):
        return list(plans)
    holders: dict[bytes, list[int]] = {}
    for rank, plan in enumerate(plans):
        marks = plan.storage_data.marks
        for at in range(0, len(marks), _MARK_BYTES):
            holders.setdefault(marks[at : at + _MARK_BYTES], []).append(rank)
    loads = [0] * len(plans)
    chosen: list[list[WriteItem]] = [[] for _ in plans]
    free: list[tuple[int, WriteItem, list[int]]] = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks, size = holders.get(_mark(item), [rank]), _bytes(item)
            if len(ranks) > 1 and size >= limits.SMALL_TENSOR_BYTES:
                free.append((size, item, ranks))
            else:  # small ones, such as buffers, may differ: together they are those of one rank
                loads[ranks[0]] += size
                chosen[ranks[0]].append(item)
    for size, item, ranks in sorted(free, key=lambda entry: -entry[0]):
        best = min(ranks, key=lambda rank: (loads[rank], len(chosen[rank]), rank))
        loads[best] += max(size, 1)
        chosen[best].append(item)
    for items in chosen:  # small tensors that belong together share chunks
        items.sort(key=lambda item: (item.index.fqn, item.index.offset or ()))
    return [
        dataclasses.replace(plan, items=items, storage_data=None)
        for plan, items in zip(plans, chosen, strict=True)
    ]


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _kept_by_planner(plans: Sequence[SavePlan]) -> bool:
    if not all(getattr(plan, "usable", True) for plan in plans):
        return True
    kept: dict[str, list[SavePlan]] = getattr(SavePlanner, "_cached_global_plan", {})
    known = {id(plan) for cached in kept.values() for plan in cached}
    return any(id(plan) in known for plan in plans)
