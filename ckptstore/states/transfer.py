"""Loads into a different model: fills tensors that fit by name in place, reports the rest.

For transfer learning: the names of a version are renamed to those of the model, dtypes are cast,
tensors of another shape are left alone. Only the chunks that are needed are read.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ckptstore.checkpoint.content import Content
from ckptstore.chunking import in_batches
from ckptstore.errors import InvalidInputError, StateError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.paths import Path, PathFilter, Pattern, path_text
from ckptstore.format.renames import Renames
from ckptstore.format.skeleton import Leaf, Node, iter_leaves, kind_of, prune
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import Shown
from ckptstore.states.lazy import LazyTensor
from ckptstore.states.load import read_parts, read_records
from ckptstore.states.modules import ModuleTarget, is_divided, metadata_of, own_part, values_of
from ckptstore.states.rename_hints import fitting_rename
from ckptstore.suggestions import listed
from ckptstore.tensors.narrowing import castable, losses
from ckptstore.tensors.overlaps import Fill, clashes
from ckptstore.tensors.restore import Restorer, unfillable
from ckptstore.tensors.tensor_bytes import dtype_named, dtype_text

_log = logging.getLogger("ckptstore")

_TAKEN = frozenset({"tensor", "parameter", "buffer", "view", "numpy"})
_SEEN = _TAKEN | {"quantized"}
_BOXES = frozenset({"Shard", "Replicate"})
"""Placements of DTensors with which a rank has a box of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """The user's options of one transfer."""

    include: Sequence[Pattern] | None = None
    """Patterns of paths of the version, before renaming."""
    exclude: Sequence[Pattern] | None = None
    rename: Mapping[Pattern, Pattern] | None = None
    """Prefix of a path of the version to the target's name for it."""
    cast: bool | str = True
    """Convert to the dtype of the target, where no value changes beyond rounding; with ``lossy``,
    where torch converts at all."""
    strict: bool | None = None
    """Refuse, before anything is read, unless every name fits; None warns, False says nothing."""
    progress: ProgressCallback = silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A name that both sides have, whose tensor in the target was left unchanged."""

    name: str
    """In the target."""
    path: str
    """In the version."""
    why: str
    """``shape``, ``dtype``, ``lossy`` (a cast would change values beyond rounding), ``shared`` (its
    memory is filled under another name), ``load_state_dict`` (its module refused the value),
    ``state_dict`` (its module's state dict does not give back what was loaded), or the unusual
    property of a tensor that cannot be filled."""
    version_shape: tuple[int, ...]
    version_dtype: str
    target_shape: tuple[int, ...]
    target_dtype: str
    shared_with: str = ""
    """The other name of ``shared``."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TransferReport(Shown):
    """Names that were loaded, and names that were not."""

    version: Version
    loaded: tuple[str, ...]
    """Names of the target that were filled."""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of these: dtype in the version and in the target, where they differ."""
    rounded: dict[str, int] = field(default_factory=dict)
    """Of these: elements that the cast rounded, where it rounded any."""
    missing: tuple[str, ...] = ()
    """Names of the target that the version, as selected and renamed, does not have."""
    unexpected: tuple[str, ...] = ()
    """Paths of the version, as selected, that the target has no place for."""
    mismatched: tuple[Mismatch, ...] = ()
    read_bytes: int = 0
    """Bytes of the tensors that were read."""

    @property
    def complete(self) -> bool:
        """True if every name of the target was filled and nothing was left over."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """Return the counts, and the first few names that do not fit."""
        wrong = [f"{m.name} ({m.why}: {_words(m)})" for m in self.mismatched]
        parts = [f"{len(self.loaded)} loaded"]
        if self.cast:
            parts[0] += f", {len(self.cast)} of them cast"
        if self.rounded:
            parts[0] += f", {len(self.rounded)} rounded"
        named = {"missing": self.missing, "unexpected": self.unexpected, "mismatched": wrong}
        for title, names in named.items():
            if names:
                parts.append(f"{len(names)} {title}: {listed(names, most=_NAMES)}")
        return "; ".join(parts)


_NAMES = 5
"""Names of a kind that the text of a report lists."""


def _words(item: Mismatch) -> str:
    found = f"{item.version_dtype}{list(item.version_shape)}"
    other = f", memory of {item.shared_with}" if item.shared_with else ""
    return f"{found} into {item.target_dtype}{list(item.target_shape)}{other}"


@dataclass(slots=True, eq=False)
class _Job(Fill):
    """One leaf to read into one tensor."""

    dtypes: tuple[str, str]
    """Of the leaf and of the tensor."""
    names: list[str]
    """In the target: of the tensor, and of others over the same memory."""


def transfer(
    repo: Repo, version: Version, content: Content, target: object, request: TransferRequest
) -> TransferReport:
    """Fill the tensors of a module or state from a version, as far as their names fit.

    Parameters
    ----------
    target
        A module, or nested dicts and lists of tensors and modules. Tensors are filled in place,
        on their devices; those of modules are their parameters and persistent buffers. A module
        that loads more than these, or otherwise, is asked to do so.

    Raises
    ------
    TensorNotFoundError
        A pattern or a prefix matches nothing.
    InvalidInputError
        Two paths have one name after renaming; the target holds no tensor; nothing fits; or
        `strict` is set and something does not fit. The message names tensors that have changed.
    StateError
        The code of a module failed.
    CorruptTensorError, StorageError
        A tensor cannot be read. The target's contents are then undefined.
    """
    one = _Transfer(repo, version, content, request)
    fits = one.plan(target)
    if request.strict or not fits:
        planned = one.report(planned=True)
        if not planned.complete:
            one.check_fit(planned)
    one.run()
    report = one.report()
    if not report.complete:
        one.check_fit(report, changed=report.loaded)
    return report


class _Transfer:
    """One load into a target."""

    def __init__(
        self, repo: Repo, version: Version, content: Content, request: TransferRequest
    ) -> None:
        self._repo, self._version, self._content, self._request = repo, version, content, request
        self._records = content.manifest.tensors
        self._sources = _sources(content, request)
        self._tensors: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        """Tensors of modules that load by themselves; others are in `_tensors`."""
        self._askers: list[ModuleTarget] = []
        self._jobs: list[_Job] = []
        self._metadata: dict[str, Any] = {}
        self._loaded: dict[str, tuple[str, str]] = {}
        """Names that were filled; dtype in the version and in the target."""
        self._rounded: dict[str, int] = {}
        self._mismatched: dict[str, Mismatch] = {}
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._given: dict[str, tuple[str, str]] = {}
        """Names that modules are given to load, likewise."""
        self._taken: set[Path] = set()
        """Leaves of the values that modules are given."""

    def plan(self, target: object) -> bool:
        """Find what is read into what, and return whether anything is; nothing is read.

        Raises
        ------
        InvalidInputError
            The target holds no tensor.
        """
        for name, value in _targets(target, ""):
            if isinstance(value, torch.Tensor):
                self._tensors[name] = value if is_lazy(value) else value.detach()
                continue
            asker = ModuleTarget(name, value)
            self._tensors |= {name: asker.own[name].detach() for name in asker.filled}
            self._own |= {n: one for n, one in asker.own.items() if n not in self._tensors}
            if not asker.plain or asker.converts:
                self._askers.append(asker)
        if not self._tensors and not any(asker.parts for asker in self._askers):
            msg = f"there is no tensor in the target, a {type(target).__name__}"
            raise InvalidInputError(msg, hint="pass a module, or {'model': model}")
        self._plan_jobs()
        if any(asker.parts for asker in self._askers):
            self._plan_parts()
        self._unexpected = [
            path_text(leaf.path)
            for name, leaf in self._sources.items()
            if name not in self._tensors and leaf.path not in self._taken
        ]
        return bool(self._jobs or self._given)

    def _refuse(self, name: str, target: torch.Tensor, why: str, other: str = "") -> None:
        leaf = self._sources[name]
        dtype, shape = kind_of(leaf, self._records[leaf.index])
        self._mismatched[name] = Mismatch(
            name=name,
            path=path_text(leaf.path),
            why=why,
            version_shape=shape,
            version_dtype=dtype,
            target_shape=() if is_lazy(target) else tuple(target.shape),
            target_dtype=_dtype(target),
            shared_with=other,
        )

    def _plan_jobs(self) -> None:
        jobs: dict[tuple[object, str], _Job] = {}
        for name in filter(self._sources.__contains__, self._tensors):
            leaf, target = self._sources[name], self._tensors[name]
            record = self._records[leaf.index]
            dtype, shape = kind_of(leaf, record)
            if why := _refusal(leaf, dtype, shape, target, cast=self._request.cast):
                self._refuse(name, target, why)
                continue
            job = _Job(name, target, leaf, record, (dtype, _dtype(target)), [])
            source = repr(leaf.node) if leaf.kind == "view" else str(leaf.index)
            jobs.setdefault((_memory(target), source), job).names.append(name)
        gone = {other: one for one, other in clashes(jobs.values())}
        for job, one in gone.items():
            for name in job.names:
                self._refuse(name, job.target, "shared", one.name)
        filled = {memory: job for (memory, _), job in jobs.items() if job not in gone}
        self._jobs = [*filled.values()]
        for name, target in self._tensors.items():
            if name not in self._sources:
                tied = filled.get(_memory(target))
                (self._missing if tied is None else tied.names).append(name)

    def _plan_parts(self) -> None:
        """Find the values that modules load by themselves."""
        places = {
            a.start + start: (a, part) for a in self._askers for start, part in a.parts.items()
        }
        renames = Renames(self._request.rename or {})

        inner = {""}  # names of what a state dict has below, which is no value itself
        for name in (*self._own, *places):
            inner.update(name[:at] for at, sign in enumerate(name) if sign == ".")
        wanted = PathFilter(self._request.include, self._request.exclude)
        found = {
            renames.text(path): (path, node)
            for path, node in values_of(
                prune(self._content.node, wanted), (), lambda path: renames.text(path) not in inner
            )
        }
        heads = {path[:-1][:1] for name, (path, _) in found.items() if name in self._own}
        for name, (path, node) in found.items():
            starts = ("", *(name[: at + 1] for at, sign in enumerate(name) if sign == "."), name)
            place = next(filter(None, map(places.get, starts)), None)
            if place is None or (heads and path[:-1][:1] not in heads):
                continue
            self._taken |= {path + leaf.path for leaf in iter_leaves(node)}
            target: Any = self._own.get(name)
            leaf, why = self._sources.get(name), ""
            if leaf is not None and target is not None and not is_lazy(target):
                dtype, shape = kind_of(leaf, self._records[leaf.index])
                other = not self._request.cast and dtype != _dtype(target)
                why = "on the meta device" if target.is_meta else "dtype" if other else ""
                if is_divided(target) and not why:
                    boxes = all(type(one).__name__ in _BOXES for one in target.placements)
                    why = "shape" if tuple(target.shape) != shape else ""
                    why = why or ("" if boxes else f"divided as {target.placements}")
                self._given[name] = dtype, _dtype(target)
            if why and target is not None:
                self._refuse(name, target, why)
            else:
                place[1][name.removeprefix(place[0].start)] = node
                self._given.setdefault(name, ("", ""))
        self._metadata = metadata_of(self._content.node, (), renames)
        Restorer(["l", *self._nodes()], self._records)  # refuses what cannot be built

    def _nodes(self) -> list[Node]:
        """Return the values that modules load by themselves."""
        return [n for one in self._askers for part in one.parts.values() for n in part.values()]

    def _nbytes(self, nodes: Iterable[Node], indices: Iterable[int] = ()) -> int:
        """Return the bytes of records, and of those below some nodes."""
        used = {*indices, *(leaf.index for node in nodes for leaf in iter_leaves(node))}
        return sum(self._records[index].nbytes for index in used)

    def check_fit(self, report: TransferReport, changed: Sequence[str] = ()) -> None:
        """Refuse a transfer that loads nothing, or with `strict` not all; else warn.

        Raises
        ------
        InvalidInputError
            Names the tensors that do not fit, and the renaming that would make them fit.
        """
        strict = self._request.strict
        if strict is False and report.loaded:
            return
        shown = f"{report.version.run}@{report.version.step}"
        rename = fitting_rename(self._sources, [*self._tensors, *self._own])
        if strict or not report.loaded:
            how = "does not fit the target" if report.loaded else "has nothing that fits the target"
            otherwise = "load what fits with strict=False" if report.loaded else "compare the names"
            if any(one.why == "lossy" for one in report.mismatched):
                otherwise = "convert all values, whatever is lost, with cast='lossy'"
            hint = f"pass {rename}" if rename else f"rename, or {otherwise}"
            told = f"{shown} {how}: {report}"
            if changed:
                told += f"; {len(changed)} have changed: {listed(changed, most=_NAMES)}"
            raise InvalidInputError(told, hint=hint)
        hint = f"{rename} fits more" if rename else "strict=False says that this is meant"
        _log.warning("%s fits the target in part: %s -- %s", shown, report, hint)

    def report(self, *, planned: bool = False) -> TransferReport:
        """Return what was loaded; or what is planned to be, as far as that is known."""
        loaded = self._loaded
        if planned:
            loaded = {**self._given, **{n: job.dtypes for job in self._jobs for n in job.names}}
        return TransferReport(
            version=self._version,
            loaded=tuple(loaded),
            cast={name: pair for name, pair in loaded.items() if pair[0] != pair[1]},
            rounded=self._rounded,
            missing=tuple(self._missing),
            unexpected=tuple(self._unexpected),
            mismatched=tuple(self._mismatched.values()),
            read_bytes=self._nbytes(self._nodes(), (job.leaf.index for job in self._jobs)),
        )

    def run(self) -> None:
        """Read and fill; casts first, since they may be refused."""
        total = sum(job.record.nbytes for job in self._jobs) + self._nbytes(self._nodes())
        done = 0
        for cast in (True, False):
            jobs = [job for job in self._jobs if (job.dtypes[0] != job.dtypes[1]) is cast]
            for batch in _batches(jobs, self._repo.options.host_bytes):
                self._fill(batch)
                done += sum(job.record.nbytes for job in batch)
                self._request.progress(Progress(stage="read", done=done, total=total))
            if cast and self._request.strict and self._mismatched:
                self.check_fit(self.report(), changed=[*self._loaded])
        values = self._values()
        for asker in self._askers:
            self._ask(asker, values)
        if self._askers:
            self._request.progress(Progress(stage="read", done=total, total=total))

    def _fill(self, batch: Sequence[_Job]) -> None:
        """Read the leaves of a batch; those of the target's dtype straight into its memory."""
        exact = {
            place: job.target
            for place, job in enumerate(batch)
            if job.leaf.kind != "numpy" and job.dtypes[0] == job.dtypes[1]
        }
        values = self._read([job.leaf.node for job in batch], exact)
        for place, job in enumerate(batch):
            if place not in exact:
                value = _tensor(values[place])
                if not self._keeps(job.name, value, job.target):
                    self._missing += job.names[1:]
                    continue
                with torch.no_grad():
                    job.target.copy_(value)
            self._loaded.update(dict.fromkeys(job.names, job.dtypes))

    def _keeps(self, name: str, value: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether a cast keeps the values, up to rounding, which is counted."""
        if self._request.cast == "lossy":
            return True
        rounded, lost = losses(value, target.dtype)
        if lost:
            self._refuse(name, target, "lossy")
        elif rounded:
            self._rounded[name] = rounded
        return not lost

    def _read(self, nodes: Sequence[Node], into: object = None) -> list[Any]:
        restorer = Restorer(["l", *nodes], self._records, into=into or None, checked=True)
        read_records(self._repo, self._content, restorer, restorer.needed)
        read_parts(self._repo, self._content, restorer)
        values: list[Any] = restorer.build()
        return values

    def _values(self) -> Iterator[dict[str, Any]]:
        """Yield the values of each part of a module, in order; those of some are read together."""
        parts = [(one.start, part) for one in self._askers for part in one.parts.values()]
        for batch in in_batches(
            parts, lambda one: self._nbytes(one[1].values()), self._repo.options.host_bytes
        ):
            named = [(start, n, node) for start, part in batch for n, node in part.items()]
            whole = [node for start, n, node in named if not self._is_divided(start + n)]
            read = iter(self._read(whole))
            for start, part in batch:
                yield {name: value for name in part for value in self._given_as(start + name, read)}

    def _is_divided(self, name: str) -> bool:
        return name in self._sources and is_divided(self._own.get(name))

    def _given_as(self, name: str, read: Iterator[Any]) -> Iterator[Any]:
        """Yield the value that a module is given, unless a cast would lose some of it."""
        own: Any = self._own.get(name)
        if not self._is_divided(name):
            value = _tensor(next(read))
            yield from [value] if self._passes(name, value) else []
            return
        part = own_part(LazyTensor(self._repo, self._content, self._sources[name]), own)
        if self._passes(name, part):
            about = {"shape": own.shape, "stride": own.stride(), "run_check": False}
            yield type(own).from_local(part, own.device_mesh, own.placements, **about)

    def _passes(self, name: str, value: Any) -> bool:  # noqa: ANN401 - any value
        """Return whether a module is given a value: unless a cast would lose some of it."""
        own = self._own.get(name)
        if own is None or name not in self._sources or is_lazy(own):
            return True
        return self._keeps(name, value, own)

    def _ask(self, asker: ModuleTarget, values: Iterator[dict[str, Any]]) -> None:
        """Have a module load what is not copied to it."""
        start = asker.start
        if not asker.plain:
            about = {
                f"{module}.".removeprefix(start)[:-1]: values
                for module, values in self._metadata.items()
                if f"{module}.".startswith(start)
            }
            mine = [name for name in self._missing if name.startswith(start)]
            missing, unexpected, errors = asker.load(
                values, about, [name.removeprefix(start) for name in mine]
            )
            self._unexpected += [start + name for name in unexpected]
            given = [name for name in self._given if name.startswith(start)]
            for error in errors:
                named = [name for name in given if f"{name.removeprefix(start)}" in error]
                name = max(named, key=len, default="")
                if name not in self._own or name not in self._sources:
                    raise StateError(error, hint="parameters of the target may have changed")
                self._refuse(
                    name, self._own[name], "shape" if "size" in error else "load_state_dict"
                )
            lost = {*self._unexpected, *self._mismatched}
            self._loaded.update({n: self._given[n] for n in given if n not in lost})
            left = [start + n for n in missing if start + n not in self._mismatched]
            self._missing = [n for n in self._missing if n not in {*mine}] + left
        for name in asker.converted() if asker.converts else ():
            if name in self._loaded and name in self._sources:
                self._refuse(name, {**self._tensors, **self._own}[name], "state_dict")
                del self._loaded[name]


def _sources(content: Content, request: TransferRequest) -> dict[str, Leaf]:
    """Return the selected leaves, by the name that they should have in the target."""
    wanted = PathFilter(request.include, request.exclude)
    renames = Renames(request.rename or {})
    found: dict[str, Leaf] = {}
    for leaf in content.leaves:
        if not wanted(leaf.path) or leaf.kind not in _SEEN:
            continue
        name = renames.text(leaf.path)
        if name in found:
            paths = [path_text(found[name].path), path_text(leaf.path)]
            msg = f"{paths[0]!r} and {paths[1]!r} would both be {name!r}"
            raise InvalidInputError(msg, hint="leave one of them out (exclude), or rename it too")
        found[name] = leaf
    wanted.check_all_used()
    renames.check_all_used()
    return found


def _targets(value: object, name: str) -> Iterator[tuple[str, torch.Tensor | torch.nn.Module]]:
    if isinstance(value, torch.Tensor | torch.nn.Module):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _targets(item, f"{name}.{path_text((key,))}" if name else path_text((key,)))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _targets(item, f"{name}.{place}" if name else str(place))


def _tensor(value: Any) -> Any:  # noqa: ANN401 - any value
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _dtype(target: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, one that the format does not know too."""
    return dtype_text(target.dtype) or str(target.dtype)


def _memory(target: torch.Tensor) -> object:
    """Return a key that is equal for tensors over the same memory."""
    if is_lazy(target) or target.is_meta or target.layout != torch.strided or not target.numel():
        return id(target)
    return (target.device, target.data_ptr(), target.dtype, target.shape, target.stride())


def _refusal(
    leaf: Leaf, dtype: str, shape: tuple[int, ...], target: torch.Tensor, *, cast: bool | str
) -> str:
    """Return why a tensor cannot be filled from a leaf; empty if it can."""
    own_dtype = leaf.kind == "numpy" and isinstance(leaf.node, list) and len(leaf.node) > 2
    if leaf.kind not in _TAKEN or own_dtype:
        return f"{leaf.kind} in the version"
    if why := unfillable(target):
        return why
    if tuple(target.shape) != shape:
        return "shape"
    if dtype != _dtype(target):
        known = dtype_named(dtype)
        kept = cast == "lossy" or (cast and torch.can_cast(known, target.dtype))
        if not kept or not castable(known, target.dtype):
            return "dtype"
    return ""


def _batches(jobs: Sequence[_Job], host_bytes: int) -> Iterator[list[_Job]]:
    """Yield jobs in batches of at most `host_bytes`, one at least; leaves of one tensor together.

    Bytes read straight into the target count too, since a batch is also planned at once.
    """
    ordered = sorted(jobs, key=lambda job: job.leaf.index)
    tensors = [list(group) for _, group in itertools.groupby(ordered, lambda job: job.leaf.index)]
    for batch in in_batches(tensors, lambda group: group[0].record.nbytes, host_bytes):
        yield list(itertools.chain.from_iterable(batch))
