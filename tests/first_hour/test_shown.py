"""Stores, runs, versions and reports at a prompt and in a notebook."""

from __future__ import annotations

import pydoc
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaging import flip_pack

import ckptstore
from ckptstore import reports
from ckptstore.shown import HtmlTable, Shown

HOSTILE = "a,b:c/d+<script>alert(1)</script>&\"'"

SHOWN: dict[str, Callable[[ckptstore.Store, ckptstore.Run], Any]] = {
    "Store": lambda store, run: store,
    "Run": lambda store, run: run,
    "Version": lambda store, run: run.head,
    "LazyVersion": lambda store, run: run["latest"],
    "DiffReport": lambda store, run: store.diff("gpt@1", "gpt@2"),
    "VerifyReport": lambda store, run: store.verify(),
    "GcReport": lambda store, run: store.gc(dry_run=True),
    "RetainReport": lambda store, run: store.retain({"full": "last 1"}, dry_run=True),
    "StoreStats": lambda store, run: store.stats(),
    "RepairReport": lambda store, run: store.repair(dry_run=True),
    "SharedUsage": lambda store, run: store.sharing(),
}


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    """Return a store whose metrics, tensors and values have names that look like markup."""
    opened = ckptstore.open(tmp_path / "store", create=True)
    run = opened.run("gpt", metrics={HOSTILE: "min"})
    for step in (1, 2):
        state = {HOSTILE: torch.full((3,), float(step)), "value": HOSTILE * step}
        run.save(state, step=step, metrics={HOSTILE: step})
    return opened


def _cells(html: str) -> list[str]:
    """Return all texts of a table; what is not well formed is an error."""
    return [text.strip() for text in ET.fromstring(html).itertext()]  # noqa: S314 - our own


@pytest.mark.short(sample=4)
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_gets_a_table_that_runs_nothing(store: ckptstore.Store, name: str) -> None:
    """Each is one well-formed table of plain cells: names from storage never become markup."""
    shown = SHOWN[name](store, store.run("gpt"))
    html = shown._repr_html_()
    root = ET.fromstring(html)  # noqa: S314 - our own
    assert root.tag == "table"
    assert {one.tag for one in root.iter()} <= {
        "table", "caption", "thead", "tbody", "tr", "th", "td"
    }  # fmt: skip
    assert "<script" not in html
    if name in {"Run", "Version", "LazyVersion", "DiffReport"}:
        assert any(HOSTILE in text for text in _cells(html))
    store.close()


@pytest.mark.short(sample=4)
@pytest.mark.parametrize("name", SHOWN)
def test_a_prompt_gets_one_short_line(store: ckptstore.Store, name: str) -> None:
    """The repr names the kind and fits a screen, however many versions there are."""
    text = repr(SHOWN[name](store, store.run("gpt")))
    assert text.startswith(f"<{name} ")
    assert len(text) < 300
    assert "\n" not in text
    store.close()


def test_damage_is_in_the_table(store: ckptstore.Store) -> None:
    """A report with problems has a row for each."""
    pack = next(Path(store.url, "packs").rglob("*.pack"))
    flip_pack(pack)
    report = store.verify()
    assert "problem" in repr(report)
    assert report.problems[0].message in _cells(report._repr_html_())
    store.close()


def test_a_closed_store_still_has_a_repr(store: ckptstore.Store) -> None:
    """A cell that shows a store after ``close`` says so instead of a traceback."""
    run = store.run("gpt")
    store.close()
    for shown in (store, run):
        assert "is closed" in shown._repr_html_()


def test_long_tables_are_cut() -> None:
    """Fifty rows are shown, and their number is told."""
    html = HtmlTable(title="t", columns=("N",), rows=[(n,) for n in range(70)]).html()
    assert html.count("<tr>") == 51
    assert "the first 50 of 70 rows" in html


def test_every_report_is_importable_from_one_module() -> None:
    """What methods return is in ``ckptstore.reports``, and each report has a short repr."""
    for name in reports.__all__:
        kind = getattr(reports, name)
        assert isinstance(kind, type)
        if name.endswith(("Report", "Usage", "Stats")):
            assert issubclass(kind, Shown), name
    assert list(reports.__all__) == sorted(reports.__all__)


def test_help_of_the_package_shows_names_of_users_only() -> None:
    """Classes and functions are those of ``__all__``; the first lines are a start."""
    text = pydoc.plain(pydoc.render_doc(ckptstore))
    assert "store = ckptstore.open(" in text.partition("PACKAGE CONTENTS")[0]
    assert "\nDATA\n" not in text
    listed = text.partition("\nCLASSES\n")[2].partition("\n    class ")[0]
    found = set(re.findall(r"[\w.]+\.(\w+)$|^    \w+\.(\w+)\(", listed, re.MULTILINE))
    assert {"".join(pair) for pair in found} <= {
        *ckptstore.__all__, "Shown", "Suggesting", "object", "Exception"
    }  # fmt: skip
    for inner in ("_LAZY", "_MODULES", "importlib"):
        assert inner not in text
    assert dir(ckptstore) == sorted(ckptstore.__all__)
