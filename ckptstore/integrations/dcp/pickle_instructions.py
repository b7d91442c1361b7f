"""Checks the instructions of a pickled description by following them, without making objects."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Mapping
from typing import Final

from ckptstore import limits
from ckptstore.errors import LimitError

_FLAT: Final = 0
_NESTED: Final = 1  # a tuple, or the result of a call: may hold others, and hashing visits all
_MARK: Final = 2

_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_INTS: Final = frozenset({"INT", "LONG", "LONG1", "LONG4"})
_VALUES: Final = _INTS | {
    *("BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "GLOBAL"),
}
# Instruction to the number of values it takes, down to the last mark (-1), and its result.
_EFFECTS: Final[Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys(_VALUES, (0, _FLAT)),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), (0, None)),
    "MARK": (0, _MARK),
    "POP": (1, None),
    "POP_MARK": (-1, None),
    "TUPLE1": (1, _NESTED),
    "TUPLE2": (2, _NESTED),
    "TUPLE3": (3, _NESTED),
    "TUPLE": (-1, _NESTED),
    "LIST": (-1, _FLAT),
    "DICT": (-1, _FLAT),
    "APPEND": (1, None),
    "APPENDS": (-1, None),
    "SETITEM": (2, None),
    "SETITEMS": (-1, None),
    "STACK_GLOBAL": (2, _FLAT),
    "NEWOBJ": (2, _FLAT),
    "REDUCE": (2, _NESTED),
    "BUILD": (1, None),
}


def check_instructions(data: bytes) -> None:
    """Follow the instructions of a pickle without making objects.

    The unpickler reserves memory for the highest place of its memo, even if unused, and objects in
    the memo can be named twice: some hundred bytes describe a tuple that takes years to hash.
    Both are refused here, like any instruction that no description of a checkpoint needs.

    Raises
    ------
    pickle.UnpicklingError, ValueError
        It is not the pickle of a description.
    LimitError
        There are too many instructions.
    """
    stack, memo = bytearray(), bytearray()
    for done, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if done >= limits.DCP_METADATA_OPCODES_MAX:
            raise LimitError(f"more than {limits.DCP_METADATA_OPCODES_MAX} instructions")
        if name in _INTS and not -(1 << 64) < int(argument or 0) < 1 << 64:
            raise pickle.UnpicklingError("a number of more than 64 bits")
        if name == "MEMOIZE" or name in _PUTS:
            place = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if not 0 <= place <= len(memo) or not stack or stack[-1] == _MARK:
                raise pickle.UnpicklingError(f"a value for place {place} of the memo")
            memo[place : place + 1] = stack[-1:]
        elif name in _GETS:
            place = int(argument or 0)
            if not 0 <= place < len(memo):
                raise pickle.UnpicklingError(f"nothing is at place {place} of the memo")
            stack.append(memo[place])
        else:
            _apply(name, stack)


def _apply(name: str, stack: bytearray) -> None:
    """Apply an instruction's effect to the stack."""
    effect = _EFFECTS.get(name)
    if effect is None:
        raise pickle.UnpicklingError(f"the instruction {name} is in no description")
    count, left = effect
    start = stack.rfind(_MARK) if count < 0 else len(stack) - count
    if start < 0:
        raise pickle.UnpicklingError(f"nothing is there for {name}")
    taken = stack[start + (count < 0) :]
    if name in ("SETITEM", "SETITEMS", "DICT") and any(taken[::2]):
        raise pickle.UnpicklingError("the key of a dict is a tuple")
    del stack[start:]
    if left is not None:
        stack.append(left)
