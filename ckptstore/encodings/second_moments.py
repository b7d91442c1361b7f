"""Second moments of optimizers: their names, and the forms that make zeros of them."""

from __future__ import annotations

import re
from typing import Final

from ckptstore.encodings.encoding import Encoding
from ckptstore.format.paths import Path

# Sums or averages of squares, by the names that optimizers give them. Sources: torch.optim of torch
# 2.13 (Adam and its kin: exp_avg_sq, max_exp_avg_sq; RMSprop, Adadelta: square_avg, acc_delta;
# Adagrad: sum; Adamax: exp_inf), Adafactor of transformers (exp_avg_sq_row, exp_avg_sq_col), and
# optax and papers (v, nu).
_SQUARES: Final = re.compile(r"(?:\w*_)?exp_avg_sq(?:_\w+)?|square_avg|acc_delta|second_moments?")
_SQUARES_OF_OPTIMIZERS: Final = frozenset(
    ["v", "vt", "v_t", "nu", "sum", "exp_inf", "v_row", "v_col", "vr", "vc"]
)
_ZEROING: Final = frozenset(["int8", "fp16", "fp8_e4m3fn", "fp8_e5m2"])
"""Forms in which what is small beside its neighbours, or by itself, becomes 0."""


def is_second_moment(path: Path, role: str) -> bool:
    """Return whether a tensor is, by its name, what an optimizer divides its step by."""
    name = path[-1] if path else ""
    if not isinstance(name, str):
        return False
    name = name.rpartition(".")[2]  # keys of flat states are paths themselves
    if _SQUARES.fullmatch(name):
        return True
    return role == "optimizer" and name in _SQUARES_OF_OPTIMIZERS


def loses_small(encoding: Encoding) -> bool:
    """Return whether a form makes zeros of small elements: then it is no form to divide by."""
    return encoding.name in _ZEROING
