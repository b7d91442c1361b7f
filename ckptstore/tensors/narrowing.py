"""Losses of a cast: elements that it rounds, and elements that it changes beyond rounding."""

from __future__ import annotations

import functools

import torch

_NARROW = {torch.float16, torch.bfloat16, torch.float32}
_WIDE = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_SLICE = 1 << 20
"""Elements that are compared at a time. Source: temporary memory of some 20 MiB."""


@functools.cache
def castable(given: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether torch converts between two dtypes at all."""
    try:
        torch.empty(1, dtype=given, device="cpu").to(dtype)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def losses(values: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many elements a cast rounds, and how many it changes beyond rounding.

    Beyond rounding are values that become infinite or NaN, wrap, saturate, or change their sign.
    A number too small for the dtype is rounded.
    """
    if values.dtype == torch.bool or (values.dtype in _NARROW and dtype in _WIDE):
        return 0, 0
    dims = sorted(range(values.dim()), key=values.stride, reverse=True)
    rounded = lost = 0
    for part in torch.split(values.detach().permute(dims).reshape(-1), _SLICE):
        same, near = _compared(part, part.to(dtype))
        rounded += int((near & ~same).sum())
        lost += int((~same & ~near).sum())
    return rounded, lost


def _compared(given: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements are the same, and which differ by a rounding."""
    integers = not (given.is_floating_point() or given.is_complex())
    if made.is_complex():
        made = torch.view_as_real(made) if given.is_complex() else made.real
    if given.is_complex():
        given = torch.view_as_real(given)
    if integers and not made.is_floating_point():
        same = made.to(given.dtype) == given
        same &= (made < 0) == (given < 0)
        return same, same
    wide = torch.float64 if integers or given.dtype == torch.float64 else torch.float32
    exact, back = given.to(wide), made.to(wide)
    same = (back == exact) | (exact.isnan() & back.isnan())
    limits = torch.finfo(made.dtype)
    near = (back - exact).abs() <= exact.abs() * limits.eps + limits.tiny
    near &= exact.isfinite() & ((back == 0) | (back.sign() == exact.sign()))
    if integers:  # some have more bits than a double
        same &= back.to(given.dtype) == given
    return same, near
