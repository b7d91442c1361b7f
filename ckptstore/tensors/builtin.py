"""Built-in adapters: for classes of Python and torch, and for torchao's.

A stored name is compared with the names below, and never used as one. A load imports only the
module of a class listed here, whose library the saving process had installed too.
"""

from __future__ import annotations

import functools
import importlib
import io
from typing import Any, Final

import torch

from ckptstore.errors import CorruptObjectError, StateError
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.composed import build_sparse, describe_sparse

_QUANTIZE: Final = "torchao.quantization.quantize_"
SUBCLASSES: Final = frozenset(
    {
        "torch.testing._internal.two_tensor.TwoTensor",
        "torchao.float8.float8_training_tensor.Float8TrainingTensor",
        "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
        *(
            f"torchao.quantization.{name}"
            for name in (
                *("Float8Tensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4Tensor"),
                *("Int4TilePackedTo4dTensor", "Int8Tensor", "IntxOpaqueTensor"),
                "IntxUnpackedToInt8Tensor",
            )
        ),
        f"{_QUANTIZE}.workflows.nf4.nf4_tensor.NF4Tensor",
    }
)
"""Tensor subclasses by the name of their module and class."""
_CONTEXTS: Final = frozenset(
    {
        "torchao.float8.config.ScalingGranularity",
        "torchao.float8.float8_training_tensor.GemmInputRole",
        "torchao.float8.float8_training_tensor.LinearMMConfig",
        "torchao.float8.float8_training_tensor.ScaledMMConfig",
        "torchao.float8.inference.Float8MMConfig",
        "torchao.quantization.granularity.PerBlock",
        "torchao.quantization.granularity.PerRow",
        "torchao.quantization.granularity.PerTensor",
        "torchao.quantization.quant_primitives.MappingType",
        "torchao.quantization.quant_primitives.ZeroPointDomain",
        f"{_QUANTIZE}.common.kernel_preference.KernelPreference",
        f"{_QUANTIZE}.workflows.float8.float8_packing_format.Float8PackingFormat",
        f"{_QUANTIZE}.workflows.float8.float8_tensor.QuantizeTensorToFloat8Kwargs",
        f"{_QUANTIZE}.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs",
        f"{_QUANTIZE}.workflows.intx.intx_packing_format.IntxPackingFormat",
        f"{_QUANTIZE}.workflows.intx.intx_unpacked_to_int8_tensor"
        ".IntxUnpackedToInt8TensorActivationQuantization",
        f"{_QUANTIZE}.workflows.nf4.nf4_tensor.SubclassTensorArgs",
    }
)


def _bytes_state(value: io.BytesIO) -> tuple[bytes, int]:
    data, position = value.getvalue(), value.tell()
    if position > len(data):
        raise StateError(f"its position is {position}, and it ends at {len(data)}")
    return data, position


def _bytes_io(state: Any) -> io.BytesIO:  # noqa: ANN401 - hostile
    types = [type(part) for part in state] if type(state) is tuple else []
    if types != [bytes, int] or not 0 <= state[1] <= len(state[0]):
        raise CorruptObjectError("it is not bytes and a position in them")
    made = io.BytesIO(state[0])
    made.seek(state[1])
    return made


BYTES_IO: Final = TypeAdapter(
    name="ckptstore.BytesIO", type=io.BytesIO, to_state=_bytes_state, from_state=_bytes_io
)
SPARSE: Final = TypeAdapter(
    name="ckptstore.sparse", type=torch.Tensor, to_state=describe_sparse, from_state=build_sparse
)
"""Of plain tensors and Parameters with a sparse layout; found by the layout, not by the class."""


def builtin_for(kind: type[Any]) -> TypeAdapter | None:
    """Return the built-in adapter of a class, or None."""
    if kind is io.BytesIO:
        return BYTES_IO
    name = f"{kind.__module__}.{kind.__qualname__}"
    found = _listed(name) if name in SUBCLASSES or name in _CONTEXTS else None
    return found if found is not None and found.type is kind else None


def builtin_named(name: str) -> TypeAdapter | None:
    """Return the built-in adapter of a stored name, or None.

    Raises
    ------
    StateError
        Its class belongs to a library that is not installed.
    """
    if name in SUBCLASSES or name in _CONTEXTS:
        return _listed(name)
    return {BYTES_IO.name: BYTES_IO, SPARSE.name: SPARSE}.get(name)


@functools.cache
def _listed(name: str) -> TypeAdapter:
    """Return the adapter of a listed class."""
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        msg = f"the class {name} is not installed: {error}"
        hint = f"install {module.partition('.')[0]} in the version that the state was saved with"
        raise StateError(msg, hint=hint) from error
    return TypeAdapter.of(kind, name=name)
