"""Rules by which tensors are stored in fewer bytes: patterns and roles, the first wins."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ckptstore import limits
from ckptstore.argument_checks import check_among
from ckptstore.encodings.casts import FLOATS
from ckptstore.encodings.encoding import CASTS, LOSSLESS, Encoding
from ckptstore.errors import InvalidInputError, UnsafeEncodingError
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path, PathFilter, Pattern, path_text
from ckptstore.format.roles import ROLES

_log = logging.getLogger("ckptstore")

Encodings: TypeAlias = "Mapping[Any, Encoding | str]"
"""As a user writes rules: pattern of paths, text or tuple, or ``role:NAME``, to encoding. The first
that matches counts.
"""

_ROLE: Final = "role:"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    pattern: Pattern
    encoding: Encoding
    matches: PathFilter | None
    """None for a rule of a role."""
    role: str = ""

    def takes(self, path: Path, role: str) -> bool:
        return role == self.role if self.matches is None else self.matches(path)


class EncodingRules:
    """The rules of one save, or of a run; immutable.

    Parameters
    ----------
    rules
        Pattern of paths (as for ``roles``) or ``role:NAME``, to an :class:`Encoding` or its text.

    Raises
    ------
    InvalidInputError
        It is no mapping; or a pattern, a role or an encoding is not one.
    """

    def __init__(self, rules: Encodings | None = None) -> None:
        self._rules = tuple(_rule(pattern, value) for pattern, value in _mapping(rules).items())

    def __bool__(self) -> bool:
        """Return whether there is any rule."""
        return bool(self._rules)

    def to_json(self) -> dict[str, str]:
        """Return the rules as text to text, in their order.

        Raises
        ------
        InvalidInputError
            A pattern is a tuple, which has no text.
        """
        for rule in self._rules:
            if not isinstance(rule.pattern, str):
                msg = f"the pattern {rule.pattern!r} is no text, so it cannot be kept with a run"
                raise InvalidInputError(msg)
        return {str(rule.pattern): str(rule.encoding) for rule in self._rules}

    def wishes(self, tensors: Sequence[tuple[Path, TensorRecord]]) -> dict[int, Encoding]:
        """Return which tensors are to be stored in which lossy form, by their places.

        Left out, and so stored as they are: what no rule or a ``lossless`` one takes; what is no
        float, is of role ``rng``, or has fewer than ``ENCODED_ELEMENTS_MIN`` elements; and what
        the form would not make smaller. A pattern that takes nothing at all is logged as a
        warning.

        Raises
        ------
        UnsafeEncodingError
            A rule would store the second moments of an optimizer in a form that makes zeros of
            small elements; the message names the tensor.
        """
        found: dict[int, Encoding] = {}
        used: set[int] = set()
        for place, (path, record) in enumerate(tensors):
            for number, rule in enumerate(self._rules):
                if rule.takes(path, record.role):
                    used.add(number)
                    if _wanted(rule, path, record):
                        found[place] = rule.encoding
                    break
        for number, rule in enumerate(self._rules):
            if number not in used and not rule.role and tensors:
                _log.warning("the encoding %s of %r takes no tensor", rule.encoding, rule.pattern)
        return found


def _mapping(rules: object) -> Mapping[Any, Any]:
    if isinstance(rules, Mapping | None):
        return rules or {}
    msg = f"encodings are a mapping of patterns to encodings, not {rules!r:.80}"
    raise InvalidInputError(msg, hint='such as {"model.*": "bf16"}')


def _rule(pattern: Pattern, value: Encoding | str) -> _Rule:
    encoding = Encoding.of(value)
    if isinstance(pattern, str) and pattern.startswith(_ROLE):
        role = pattern.removeprefix(_ROLE)
        check_among(f"{pattern!r}: a role", role, ROLES)
        return _Rule(pattern=pattern, encoding=encoding, matches=None, role=role)
    return _Rule(pattern=pattern, encoding=encoding, matches=PathFilter([pattern]))


def _wanted(rule: _Rule, path: Path, record: TensorRecord) -> bool:
    """Return whether a rule that takes a tensor changes how it is stored."""
    encoding = rule.encoding
    if encoding.name == LOSSLESS or record.role == "rng" or record.dtype not in FLOATS:
        return False
    if loses_small(encoding) and is_second_moment(path, record.role):
        raise _unsafe(rule, path)
    if math.prod(record.shape) < limits.ENCODED_ELEMENTS_MIN:
        return False
    return FLOATS[record.dtype] > FLOATS[CASTS.get(encoding.name, "float8_e5m2")]


def _unsafe(rule: _Rule, path: Path) -> UnsafeEncodingError:
    name = path_text(path)
    what = f"{name!r} would be stored as {rule.encoding} by the rule {rule.pattern!r}"
    msg = f"{what}: small second moments become 0 there, and the optimizer divides by their root"
    last = name.rpartition(".")[2]
    hint = f'put a rule before it: {{"*.{last}": "dynamic8"}} (or "bf16", or "lossless")'
    return UnsafeEncodingError(msg, hint=hint)


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
