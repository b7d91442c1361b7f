"""Errors of rounded weights of a version, as a document and as a cell of a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckptstore.maintenance.retention.rounding_report import Rounding


def rounding_document(rounding: Rounding | None) -> dict[str, Any] | None:
    """Return errors and bytes of a rounding; None where no weights were read."""
    if rounding is None:
        return None
    tensors = [
        {**asdict(tensor), "bytes": tensor.nbytes, "problem": tensor.problem or None}
        for tensor in rounding.tensors
    ]
    largest = {"max_abs": rounding.max_abs, "rel_l2": rounding.rel_l2}
    return {**asdict(rounding), **largest, "tensors": tensors}


def rounding_text(rounding: Rounding | None) -> str:
    """Return the largest relative error of a tensor, and the largest difference of an element."""
    if rounding is None or not rounding.tensors:
        return "-"
    return f"rel {rounding.rel_l2:.2g}, abs {rounding.max_abs:.2g}"
