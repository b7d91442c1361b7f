"""Samples of tensors: a few elements, evenly over each, fetched from a device with one copy.

Small tensors of integers, such as states of generators, are taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

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
    return [
        f"{one.dtype}{tuple(one.shape)}".encode() + data[place] for place, one in enumerate(tensors)
    ]


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
