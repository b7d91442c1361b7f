"""Small digests of what a training consists of: tensors, counters, generators, by name.

A tensor is told by a sample of its elements: what was not restored differs in all of them. Samples
of a device are fetched with one copy.
"""

from __future__ import annotations

import random  # noqa: TID251 - its state is compared; nothing is drawn here
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader

from ckptstore.errors import InvalidInputError
from ckptstore.hashing import blake3_of
from ckptstore.resuming.nested_values import SCALARS, Leaf, is_list, text_of, walk
from ckptstore.resuming.sampling import local, samples

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
