"""Comparison of what a training was when it was saved with what it is when it goes on.

A tensor is told by a sample of its elements, spread evenly: what was not restored differs in all
of them. Samples of a device are fetched with one copy.
"""

from __future__ import annotations

import random  # noqa: TID251 - its state is compared; nothing is drawn here
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from math import isclose, isnan
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from ckptstore.errors import InvalidInputError
from ckptstore.hashing import blake3_of

Verdict = Literal["exact", "close", "differs", "unknown"]

_NAMED: Final = 5
_ALIKE: Final = 3
"""Groups of names in a message, and the largest of which all are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """Result of a comparison of a resumed training with the saved one."""

    version: str
    """Label of the version that was resumed."""
    verdict: Verdict
    """``exact``: equal in all that was compared. ``close``: the numbers that the training computes
    differ by no more than the tolerance, and all else is equal. ``unknown``: nothing to compare."""
    steps: int
    """Steps after the save that were compared; if something differs, the first that does, and 0
    for the restored state itself."""
    names: tuple[str, ...] = ()
    """What differs: tensors, generators, counters, the data, the loss; on other ranks than 0
    with ``rank N:`` before it."""

    def __str__(self) -> str:
        """Return a line for people."""
        after = "after 1 step" if self.steps == 1 else f"after {self.steps} steps"
        at = after if self.steps else "in what was restored"
        if self.verdict == "unknown":
            return f"resumed {self.version}: {self.names[0] if self.names else 'not compared'}"
        if self.verdict != "differs":
            return f"resumed {self.version}: {self.verdict} {at}"
        verb = "differs" if len(self.names) == 1 else "differ"
        return f"resumed {self.version}: {_listed(self.names)} {verb} {at}"


def _listed(names: Sequence[str]) -> str:
    """Return names as text; of many that begin alike, the first and their number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    told = []
    for key, group in groups.items():
        few = len(group) <= _ALIKE
        told.append(", ".join(group) if few else f"{group[0]} and {len(group) - 1} more of {key}")
    more = [f"{len(told) - _NAMED} more"] if len(told) > _NAMED else []
    return ", ".join([*told[:_NAMED], *more])


class Moment(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One rank's training at one moment."""

    entries: dict[str, str]
    """Digests by path."""
    computed: frozenset[str] = frozenset()
    """Paths of floating-point tensors: they follow from what is computed."""
    loss: float | None = None
    gradients: float | None = None
    """Their norm."""


def differences(
    then: Sequence[Moment], now: Sequence[Moment], bound: float, ignored: Sequence[AbstractSet[str]]
) -> tuple[list[str], bool]:
    """Return the names of what differs between two moments, and whether numbers are only close.

    What may be the cause of others comes first: data, generators and counters, then loss and
    gradients, then tensors.

    Parameters
    ----------
    then, now
        By rank.
    bound
        Relative difference of loss and gradients that counts as close. Where one of them is only
        close, tensors that follow from it are not compared.
    ignored
        Paths that do not matter, by rank.
    """
    names: list[str] = []
    close = False
    for rank, (one, other) in enumerate(zip(then, now, strict=True)):
        computed = one.computed | other.computed
        found = _differing(one.entries, other.entries)
        differing = [name for name in found if name not in ignored[rank]]
        causes = [name for name in differing if name not in computed]
        tensors = [name for name in differing if name in computed]
        numbers = []
        soft = False
        for what, a, b in (
            ("the loss", one.loss, other.loss),
            ("the norm of the gradients", one.gradients, other.gradients),
        ):
            if a is None or b is None or a == b or (isnan(a) and isnan(b)):
                continue
            if isclose(a, b, rel_tol=bound):
                soft = True
            else:
                numbers.append(what)
        mine = [*causes, *numbers, *(() if soft and not numbers else tensors)]
        close = close or soft
        names += [f"rank {rank}: {name}" if rank else name for name in mine]
    return names, close


def unused(moments: Sequence[Sequence[Moment]], rank: int) -> frozenset[str]:
    """Return the global generators from which a rank drew nothing in the steps after a save."""
    first = moments[0][rank].entries
    return frozenset(
        name
        for name, digest in first.items()
        if name.startswith(GENERATOR)
        and len(moments) > 1
        and all(one[rank].entries.get(name) == digest for one in moments)
    )


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of entries that differ, or that only one of both has."""
    for name, digest in then.items():
        if now.get(name) != digest:
            yield name if name in now else f"{name} (missing)"
    yield from (f"{name} (new)" for name in now if name not in then)


SCALARS: Final = (str, int, float, bool, bytes, type(None))
_ADDRESS: Final = re.compile(" at 0x[0-9a-fA-F]+")
"""Of an object in this process, as ``repr`` shows it."""

Leaf = tuple[str, Any]
"""Path, and a tensor or a plain value."""


def is_list(value: object) -> bool:
    """Return whether a value is a list, a tuple or a set."""
    return isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes)


def walk(path: str, value: object) -> Iterator[Leaf]:
    """Yield the leaves of nested containers."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from walk(f"{path}.{key}", one)
    elif isinstance(value, AbstractSet):
        yield path, sorted(text_of(one) for one in value)
    elif is_list(value) and not all(isinstance(one, SCALARS) for one in value):  # type: ignore[attr-defined]
        for place, one in enumerate(value):  # type: ignore[arg-type]
            yield from walk(f"{path}.{place}", one)
    elif isinstance(value, np.ndarray):
        yield path, _array(value)
    else:
        yield path, value


def text_of(value: object) -> str:
    """Return a plain value as text that is the same in every process."""
    if isinstance(value, AbstractSet):  # in another set
        return repr(sorted(text_of(one) for one in value))
    return _ADDRESS.sub("", repr(value))


def _array(value: npt.NDArray[Any]) -> object:
    """Return an array as a tensor; as a list, where torch has no such type."""
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError):
        return value.tolist()


_HEX: Final = 8
"""Digits of a digest. Source: one of 256 entries agrees by chance once in 2**24 comparisons."""
_PLAIN: Final = (torch.Tensor, np.ndarray, np.generic, Mapping, *SCALARS)
_COMPILED: Final = "_orig_mod."
"""In paths of a module that ``torch.compile`` wraps."""

GENERATOR: Final = "the generator of "
GRADIENTS: Final = "the gradients accumulated at the save"
MODES: Final = "(train and eval)"


def has_state(value: object) -> bool:
    """Return whether a value is no function, and of a type that :func:`leaves_of` takes.

    Nothing is called: the ``state_dict`` of a loader may draw from generators.
    """
    kinds = (torch.Generator, np.random.Generator, random.Random, DataLoader, *_PLAIN)
    if isinstance(value, type) or value is None:
        return False
    return isinstance(value, kinds) or is_list(value) or hasattr(value, "state_dict")


def leaves_of(name: str, value: object) -> Iterator[Leaf]:
    """Yield what an object of a training consists of.

    Raises
    ------
    InvalidInputError
        It is of a type that has no state to compare.
    """
    if isinstance(value, torch.nn.Module):
        yield from _module(name, value)
    elif isinstance(value, torch.optim.Optimizer):
        yield from walk(name, value.state_dict())
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, np.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif isinstance(value, random.Random):
        yield name, repr(value.getstate())
    elif isinstance(value, _PLAIN) or is_list(value):
        yield from walk(name, value)
    elif callable(getattr(value, "state_dict", None)):
        yield from walk(name, value.state_dict())  # type: ignore[attr-defined]
    elif isinstance(value, DataLoader):
        yield from _loader(name, value)
    elif callable(value):
        yield from leaves_of(name, value())
    else:
        msg = f"{name} is {type(value).__name__}, which has no state_dict() to compare"
        hint = "give modules, optimizers, schedulers, loaders, generators, or a function"
        raise InvalidInputError(msg, hint=hint)


def _module(name: str, module: torch.nn.Module) -> Iterator[Leaf]:
    """Yield what a module consists of, by the same paths whether it is compiled or not."""
    parameters = [(path.replace(_COMPILED, ""), one) for path, one in module.named_parameters()]
    yield from ((f"{name}.{path}", one) for path, one in parameters)
    for path, one in module.named_buffers():
        yield f"{name}.{path.replace(_COMPILED, '')}", one
    inner = [one for one in module.modules() if not hasattr(one, _COMPILED[:-1])]
    yield f"{name} {MODES}", [one.training for one in inner]
    yield f"{name} (frozen)", [path for path, one in parameters if not one.requires_grad]


def buffers_of(name: str, value: object) -> Iterator[str]:
    """Yield the paths of a module's buffers that are no DTensors; a version has those of rank 0."""
    for path, one in value.named_buffers() if isinstance(value, torch.nn.Module) else ():
        if not hasattr(one, "to_local"):
            yield f"{name}.{path.replace(_COMPILED, '')}"


def gradients_of(value: object) -> list[torch.Tensor]:
    """Return the gradients that a module has, in the order of its parameters."""
    if callable(value) and not hasattr(value, "state_dict"):
        value = value()
    if not isinstance(value, torch.nn.Module):
        return []
    grads = [one.grad for one in value.parameters() if one.grad is not None]
    return [local(one) for one in grads if one.layout is torch.strided]


def _loader(name: str, loader: DataLoader[Any]) -> Iterator[Leaf]:
    """Yield the generators of a loader and its sampler, and the sampler's epoch."""
    for path, one in ((name, loader), (f"{name}.sampler", loader.sampler)):
        generator = getattr(one, "generator", None)
        if isinstance(generator, torch.Generator):
            yield f"{path}.generator", generator.get_state()
        for field in ("epoch", "seed"):
            if isinstance(getattr(one, field, None), int):
                yield f"{path}.{field}", getattr(one, field)


def generators() -> Iterator[Leaf]:
    """Yield the states of the global generators of Python, NumPy, torch and its devices."""
    yield f"{GENERATOR}Python", repr(random.getstate())
    numpy: Mapping[str, Any] = np.random.get_state(legacy=False)
    # Bytes, not an array: their text has all of it and takes little time.
    parts = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in numpy["state"].items()}
    yield f"{GENERATOR}NumPy", repr({**numpy, "state": parts})
    yield f"{GENERATOR}torch", torch.get_rng_state()
    if torch.accelerator.is_available():
        device = torch.get_device_module()
        if device.is_initialized() and hasattr(device, "get_rng_state"):
            yield f"{GENERATOR}{device.__name__}", device.get_rng_state()


def digests(leaves: Iterable[Leaf], most: int) -> tuple[dict[str, str], set[str]]:
    """Return a digest of each leaf by its path, and the paths of floating-point tensors.

    Where there are more than `most`, paths are cut, the longest first, and a digest is that of all
    leaves whose paths begin so.
    """
    found = [one for leaf in leaves for one in walk(*leaf)]
    tensors = [(path, one) for path, one in found if isinstance(one, torch.Tensor)]
    data = dict(zip([path for path, _ in tensors], samples([t for _, t in tensors]), strict=True))
    computed = {path for path, one in tensors if one.is_floating_point()}
    parts = {path: data.get(path) or text_of(one).encode() for path, one in found}
    cut = _cut(parts, most)
    groups: dict[str, list[bytes]] = {}
    for path, part in parts.items():
        groups.setdefault(cut(path), []).append(path.encode() + b"=" + part)
    told = {path: blake3_of(sorted(group)).hex()[:_HEX] for path, group in groups.items()}
    return told, {cut(path) for path in computed}


def _cut(paths: Iterable[str], most: int) -> Callable[[str], str]:
    """Return the function that cuts paths so that at most `most` are left, if that can be."""
    split = [path.split(".") for path in paths]
    depth = max(map(len, split), default=1)
    while depth > 1 and len({tuple(path[:depth]) for path in split}) > most:
        depth -= 1
    return lambda path: ".".join(path.split(".")[:depth])


_SAMPLE: Final = 64
"""Elements of a tensor."""
_WHOLE: Final = 8192
"""Elements up to which a tensor of integers is taken whole: a generator that has drawn a few
numbers differs in the bytes of its position only. Source: the state of torch's has 5,056."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that can be indexed everywhere, by their bytes."""


def samples(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return type, shape and some elements of each tensor, as bytes."""
    taken = [_sample(one.detach()) for one in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for place, one in enumerate(taken):
        by_device.setdefault(one.device, []).append(place)
    data: dict[int, bytes] = {}
    for places in by_device.values():
        joined = torch.cat([taken[place] for place in places]).cpu()
        parts = torch.split(joined, [taken[place].numel() for place in places])
        data.update(zip(places, (part.numpy().tobytes() for part in parts), strict=True))
    return [f"{one.dtype}{tuple(one.shape)}".encode() + data[at] for at, one in enumerate(tensors)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


@lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(_SAMPLE, device=device) * (count - 1) // (_SAMPLE - 1)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of some elements, on the tensor's device."""
    tensor = local(tensor)
    if hasattr(tensor, "__tensor_flatten__"):  # it consists of others: a quantized weight
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return torch.cat([_sample(one) for one in parts])
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return torch.empty(0, dtype=torch.uint8)
    computed = tensor.is_floating_point() or tensor.is_complex()
    if not (tensor.is_complex() or tensor.is_neg()):
        tensor = tensor.view(_WORDS[tensor.itemsize])
    count = tensor.numel()
    if count > (_SAMPLE if computed else _WHOLE):
        where = _places(count, tensor.device)
        if tensor.is_contiguous():  # as most are; it takes a fifth of the time
            tensor = tensor.view(-1)[where]
        else:
            tensor = tensor[torch.unravel_index(where, tensor.shape)]
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
