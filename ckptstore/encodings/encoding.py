"""Encodings: the name of a form, its options, and the error that it may make."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

from ckptstore import limits
from ckptstore.argument_checks import integer
from ckptstore.errors import InvalidInputError

CASTS: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Forms in which each element is rounded to another format, and that format."""
SCALED: Final = ("int8", "dynamic8")
"""Forms of 8-bit codes with a scale a block."""
LOSSLESS: Final = "lossless"
NAMES: Final = (LOSSLESS, *CASTS, *SCALED)
DERIVED: Final = "derived"
"""What is said of a tensor that is another one, converted; nobody asks for it."""
_OPTIONS: Final = ("block", "max_abs", "rel_l2")
_HINT: Final = 'such as "bf16", "int8:block=64" or "bf16:rel_l2=0.004"'


@dataclass(frozen=True, slots=True)
class Encoding:
    """Form in which tensors are stored, and the error that is allowed.

    Its text is the name and, after a colon, options: ``"int8:block=64,rel_l2=0.01"``.

    Parameters
    ----------
    name
        ``lossless``; ``bf16``, ``fp16``, ``fp8_e4m3fn``, ``fp8_e5m2``: each element rounded;
        ``int8``: blocks of even steps between minus and plus the largest magnitude; ``dynamic8``:
        blocks of steps that shrink towards zero over seven decades, with a sign where there are
        negative elements.
    block
        Elements that share a scale, of ``int8`` and ``dynamic8``; 256 by default. Of others 0.
    max_abs
        Bound of the largest difference of an element; None for any.
    rel_l2
        Bound of the relative error: the root of the sum of squared differences, over that of the
        squares; None for any up to ``ENCODING_REL_L2_MAX``.

    Raises
    ------
    InvalidInputError
        It is none of the names, or an option is out of its bounds.
    """

    name: str
    _: KW_ONLY
    block: int | None = None
    max_abs: float | None = None
    rel_l2: float | None = None

    def __post_init__(self) -> None:
        """Check everything, and fill in the size of blocks."""
        if self.name not in NAMES:
            near = difflib.get_close_matches(str(self.name), NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "one of " + ", ".join(NAMES)
            raise InvalidInputError(f"{self.name!r} is not an encoding", hint=hint)
        object.__setattr__(self, "block", self._block())
        for option in ("max_abs", "rel_l2"):
            object.__setattr__(self, option, self._bound(option))

    def _block(self) -> int:
        block = self.block
        if self.name not in SCALED:
            if block:
                raise InvalidInputError(f"{self.name} has no blocks", hint=_HINT)
            return 0
        if block is None:
            return limits.ENCODING_BLOCK_DEFAULT
        low, high = limits.RECIPE_BLOCK_MIN, limits.RECIPE_BLOCK_MAX
        return integer(f"{self.name}: block", block, low, high)

    def _bound(self, option: str) -> float | None:
        value = getattr(self, option)
        if value is None:
            return None
        if self.name == LOSSLESS:
            raise InvalidInputError(f"lossless makes no error that {option} could bound")
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise InvalidInputError(f"{self.name}: {option} is a number above 0, not {value!r}")
        return number

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        options = [
            f"{name}={_digits(getattr(self, name))}"
            for name in _OPTIONS
            if getattr(self, name) and (name, getattr(self, name)) != _DEFAULT
        ]
        return self.name + (":" + ",".join(options) if options else "")

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Return the encoding of a text.

        Raises
        ------
        InvalidInputError
            It is not of this form, or as for the class.
        """
        name, colon, rest = text.strip().partition(":")
        options: dict[str, float] = {}
        for part in rest.split(",") if colon else ():
            option, _, value = (piece.strip() for piece in part.partition("="))
            if option not in _OPTIONS or option in options:
                msg = f"encoding {text!r}: {part.strip()!r} is not an option"
                raise InvalidInputError(msg, hint="options: block=64, max_abs=0.1, rel_l2=0.004")
            try:
                options[option] = int(value) if option == "block" else float(value)
            except ValueError:
                msg = f"encoding {text!r}: {value!r} is not a number"
                raise InvalidInputError(msg, hint=_HINT) from None
        return cls(name.strip(), **options)  # type: ignore[arg-type]  # block is an int

    @classmethod
    def of(cls, value: object) -> Encoding:
        """Return an encoding, or that of a text.

        Raises
        ------
        InvalidInputError
            It is neither.
        """
        if isinstance(value, Encoding):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise InvalidInputError(f"{value!r} is neither an Encoding nor a text", hint=_HINT)


def _digits(number: float) -> str:
    """Return the text of a number that is read as the same one."""
    short, whole = f"{number:g}", isinstance(number, int)
    return repr(number) if whole or float(short) != number else short


def form_name(kind: str, code: str, block: int, dtype: str) -> str:
    """Return what a form is called: the text of an encoding that makes it.

    Parameters
    ----------
    kind, code, block
        Of the recipe.
    dtype
        Of the tensor that holds the codes.
    """
    if kind == "cast":
        return next((name for name, target in CASTS.items() if target == dtype), dtype)
    return str(Encoding("int8" if code == "linear" else "dynamic8", block=block))


_DEFAULT: Final = ("block", limits.ENCODING_BLOCK_DEFAULT)
