"""The documents of the page say what the store says by its other methods."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metered import MeteredBackend
from pagekit import Ask

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.pages.site import page
from ckptstore.repo import create_on
from ckptstore.store import Store


def test_overview_lists_the_runs(store: ckptstore.Store, ask: Ask) -> None:
    """The run saved last comes first; heads, best values, bytes and curves are the store's."""
    found = ask("overview")
    assert [run["name"] for run in found["runs"]] == ["other", "lora", "gpt"]
    assert (found["runs_count"], found["versions_count"]) == (3, len(store.versions()))
    lines = {run["name"]: run for run in found["runs"]}
    gpt = lines["gpt"]
    assert gpt["head"]["id"] == store.resolve("gpt").id
    assert gpt["best"] == [
        {"metric": "val_loss", "id": store.resolve("gpt@50").id, "step": 50, "value": 1.9}
    ]
    assert gpt["spark"] == [3.0, 2.2, 2.0, 2.1, 1.9], "neither abandoned nor deleted versions"
    parts = [part for one in store.versions("gpt") for part in one.roles.values()]
    assert gpt["logical_bytes"] == sum(part.logical for part in parts)
    assert gpt["stored_bytes"] == sum(part.stored for part in parts)
    assert lines["lora"]["origin"]["step"] == 30
    assert lines["other"]["spark"] == []


def test_a_run_has_forks_rollbacks_tags_and_fates(store: ckptstore.Store, ask: Ask) -> None:
    """Columns of every version, deleted ones too; each has the place of its parent."""
    found = ask("run", run="gpt")
    columns = found["columns"]
    assert columns["step"] == [0, 10, 20, 30, 40, 30, 40, 50]
    assert columns["above"] == [-1, 0, 1, 2, 3, 2, 5, 6]
    assert columns["flags"] == [4, 1, 0, 2, 2, 0, 0, 0]
    assert found["values"]["val_loss"] == [3.0, 2.5, 2.2, 4.0, "nan", 2.0, 2.1, 1.9]
    assert found["values"]["acc"][-3:] == [None] * 3
    assert found["tags"] == {"2": ["good"]}
    assert found["best"] == {"val_loss": store.resolve("gpt@50").id}
    report = store.run("gpt").retain(dry_run=True)
    planned = {one.version.id: one.fate for one in report.changes}
    shown = {columns["id"][int(at)]: fate for at, (fate, _) in found["fates"].items()}
    assert shown == planned
    assert found["policy"] == "full: last 1, tagged"
    assert ask("run", run="lora")["origin"]["run"] == "gpt"
    assert ask("run", run="gpt", low=20, high=30)["columns"]["step"] == [20, 30, 30]


def test_lineage_has_what_happened(store: ckptstore.Store, ask: Ask) -> None:
    """Starts, forks, ends of abandoned lines; a fork continues the version it came from."""
    found = ask("lineage")
    names = [f"{run}@{step}" for run, step in zip(found["run"], found["step"], strict=True)]
    before = {
        name: names[above] if above >= 0 else ""
        for name, above in zip(names, found["above"], strict=True)
    }
    assert before["lora@30"] == "gpt@30"
    assert before["lora@35"] == "lora@30"
    assert before["gpt@40"] == "gpt@20", "the abandoned end, over what is not shown"
    assert before["gpt@50"] == "gpt@30"
    assert found["marks"][names.index("gpt@20")] == ["tag good"]
    assert found["marks"][names.index("gpt@50")] == ["head", "best val_loss"]


def test_a_version_has_tensors_relatives_packs_and_fate(store: ckptstore.Store, ask: Ask) -> None:
    """By any ref; what retention would do, and why; the search finds tensors by their paths."""
    found = ask("version", ref="gpt@40")
    assert found["version"]["id"] == store.resolve("gpt@40").id
    tensors = store.version("gpt@40").tensors()
    assert [one["path"] for one in found["tensors"]] == [one.path for one in tensors]
    assert found["tensors"][0]["aliases"] == ["model.tied"]
    assert [one["step"] for one in found["ancestors"]] == [30, 20, 10, 0]
    assert [one["step"] for one in found["children"]] == [50]
    assert (found["retention"]["fate"], found["retention"]["policy"]) == (
        "gone",
        "full: last 1, tagged",
    )
    assert found["retention"]["reasons"] == ["no rule"]
    stored = sum(part["bytes"] for part in found["packs"])
    assert stored >= sum(part.stored for part in store.resolve("gpt@40").roles.values())
    assert [one["path"] for one in ask("version", ref="gpt", search="OPT")["tensors"]] == [
        "optimizer.m"
    ]
    assert ask("version", ref="lora@30")["unread"] == "only its record is kept"
    deleted = store.repo.catalog.ids("gpt")[1]
    assert ask("version", ref=deleted)["version"]["deleted"]


def test_a_version_whose_manifest_is_gone_is_shown_all_the_same(
    history: Path, tmp_path: Path
) -> None:
    """What the catalog knows stays; the reason is shown."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        saved = store.run("r").save({"w": torch.ones(3)}, step=1)
    (tmp_path / "s" / saved.manifest_key).unlink()
    with ckptstore.open(tmp_path / "s", read_only=True) as store:
        answer = page(store, "/page/version.json", {"ref": "r"})
    assert answer is not None
    found = json.loads(answer.body)
    assert found["version"]["step"] == 1
    assert "manifest" in found["unread"]


def test_a_comparison_is_the_reports(store: ckptstore.Store, ask: Ask) -> None:
    """Counts and paths are those of the report; long values are cut."""
    report = store.diff("gpt@20", "gpt@50")
    found = ask("diff", first=store.resolve("gpt@20").id, second="gpt@50")
    assert found["counts"] == {name: len(report.of(name)) for name in found["counts"]}
    assert [one["path"] for one in found["tensors"]] == [one.path for one in report.changed]
    assert found["values_count"] == len(report.values)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 7, generator=torch.Generator().manual_seed(1)),
        torch.tensor([math.nan, math.inf, 1.0, 0.0, -2.0]), torch.arange(50),
        torch.ones(9).bfloat16(), torch.tensor([True, False, True]), torch.tensor([3 + 4j, 1j]),
        torch.zeros(0), torch.tensor(2.5), torch.ones(8).to(torch.float8_e4m3fn),
        np.linspace(0, 1, 90),
    ],
    ids=["float", "nan", "int", "bf16", "bool", "complex", "empty", "scalar", "f8", "numpy"],
)  # fmt: skip
def test_a_histogram_counts_every_value(tmp_path: Path, tensor: Any) -> None:  # noqa: ANN401
    """All finite values are counted once; extremes and mean are those of the tensor."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        store.run("r").save({"x": tensor}, step=1)
        answer = page(store, "/page/values.json", {"ref": "r@1", "path": "x"})
    assert answer is not None
    found = json.loads(answer.body)
    whole = torch.as_tensor(tensor)
    values = (whole.abs() if whole.is_complex() else whole).double().numpy().ravel()
    finite = values[np.isfinite(values)]
    assert (found["elements"], sum(found["counts"])) == (values.size, finite.size)
    assert found["nonfinite"] == values.size - finite.size
    if finite.size:
        assert (found["low"], found["high"]) == pytest.approx((finite.min(), finite.max()))
        assert found["mean"] == pytest.approx(finite.mean(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        (b"ab" * 40_000, 80_000),
        (torch.Generator(), torch.Generator().get_state().numel()),
        (np.zeros(5, dtype=[("a", "u1"), ("b", "<f4")]), 25),
    ],
    ids=["bytes", "generator", "records"],
)
def test_leaves_that_are_no_tensors_have_histograms(
    tmp_path: Path, value: object, elements: int
) -> None:
    """Each byte of them is a value."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        store.run("r").save({"x": value}, step=1)
        answer = page(store, "/page/values.json", {"ref": "r", "path": "x"})
    assert answer is not None
    assert sum(json.loads(answer.body)["counts"]) == elements


@pytest.mark.parametrize("kind", ["coo", "csr", "per channel"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:torch.quantize_per")
def test_parts_of_a_tensor_have_histograms(tmp_path: Path, kind: str) -> None:
    """Each tensor that a sparse or quantized one is stored as can be looked at by itself."""
    value = torch.eye(4)
    if kind == "per channel":
        value = torch.quantize_per_channel(value, torch.ones(4), torch.zeros(4), 0, torch.qint8)
    else:
        value = value.to_sparse() if kind == "coo" else value.to_sparse_csr()
    with ckptstore.open(tmp_path / "s", create=True) as store:
        store.run("r").save({"x": value}, step=1)
        paths = [one.path for one in store.version("r@1").tensors()]
        found = [page(store, "/page/values.json", {"ref": "r", "path": path}) for path in paths]
    assert len(paths) > 1
    for answer in found:
        assert answer is not None
        assert answer.status == 200
        assert sum(json.loads(answer.body)["counts"]) > 0


def test_a_histogram_reads_its_tensor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes read are those of the tensor; of one over the bound, those of a part."""
    backend = MeteredBackend(MemoryBackend("page-values"))
    with Store(create_on(backend)) as store:
        big = torch.randn(3, 500, 1000)
        state = {"a": torch.randn(1000, 1000), "b": big, "n": np.arange(2000.0)}
        store.run("r").save(state, step=1, codec="raw")
        before = _moved(backend)
        answer = page(store, "/page/values.json", {"ref": "r", "path": "a"})
        assert answer is not None
        assert 4e6 <= _moved(backend) - before < 4.5e6
        monkeypatch.setattr("ckptstore.pages.site._ELEMENTS_MAX", 1200)
        whole = page(store, "/page/values.json", {"ref": "r", "path": "n"})
        answer = page(store, "/page/values.json", {"ref": "r", "path": "b"})
    assert answer is not None
    assert whole is not None
    assert whole.status == 400  # of an array no part can be read
    found = json.loads(answer.body)
    assert (found["elements"], found["counted"]) == (1_500_000, 1000)
    assert found["high"] == pytest.approx(big[0, 0].max().item(), rel=1e-5)


def _moved(backend: MeteredBackend) -> int:
    return sum(meter.bytes_moved for meter in backend.snapshot().values())


def test_storage_adds_up(store: ckptstore.Store, ask: Ask) -> None:
    """By run, by role and by age: the same sums as those of the versions."""
    found = ask("storage")
    total = sum(part.stored for one in store.versions() for part in one.roles.values())
    assert found["stored_bytes"] == total
    for parts in (found["runs"], found["roles"].values(), found["ages"]):
        assert sum(part["stored_bytes"] for part in parts) == total
    assert found["ages"][0]["versions"] == found["versions"]
    assert found["levels"]["record"] == 1


def test_health_knows_verify_gc_and_replicas(tmp_path: Path) -> None:
    """What is done is seen; a replica that lacks a version says since when."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        run = store.run("r")
        run.save({"w": torch.ones(3)}, step=1)
        ask_found = _health(store)
        assert (ask_found["last_verify"], ask_found["last_gc"]) == (None, None)
        store.verify(record=True)
        run.save({"w": torch.ones(4)}, step=2)
        ckptstore.open(tmp_path / "cold", create=True).close()
        store.add_replica("cold", str(tmp_path / "cold"))
        store.replicate("replica:cold")
        third = run.save({"w": torch.zeros(3)}, step=3)
        store.remove(["r@2"])
        store.gc(grace_s=0, orphan_age_s=0)
        found = _health(store)
    assert (found["verified"], found["versions"], found["deleted"]) == (1, 2, 1)
    assert found["last_verify"]["number"] == 2
    assert found["last_gc"]["number"] > 2
    (replica,) = found["replicas"]
    assert (replica["name"], replica["missing"]) == ("cold", 1)
    assert replica["oldest_ms"] == round(third.created_at.timestamp() * 1000)
    assert found["commits"][0]["number"] > found["commits"][-1]["number"] == 1


def _health(store: ckptstore.Store) -> dict[str, Any]:
    answer = page(store, "/page/health.json", {})
    assert answer is not None
    found: dict[str, Any] = json.loads(answer.body)
    return found


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/page/run.json", {"run": "gtp"}, 404),
        ("/page/run.json", {}, 404),
        ("/page/run.json", {"run": "gpt", "low": "-1"}, 400),
        ("/page/run.json", {"run": "gpt", "high": "9" * 40}, 400),
        ("/page/version.json", {"ref": "gpt@@"}, 400),
        ("/page/version.json", {"ref": "gpt@999"}, 404),
        ("/page/version.json", {}, 400),
        ("/page/values.json", {"ref": "gpt", "path": "model.q"}, 404),
        ("/page/values.json", {"ref": "lora@30", "path": "a"}, 404),
        ("/page/diff.json", {"first": "gpt"}, 400),
    ],
)
def test_what_cannot_be_had_is_told(
    store: ckptstore.Store, path: str, query: dict[str, str], status: int
) -> None:
    """A status, and the error's text, hint and kind; never an exception."""
    answer = page(store, path, query)
    assert answer is not None
    assert (answer.status, answer.media_type) == (status, "application/json")
    assert set(json.loads(answer.body)) == {"error", "hint", "kind"}


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/page.py", "/page/../page/page.js", "/page/site.json", "/page/run", "/x", ""],
)
def test_other_paths_are_not_the_pages(store: ckptstore.Store, path: str) -> None:
    """Nothing but the page, its two assets and its documents is answered."""
    assert page(store, path, {}) is None


def test_the_page_asks_nobody_else(store: ckptstore.Store) -> None:
    """It forbids other sources, and has no script in its HTML; types fit the assets."""
    answers = {path: page(store, path, {}) for path in ("/", "/page/page.js", "/page/page.css")}
    html, script, style = (answer for answer in answers.values() if answer is not None)
    assert b"default-src 'none'; script-src 'self'; style-src 'self'" in html.body
    assert html.body.count(b"<script") == 1
    assert b"innerHTML =" not in script.body
    assert b"://" not in style.body
    assert [one.media_type.split(";")[0] for one in (html, script, style)] == [
        "text/html",
        "text/javascript",
        "text/css",
    ]
