"""Quantized tensors: their integers, scales and zero points.

The scheme of a ``Q`` node is ``tensor`` (parameters: scale, zero point), ``channel`` or
``channel_float`` (scales and zero points as tensors, axis), or ``none`` for a tensor that was
allocated, but not given a quantizer (no parameters).
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch

from ckptstore.errors import CorruptObjectError, StateError
from ckptstore.format.dtypes import QUANTIZED_PER_BYTE
from ckptstore.tensors import tensor_bytes


class Quantized(NamedTuple):
    """The parts of a quantized tensor."""

    integers: torch.Tensor
    """Same memory; for types packed below a byte, one-dimensional."""
    dtype: str
    """The quantized type."""
    shape: tuple[int, ...] | None
    """Of the tensor, where `integers` does not have it."""
    scheme: str
    """See the module."""
    parameters: tuple[object, ...]
    """See the module."""


def describe_quantized(tensor: torch.Tensor) -> Quantized:
    """Return the parts of a quantized tensor.

    Raises
    ------
    StateError
        It is packed and not contiguous, or its scheme is unknown.
    """
    dtype = tensor_bytes.dtype_text(tensor.dtype)
    if dtype is None:
        raise StateError(f"the quantized dtype {tensor.dtype} cannot be stored")
    scheme, parameters = _scheme(tensor)
    per_byte = QUANTIZED_PER_BYTE[dtype]
    if per_byte == 1:
        integers, shape = tensor_bytes.as_integers(tensor), None
    else:
        if not tensor.is_contiguous() or tensor_bytes.offset_of(tensor):
            raise StateError(f"a {dtype} tensor must be contiguous to be stored")
        shape = tuple(tensor.shape)
        nbytes = _packed_bytes(shape, per_byte)
        integers = tensor_bytes.tensor_over(
            tensor.untyped_storage(), torch.uint8, 0, (nbytes,), (1,)
        )
    return Quantized(integers, dtype, shape, scheme, parameters)


def _packed_bytes(shape: tuple[int, ...], per_byte: int) -> int:
    return math.prod(shape[:-1]) * -(-(shape[-1] if shape else 1) // per_byte)


def _scheme(tensor: torch.Tensor) -> tuple[str, tuple[object, ...]]:
    try:
        scheme = tensor.qscheme()
    except RuntimeError:  # allocated without a quantizer
        return "none", ()
    if scheme == torch.per_tensor_affine:
        return "tensor", (tensor.q_scale(), tensor.q_zero_point())
    if scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        name = "channel" if scheme == torch.per_channel_affine else "channel_float"
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return name, (scales, zeros, tensor.q_per_channel_axis())
    raise StateError(f"the quantization scheme {scheme} cannot be stored")


def build_quantized(
    integers: torch.Tensor,
    dtype: str,
    shape: tuple[int, ...] | None,
    scheme: str,
    parameters: tuple[object, ...],
) -> torch.Tensor:
    """Return a quantized tensor that shares the memory of `integers` unless it is packed.

    Raises
    ------
    CorruptObjectError
        The parts do not fit together.
    """
    sizes = tuple(integers.shape) if shape is None else shape
    quantized = tensor_bytes.dtype_named(dtype)
    item = 4 if dtype == "qint32" else 1
    if integers.element_size() != item or (shape is None) != (QUANTIZED_PER_BYTE[dtype] == 1):
        raise CorruptObjectError(f"the record below a {dtype} tensor does not fit it")
    storage, offset = integers.untyped_storage(), tensor_bytes.offset_of(integers)
    if shape is None and scheme == "none":
        return tensor_bytes.tensor_over(storage, quantized, offset, sizes, integers.stride())
    nbytes = _packed_bytes(sizes, QUANTIZED_PER_BYTE[dtype])
    flat = integers.dim() == 1 and integers.numel() == nbytes and integers.is_contiguous()
    if shape is not None and not flat:
        raise CorruptObjectError(f"a {dtype} tensor of shape {sizes} does not have {nbytes} bytes")
    with warnings.catch_warnings():
        # Making any quantized tensor warns, once, that torch will drop them; a load must not fail.
        warnings.simplefilter("ignore", UserWarning)
        start = (0,) * max(len(sizes), 1) if shape is None else sizes
        made = _empty(start, quantized, scheme, parameters, integers.device, sizes)
    if shape is None:
        return made.set_(storage, offset, sizes, integers.stride())
    target = tensor_bytes.tensor_over(made.untyped_storage(), torch.uint8, 0, (nbytes,), (1,))
    target.copy_(integers)
    return made


def _empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scheme: str,
    parameters: tuple[object, ...],
    device: torch.device,
    full: tuple[int, ...],
) -> torch.Tensor:
    if scheme == "none":
        return torch.empty(shape, dtype=dtype, device=device)
    if scheme == "tensor":
        scale, zero = parameters
        if not isinstance(scale, float) or not isinstance(zero, int):
            raise CorruptObjectError("the scale of a quantized tensor is no number")
        return torch._empty_affine_quantized(  # torch.load itself uses it
            shape, scale=scale, zero_point=zero, dtype=dtype, device=device
        )
    scales, zeros, axis = parameters
    if not isinstance(scales, torch.Tensor) or not isinstance(zeros, torch.Tensor):
        raise CorruptObjectError("the scales of a quantized tensor are no tensors")
    if not isinstance(axis, int) or not 0 <= axis < len(full):
        raise CorruptObjectError("the axis of a quantized tensor is none of its dimensions")
    if not scales.numel() == zeros.numel() == full[axis]:
        raise CorruptObjectError("a quantized tensor has the wrong number of scales")
    return torch._empty_per_channel_affine_quantized(
        full, scales=scales.to(device), zero_points=zeros.to(device), axis=axis, dtype=dtype,
        device=device,
    )  # fmt: skip
