"""Errors of rounded weights of a version, as a document and as a cell of a table."""

from __future__ import annotations

from typing import Any

from ckptstore.maintenance.retention.rounding_report import Rounding


def rounding_document(rounding: Rounding | None) -> dict[str, Any] | None:
    """Return errors and bytes of a rounding; None where no weights were read."""
    if rounding is None:
        return None
    return {
        "max_abs": rounding.max_abs,
        "rel_l2": rounding.rel_l2,
        "written_bytes": rounding.written_bytes,
        "replaced_bytes": rounding.replaced_bytes,
        "tensors": [
            {
                "path": tensor.path,
                "dtype": tensor.dtype,
                "form": tensor.form,
                "bytes": tensor.nbytes,
                "max_abs": tensor.max_abs,
                "rel_l2": tensor.rel_l2,
                "problem": tensor.problem or None,
            }
            for tensor in rounding.tensors
        ],
    }


def rounding_text(rounding: Rounding | None) -> str:
    """Return the largest relative error of a tensor, and the largest difference of an element."""
    if rounding is None or not rounding.tensors:
        return "-"
    return f"rel {rounding.rel_l2:.2g}, abs {rounding.max_abs:.2g}"
