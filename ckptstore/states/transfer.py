"""Loads into a different model: fills tensors that fit by name in place, reports the rest.

For transfer learning: the names of a version are renamed to those of the model, dtypes are cast,
tensors of another shape are left alone. Only the chunks that are needed are read.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ckptstore.checkpoint.content import Content
from ckptstore.chunking import in_batches
from ckptstore.errors import InvalidInputError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.paths import PathFilter, Pattern, path_text
from ckptstore.format.renames import Renames
from ckptstore.format.skeleton import Leaf
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import Shown
from ckptstore.states.load import read_records
from ckptstore.tensors.restore import Restorer, kind_of
from ckptstore.tensors.tensor_bytes import dtype_named, dtype_text

_log = logging.getLogger("ckptstore")

_TAKEN = frozenset({"tensor", "parameter", "buffer", "view", "numpy"})
_SEEN = _TAKEN | {"quantized"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """The user's options of one transfer."""

    include: Sequence[Pattern] | None = None
    """Patterns of paths of the version, before renaming."""
    exclude: Sequence[Pattern] | None = None
    rename: Mapping[Pattern, Pattern] | None = None
    """Prefix of a path of the version to the target's name for it."""
    cast: bool = True
    """Convert to the dtype of the target, where torch does that without losing the kind."""
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
    """``shape``, ``dtype``, ``shared`` (its memory was filled under another name), or the
    unusual property of a tensor that cannot be filled."""
    version_shape: tuple[int, ...]
    version_dtype: str
    target_shape: tuple[int, ...]
    target_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TransferReport(Shown):
    """Names that were loaded, and names that were not."""

    version: Version
    loaded: tuple[str, ...]
    """Names of the target that were filled."""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of these: dtype in the version and in the target, where they differ."""
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
        named = {"missing": self.missing, "unexpected": self.unexpected, "mismatched": wrong}
        for title, names in named.items():
            if names:
                more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
                parts.append(f"{len(names)} {title}: {', '.join(names[:_NAMES])}{more}")
        return "; ".join(parts)


_NAMES = 5
"""Names of a kind that the text of a report lists."""


def _words(item: Mismatch) -> str:
    found = f"{item.version_dtype}{list(item.version_shape)}"
    return f"{found} into {item.target_dtype}{list(item.target_shape)}"


class _Job(NamedTuple):
    """One leaf to read into one tensor."""

    leaf: Leaf
    name: str
    target: torch.Tensor
    dtype: str
    """Of the leaf."""
    nbytes: int


def transfer(
    repo: Repo, version: Version, content: Content, target: object, request: TransferRequest
) -> TransferReport:
    """Fill the tensors of a module or state from a version, as far as their names fit.

    Parameters
    ----------
    target
        A module, or nested dicts and lists of tensors and modules. Tensors are filled in place,
        on their devices; those of modules are their parameters and persistent buffers.

    Raises
    ------
    TensorNotFoundError
        A pattern or a prefix matches nothing.
    InvalidInputError
        Two paths have one name after renaming; the target holds no tensor; nothing fits; or
        `strict` is set and something does not fit. Nothing was read.
    CorruptTensorError, StorageError
        A tensor cannot be read. The target's contents are then undefined.
    """
    sources = _sources(content, request)
    targets = dict(_targets(target, ""))
    if not targets:
        msg = f"there is no tensor in the target, a {type(target).__name__}"
        raise InvalidInputError(msg, hint="pass a module, or {'model': model}")
    jobs, report = _plan(version, content, sources, targets, cast=request.cast)
    if not report.complete:
        _check_fit(report, request.strict, sources, targets)
    total = sum(job.nbytes for job in jobs)
    done = 0
    for batch in _batches(jobs, repo.options.host_bytes):
        _fill(repo, content, batch)
        done += sum(job.nbytes for job in batch)
        request.progress(Progress(stage="read", done=done, total=total))
    return report


def _check_fit(
    report: TransferReport,
    strict: bool | None,
    sources: Mapping[str, Leaf],
    targets: Mapping[str, torch.Tensor],
) -> None:
    """Refuse a transfer that loads nothing, or with `strict` not all; else warn, if not disabled.

    Raises
    ------
    InvalidInputError
        Names the tensors that do not fit, and the renaming that would make them fit.
    """
    if strict is False and report.loaded:
        return
    shown = f"{report.version.run}@{report.version.step}"
    rename = _fitting_rename(sources, targets)
    if strict or not report.loaded:
        how = "does not fit the target" if report.loaded else "has nothing that fits the target"
        otherwise = (
            "load the matching tensors with strict=False" if report.loaded else "compare the names"
        )
        hint = f"pass {rename}" if rename else f"rename, or {otherwise}"
        raise InvalidInputError(f"{shown} {how}: {report}", hint=hint)
    hint = f"{rename} fits more" if rename else "strict=False says that this is meant"
    _log.warning("%s fits the target in part: %s -- %s", shown, report, hint)


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


def _targets(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401
    if isinstance(value, torch.nn.Module):
        value = value.state_dict(keep_vars=True)
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _targets(item, f"{name}.{path_text((key,))}" if name else path_text((key,)))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _targets(item, f"{name}.{place}" if name else str(place))


def _plan(
    version: Version,
    content: Content,
    sources: Mapping[str, Leaf],
    targets: Mapping[str, torch.Tensor],
    *,
    cast: bool,
) -> tuple[list[_Job], TransferReport]:
    """Return which leaf is read into which tensor, and the report of it."""
    jobs: list[_Job] = []
    mismatched: list[Mismatch] = []
    also: list[str] = []  # names that share the memory of one that is filled
    filled: dict[object, int] = {}
    for name in filter(sources.__contains__, targets):
        leaf, target = sources[name], targets[name]
        record = content.manifest.tensors[leaf.index]
        dtype, shape = kind_of(leaf, record)
        memory = _memory(target)
        why = _refusal(leaf, dtype, shape, target, cast=cast)
        if not why and filled.get(memory, leaf.index) != leaf.index:
            why = "shared"
        if why:
            mismatched.append(
                Mismatch(
                    name=name,
                    path=path_text(leaf.path),
                    why=why,
                    version_shape=shape,
                    version_dtype=dtype,
                    target_shape=tuple(target.shape),
                    target_dtype=_dtype(target),
                )
            )
        elif memory in filled:
            also.append(name)
        else:
            filled[memory] = leaf.index
            jobs.append(_Job(leaf, name, target, dtype, record.nbytes))
    absent = [name for name in targets if name not in sources]
    also += [name for name in absent if _memory(targets[name]) in filled]
    dtypes = {job.name: (job.dtype, _dtype(job.target)) for job in jobs}
    report = TransferReport(
        version=version,
        loaded=(*(job.name for job in jobs), *also),
        cast={name: (given, own) for name, (given, own) in dtypes.items() if given != own},
        missing=tuple(name for name in absent if _memory(targets[name]) not in filled),
        unexpected=tuple(
            path_text(leaf.path) for name, leaf in sources.items() if name not in targets
        ),
        mismatched=tuple(mismatched),
        read_bytes=sum({job.leaf.index: job.nbytes for job in jobs}.values()),
    )
    return jobs, report


def _dtype(target: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, one that the format does not know too."""
    return dtype_text(target.dtype) or str(target.dtype)


def _memory(target: torch.Tensor) -> object:
    """Return a key that is equal for tensors over the same memory."""
    if target.is_meta or target.layout != torch.strided or not target.numel():
        return id(target)
    return (target.device, target.data_ptr(), target.dtype, target.shape, target.stride())


def _refusal(
    leaf: Leaf, dtype: str, shape: tuple[int, ...], target: torch.Tensor, *, cast: bool
) -> str:
    """Return why a tensor cannot be filled from a leaf; empty if it can."""
    own_dtype = leaf.kind == "numpy" and isinstance(leaf.node, list) and len(leaf.node) > 2
    if leaf.kind not in _TAKEN or own_dtype:
        return f"{leaf.kind} in the version"
    if target.is_meta:
        return "on the meta device"
    if target.layout != torch.strided or target.is_quantized:
        return "not a plain strided tensor"
    if tuple(target.shape) != shape:
        return "shape"
    if dtype != _dtype(target):
        known = dtype_named(dtype)
        if not cast or not torch.can_cast(known, target.dtype):
            return "dtype"
    return ""


def _batches(jobs: Sequence[_Job], host_bytes: int) -> Iterator[list[_Job]]:
    """Yield jobs in batches of at most `host_bytes`, one at least; leaves of one tensor together.

    Bytes read straight into the target count too, since a batch is also planned at once.
    """
    ordered = sorted(jobs, key=lambda job: job.leaf.index)
    tensors = [list(group) for _, group in itertools.groupby(ordered, lambda job: job.leaf.index)]
    for batch in in_batches(tensors, lambda group: group[0].nbytes, host_bytes):
        yield list(itertools.chain.from_iterable(batch))


def _fill(repo: Repo, content: Content, batch: Sequence[_Job]) -> None:
    """Read the leaves of a batch; those of the target's dtype straight into its memory."""
    exact = {
        place: job.target
        for place, job in enumerate(batch)
        if job.leaf.kind != "numpy" and job.dtype == _dtype(job.target)
    }
    restorer = Restorer(
        ["l", *(job.leaf.node for job in batch)], content.manifest.tensors, into=exact or None
    )
    read_records(repo, content, restorer, restorer.needed)
    values = restorer.build()
    with torch.no_grad():
        for place, job in enumerate(batch):
            if place not in exact:
                job.target.copy_(torch.as_tensor(values[place]))


# --- the renaming by which names fit --------------------------------------------------------------

_CANDIDATES_MAX = 8
"""Renamings that are tried. Source: copies of one model in a state, such as averaged weights."""

_NAMES_MAX = 16
"""Names of the target that renamings are made from. Source: one name may be of a new layer."""


def _fitting_rename(sources: Mapping[str, Leaf], targets: Iterable[str]) -> str:
    """Return the argument that makes most names of a target fit, as one writes it; or nothing.

    Parameters
    ----------
    sources
        Leaves of the version by the names that the current renaming gives them.
    targets
        Names of the target.

    Returns
    -------
    str
        Such as ``rename={'model': ''}``. Empty where one prefix in place of another does not make
        half of the target's names fit, or no more than fit already.
    """
    names = sorted(targets)
    paths = {path_text(leaf.path) for leaf in sources.values()}
    best, fits = "", max(len(sources.keys() & names), (len(names) - 1) // 2)
    for old, new in _candidates(paths, names[:: len(names) // _NAMES_MAX + 1]):
        count = len({_renamed(path, old, new) for path in paths}.intersection(names))
        if count > fits:
            best, fits = f"rename={{{old!r}: {new!r}}}", count
    return best


def _candidates(paths: Iterable[str], names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the prefixes to exchange where a path ends like a name, longest endings first."""
    wanted = [name.split(".") for name in names]
    found: Counter[tuple[str, str]] = Counter()
    for parts in (path.split(".") for path in paths):
        for name in wanted:
            same = 0
            while same < min(len(parts), len(name)) and parts[-1 - same] == name[-1 - same]:
                same += 1
            if same:
                old, new = parts[: len(parts) - same], name[: len(name) - same]
                found[".".join(old), ".".join(new)] += same
    return sorted(found, key=lambda pair: (-found[pair], pair))[:_CANDIDATES_MAX]


def _renamed(path: str, old: str, new: str) -> str:
    if old and not path.startswith(f"{old}."):
        return path
    return ".".join(filter(None, (new, path[len(old) :].removeprefix("."))))
