"""The section of resumed trainings."""

from __future__ import annotations

from benchmarks.measure import Measured, Result
from benchmarks.resume import REFUSED
from benchmarks.sections.pieces import share, table

__all__ = ["resume"]


def resume(result: Result) -> list[str]:
    """Return the tables of stored bytes by form, and of the trainings resumed from each."""
    rows = result.tables["forms"]
    columns = [
        "form",
        "stored / state",
        "tensors with an error",
        "largest relative error",
        "of its bound",
        "loss at once",
        "loss at the end",
        "looks within the seeds' range",
        "largest difference at equal order",
    ]
    full = rows[0].numbers
    told = (
        f"The orders of the data alone spread the loss by {full['spread']:.4f} (median over the "
        "looks, from the least to the largest seed). *Looks within* counts how often the mean "
        "curve of a form lies between the least and the largest full-precision curve; the last "
        "column is the largest difference to the full-precision curve of the same order."
    )
    return [table(columns, [_line(one) for one in rows]), told]


def _line(one: Measured) -> list[str]:
    numbers = one.numbers
    made = one.name == REFUSED
    return [
        one.name,
        "-" if made else share(one),
        "-" if made else f"{numbers['lossy_tensors']:.0f}",
        "-" if made else f"{numbers['rel_l2_max']:.4f}",
        f"{numbers['of_bound_max']:.2f}" if numbers.get("of_bound_max") else "-",
        f"{numbers['first_loss']:.4f}",
        f"{numbers['last_loss']:.4f}",
        f"{numbers['inside_share']:.0%}",
        f"{numbers['same_seed_difference_max']:.5f}",
    ]
