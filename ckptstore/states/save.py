"""Saving: a state becomes pieces, a manifest and one commit; the caller waits for all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore.backends.transfers import operation
from ckptstore.checkpoint.encode import Draft
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.checkpoint.write import write_version
from ckptstore.collector_pause import collector_paused
from ckptstore.config import check_choice
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import EncodingRules
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import skeleton
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Pattern, path_text
from ckptstore.format.roles import RoleRules
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.flatten import FlatState, flatten
from ckptstore.tensors.tensor_bytes import settle


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest(WriteRequest):
    """Arguments of a save: those of the version, and those that take its state apart."""

    roles: Mapping[Pattern, str] = field(default_factory=dict)
    """Pattern to role, before the conventions."""
    encodings: EncodingRules = field(default_factory=EncodingRules)
    """Which tensors are stored in which lossy form."""
    adapters: Sequence[TypeAdapter] = ()
    plain: bool = False
    """Dataclasses, enums and namespaces are stored as dicts and values, without their classes."""
    progress: ProgressCallback = silent


@operation("save")
def save_version(repo: Repo, state: object, request: SaveRequest) -> Version:
    """Write a state as a new version of a run; return when it is durable and visible.

    The state must not be changed by other threads until this returns.

    Raises
    ------
    StateError
        Something in the state cannot be represented; nothing was written.
    InvalidInputError
        A name, metric, tag or step is not accepted; nothing was written.
    UnsafeEncodingError
        A rule would spoil a tensor; nothing was written.
    TornStateError
        A tensor that is encoded, or derived from another, changed meanwhile; no version appeared.
    ReadOnlyError, UnsafeBackendError
        The store cannot be written to; nothing was written.
    CondemnedError
        Collections condemned what this save wrote, again and again.
    StorageError
        The storage failed; no version appeared.
    """
    began = repo.environment.monotonic()
    repo.check_writable()
    check_choice(request.codec)
    with collector_paused():
        flat = flatten(state, request.adapters, plain=request.plain)
        draft = draft_of(flat, request.roles, request.encodings)
    settle(flat.tensors)
    version, _ = write_version(
        repo,
        draft,
        request,
        version=repo.environment.random_hex(16),
        receipt={"staging_s": repo.environment.monotonic() - began},
        blocked_since=began,
        progress=request.progress,
    )
    return version


def draft_of(flat: FlatState, roles: Mapping[Pattern, str], encodings: EncodingRules) -> Draft:
    """Return what a version of a state is made of; it reads the memory of the state.

    Raises
    ------
    UnsafeEncodingError
        A rule would spoil a tensor; it is named.
    """
    first_paths = [tensor.paths[0] for tensor in flat.tensors]  # a tied one has its first's role
    rules = RoleRules(roles, node=flat.skeleton, records=flat.tensors)
    records = tuple(
        [
            TensorRecord(
                dtype=x.dtype, shape=x.shape, order=x.order, role=rules(path), nbytes=x.nbytes
            )
            for x, path in zip(flat.tensors, first_paths, strict=True)
        ]
    )
    wishes = _wishes(flat, records, rules, encodings) if encodings else {}
    return Draft(
        sources=flat.tensors,
        records=records,
        frame=skeleton.encode(flat.skeleton),
        names=[path_text(path) for path in first_paths],
        wishes=wishes,
        rounding=to_bfloat16,
    )


def _wishes(
    flat: FlatState, records: Sequence[TensorRecord], rules: RoleRules, encodings: EncodingRules
) -> dict[int, Encoding]:
    """Return the lossy form of each tensor that all of its places wish, by the tensor's place.

    A view that reads the bits as another dtype wishes none.
    """
    leaves = skeleton.iter_leaves(flat.skeleton)
    told = [(x.path, records[x.index].replace(role=rules(x.path))) for x in leaves]
    found = encodings.wishes(told)
    wished: list[set[Encoding | None]] = [set() for _ in records]
    for number, leaf in enumerate(leaves):
        wished[leaf.index].add(found.get(number))
    exact = skeleton.retyped(leaves, records)
    return {n: one for n, (one, *more) in enumerate(wished) if one and not more and n not in exact}
