"""The page of every store that is kept from earlier releases."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptstore
from ckptstore.pages.report_file import report
from ckptstore.pages.site import page

GOLDEN = Path(__file__).parents[1] / "compat" / "golden"
OPEN = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/store.json")
    if not path.with_name("keys").exists()  # encrypted
)


def test_there_are_golden_stores() -> None:
    """The next test would otherwise pass without a store."""
    assert len(OPEN) >= 10


@pytest.mark.short(sample=3)
@pytest.mark.parametrize("name", OPEN)
def test_golden_stores_have_pages(name: str) -> None:
    """Each run, version and tensor is shown; a leaf without numbers is refused with a reason."""
    with ckptstore.open(GOLDEN / name, read_only=True) as store:
        wanted = [("run", {"run": run.name}) for run in store.runs()]
        for version in store.versions():
            wanted.append(("version", {"ref": version.id}))
            if version.level != "record":
                wanted += [
                    ("values", {"ref": f"#{version.id}", "path": one.path})
                    for one in store.version(f"#{version.id}").tensors()
                ]
        for kind, query in wanted:
            answer = page(store, f"/page/{kind}.json", query)
            assert answer is not None
            refused = kind == "values" and b"has no values to count" in answer.body
            assert answer.status == (400 if refused else 200), answer.body[:300]
        assert report(store).startswith(b"<!doctype html>")
