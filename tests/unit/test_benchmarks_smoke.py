"""The benchmarks run: each suite once, tiny, and the page is made of what it writes.

No figure is judged here but those that do not depend on the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from local_servers import Server

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))  # benchmarks/ is not installed; it runs from the source tree

from benchmarks import (  # noqa: E402 - after the path
    async_saves,
    byte_paths,
    catalog,
    codecs,
    cores,
    encryption,
    failures,
    filesystems,
    keepers,
    link,
    local,
    many,
    measure,
    memory,
    page,
    replicate,
    resume,
    s3,
    scale,
    serve,
    sharing,
    trajectory,
    weka,
    workload_states,
    workloads,
)
from benchmarks.disk import Workspace, workspace  # noqa: E402
from benchmarks.endpoint import Bucket  # noqa: E402
from benchmarks.host import header  # noqa: E402
from benchmarks.measure import Measured, Result  # noqa: E402
from benchmarks.results import read_result, write_result  # noqa: E402
from benchmarks.states import StateSpec, make_state, same  # noqa: E402
from benchmarks.trajectories import Plan, trajectories  # noqa: E402

pytestmark = pytest.mark.timeout(600)

_PAGE = _ROOT / "benchmarks" / "RESULTS.md"


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Workspace]:
    """Return a workspace of this test alone."""
    with warnings.catch_warnings(), workspace(tmp_path) as space:
        warnings.simplefilter("ignore")  # the peers warn about themselves
        yield space


@pytest.fixture(autouse=True)
def _unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no care of the figures between cases: nothing is measured here."""
    for module in (measure, trajectory, workloads):
        monkeypatch.setattr(module, "settle", lambda **_: None)


def _check(result: Result, tmp_path: Path) -> None:
    """Assert that nothing failed, and that JSON and page can be made."""
    failed = [one for rows in result.tables.values() for one in rows if one.error]
    assert failed == []
    result.header |= {"seconds_in_all": 1.0, "load_average_after": [0.0, 0.0, 0.0]}
    write_result(tmp_path, result)
    again = read_result(tmp_path, result.benchmark)
    assert again is not None
    assert again.tables.keys() == result.tables.keys()
    copy = tmp_path / "benchmarks" / "page.md"
    copy.parent.mkdir()
    shutil.copy(_PAGE, copy)
    page.write_page(copy, tmp_path)
    assert result.header["commit"] in copy.read_text()


def _row(rows: list[Measured], name: str) -> Measured:
    return next(one for one in rows if one.name == name)


@pytest.mark.slow
def test_local(space: Workspace, tmp_path: Path) -> None:
    """Saves and loads of all peers are right, and an unchanged re-save stores no tensor again."""
    result = local.run(
        space, bytes_min=300_000, rounds=1, training_steps=2, peaks=["ckptstore raw"]
    )
    _check(result, tmp_path)
    saves = result.tables["save"]
    assert _row(saves, "ckptstore auto").numbers["pack_bytes"] > 0
    assert _row(saves, "ckptstore auto, nothing changed").numbers["pack_bytes"] == 0


@pytest.mark.slow
def test_local_of_weights_that_nearly_follow(space: Workspace, tmp_path: Path) -> None:
    """The other state runs too, none of its weights is derived, and its results stand apart."""
    result = local.run(
        space, bytes_min=3_000_000, rounds=1, training_steps=2, state_name="nearly",
        peaks=["ckptstore raw"],
    )  # fmt: skip
    failed = [one for rows in result.tables.values() for one in rows if one.error]
    assert failed == []
    assert result.benchmark == "local-nearly"
    assert result.parameters["tensors"] == 366
    raw = _row(result.tables["save"], "ckptstore raw")
    assert raw.numbers["new_bytes"] > 0.99 * raw.logical_bytes
    write_result(tmp_path, result)
    assert read_result(tmp_path, "local") is None


@pytest.mark.slow
def test_cores(space: Workspace, tmp_path: Path) -> None:
    """Every way is measured, and takes no more under the lock than small pieces take in all."""
    result = cores.run(space, pieces=4, rounds=1)
    _check(result, tmp_path)
    for rows in result.tables.values():
        assert len(rows) == 7
        for one in rows:
            assert 0 <= one.numbers["locked_s"] <= 16 / 15 * one.numbers["small_s"]


def test_resume(space: Workspace, tmp_path: Path) -> None:
    """Every error is within its bound, and the rounded forms take less than half of the bytes."""
    plan = resume.ResumePlan(
        width=64, layers=1, time=16, batch=2, warmup=3, steps=2, every=1, seeds=2, rows=2
    )
    result = resume.run(space, plan=plan)
    _check(result, tmp_path)
    forms = {one.name: one for one in result.tables["forms"]}
    assert set(forms) == {*resume.FORMS, resume.REFUSED}
    smallest = forms["bf16 weights, 8-bit moments"]
    assert 0 < smallest.numbers["of_bound_max"] <= 1
    assert smallest.numbers["kept_lossless"] == 0
    assert smallest.numbers["stored_bytes"] <= 0.45 * smallest.logical_bytes
    assert all(len(curve) == 3 for curves in result.facts["curves"].values() for curve in curves)


@pytest.mark.slow
def test_trajectory(space: Workspace, tmp_path: Path) -> None:
    """Every keeper gives its versions back, and what is frozen is stored once.

    Deltas are the fewest bytes of what is exact.
    """
    plan = Plan(width=64, layers=1, warmup=3, versions=3, intervals=(1, 2), lora_interval=1)
    stores = [one.name for one in keepers.keepers() if one.name.startswith("ckptstore")]
    result = trajectory.run(space, plan=plan, loads=2, only=["torch.save", *stores])
    _check(result, tmp_path)
    saves = result.tables["save: fp32 + AdamW, every step"]
    exact = [one for one in saves if not one.note.startswith("lossy")]
    least = min(exact, key=lambda one: one.numbers["stored_bytes"])
    assert least.name == "ckptstore delta"
    for rate in ("", ", learning rate 1e-06"):
        assert result.tables[f"load: bf16 weights, every 2 steps{rate}"]
    assert 0 < result.facts["generator_bytes"] < result.facts["adapter_bytes"]
    kinds = result.facts["kinds"]
    for keeper in ("ckptstore auto", "ckptstore planes", "ckptstore delta"):
        assert kinds["LoRA on a frozen base, every step"][keeper]["weights"] == 0
        assert kinds["mixed precision, every 2 steps"][keeper]["weights"] < 0.1


def test_both_rates_begin_alike() -> None:
    """The training at the lower rate goes on from the same weights, and moves them less."""
    plan = Plan(width=32, layers=1, warmup=3, versions=3, intervals=(1, 2), lora_interval=1)
    made = {one.name: one.versions for one in trajectories(plan)}
    high, post = (
        [version["model"] for version in made[f"bf16 weights, every 2 steps{at}"]]
        for at in ("", ", learning rate 1e-06")
    )
    assert same(high[0], post[0])

    def moved(versions: list[Any]) -> float:
        first, last = versions[0], versions[-1]
        return sum(float((first[name].float() - last[name].float()).norm()) for name in first)

    assert 0 < moved(post) < moved(high)


def test_backup_programs(space: Workspace) -> None:
    """restic, borg and ZipNN, where they are installed, give both of two versions back."""
    first = make_state(StateSpec(bytes_min=300_000, training_steps=2))
    second = {**first, "step": 2, "model": {"w": torch.ones(5000)}}
    assert {"ZipNN", "restic", "borg"} <= {one.name for one in keepers.keepers()} | set(
        keepers.absent()
    )
    for keeper in keepers.keepers(["ZipNN", "restic", "borg"]):
        kept = keeper.start(space.fresh())
        for number, state in enumerate((first, second)):
            kept.save(state, number)
        for number, state in enumerate((first, second)):
            assert same(state, kept.load(number, state)), keeper.name
        kept.close()


@pytest.mark.slow
def test_workloads(space: Workspace, tmp_path: Path) -> None:
    """All tools load what they saved of each workload; a step of LoRA adds its adapters alone."""
    result = workloads.run(space, rounds=1, shrink=32, training_steps=2, only=["lora", "moe"])
    _check(result, tmp_path)
    lora = result.tables["store: lora"]
    assert _row(lora, "next save").numbers["stored_bytes"] < 0.6 * lora[0].logical_bytes


@pytest.mark.slow
def test_many(space: Workspace, tmp_path: Path) -> None:
    """All tools load what they saved, and find each tensor by its name."""
    _check(many.run(space, rounds=1, shapes=[(30, 64)]), tmp_path)


@pytest.mark.slow
def test_weka(space: Workspace, tmp_path: Path) -> None:
    """The models have the sizes that the paper names, and all their saves become durable."""
    counts = {one.name: workload_states.parameters(one) for one in workload_states.PAPER}
    assert {name: round(count / 1e6) for name, count in counts.items()} == {
        "FastPitch": 46,
        "QuartzNet": 19,
        "BERT": 336,
    }
    result = weka.run(
        space, rounds=1, shrink=32, training_steps=2, saves=1, every_s=0.05, only=["QuartzNet"]
    )
    _check(result, tmp_path)
    window = _row(result.tables["every: QuartzNet"], "ckptstore, save_async")
    assert window.numbers["durable"] == window.numbers["saves"] == 1


@pytest.mark.slow
def test_memory(space: Workspace, tmp_path: Path) -> None:
    """A save and a load are measured in a process of their own."""
    ways = ["ckptstore planes: save", "DCP: load into"]
    result = memory.run(space, sizes=[1 << 22], ways=ways, s3_sizes=[1 << 22])
    _check(result, tmp_path)
    assert [one.logical_bytes for one in result.tables["peak"]] == [1 << 22] * 4


@pytest.mark.slow
def test_filesystems(space: Workspace, tmp_path: Path) -> None:
    """What is measured on a mount runs anywhere; starting the systems is the laboratory's part."""
    state = make_state(StateSpec(bytes_min=300_000, training_steps=2))
    tables = filesystems.measure(state, space, 1)
    result = Result(benchmark="filesystems", header=header(tmp_path), parameters={})
    result.tables = {f"NFS: {name}": rows for name, rows in tables.items()}
    _check(result, tmp_path)


@pytest.mark.slow
def test_encryption(space: Workspace, tmp_path: Path) -> None:
    """With a key and without, everything comes back, and both are compared."""
    result = encryption.run(space, bytes_min=300_000, rounds=1, training_steps=2)
    _check(result, tmp_path)
    for rows in result.tables.values():
        assert [one.name for one in rows][:2] == ["raw", "raw, encrypted"]
        assert all(one.numbers["processor_s"] > 0 for one in rows)


@pytest.mark.slow
def test_serve(space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All servers send the exported bytes; without nginx the suite says so and goes on."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    result = serve.run(space, bytes_min=300_000, rounds=1)
    for rows in result.tables.values():
        assert "not installed" in rows.pop(0).error
        assert all(one.numbers["processor_s"] >= 0 for one in rows)
    _check(result, tmp_path)


def test_codecs(space: Workspace, tmp_path: Path) -> None:
    """Every codec gives back what it got, and planes beat plain zstd on trained weights."""
    result = codecs.run(space, bytes_min=1 << 20, rounds=1, training_steps=2)
    _check(result, tmp_path)
    rows = result.tables["fp32 master weights"]
    ours, plain = (
        _row(rows, name).numbers["stored_bytes"]
        for name in ("ckptstore auto", "zstd -1, bytes as they are")
    )
    assert ours < plain


@pytest.mark.slow
def test_catalog(space: Workspace, tmp_path: Path) -> None:
    """Commits of two processes all arrive; the log is sound; history costs no request of gc."""
    result = catalog.run(
        space, versions=300, tensors=50, commits=8, rounds=1, chunks=300,
        histories=[(400, 60), (1200, 60)], processes=(2,),
    )  # fmt: skip
    _check(result, tmp_path)
    assert sum(result.facts["cold ls"]["after a snapshot"].values()) == 5
    for fork in (one.numbers for one in result.tables["fork"]):
        assert fork["read_bytes"] == fork["manifest_bytes"]
    few, many = (one.numbers for one in result.tables["collections"])
    assert few["requests"] == many["requests"]


@pytest.mark.slow
def test_scale(space: Workspace, tmp_path: Path) -> None:
    """Simulated writers all commit; equal seeds give equal figures; no one really waits."""
    sizes: dict[str, Any] = {
        "writers": [3, 12], "trainings": 4, "intervals_s": [60.0], "ranks": [2],
    }  # fmt: skip
    result = scale.run(space, **sizes)
    _check(result, tmp_path)
    assert [one.numbers["commits"] for one in result.tables["at once"]] == [3, 12, 3, 12]
    assert all(one.numbers["gave_up"] == 0 for one in result.tables["spread"])
    again = scale.run(space, **sizes)
    for name in ("at once", "spread"):
        before, after = ([one.numbers for one in each.tables[name]] for each in (result, again))
        assert before == after


@pytest.mark.slow
def test_failures(space: Workspace, tmp_path: Path) -> None:
    """No provoked failure is passed off as success by ckptstore, and the peers' rows are there."""
    result = failures.run(space, flips=5, tries=1)
    _check(result, tmp_path)
    rows = result.facts["rows"]
    assert [row for row in rows if row["tool"].startswith("ckptstore") and row["silent"]] == []
    assert {row["tool"] for row in rows} >= {"torch.save", "safetensors", "DCP", "ckptstore"}
    for fault in ("ENOSPC in threads", "HTTP 500", "connection cut", "server dead"):
        told = [row for row in rows if row["fault"].startswith(fault)]
        assert {row["tool"].split()[0].rstrip(",") for row in told} == {"DCP", "ckptstore"}


@pytest.mark.slow
def test_async(space: Workspace, tmp_path: Path) -> None:
    """Saves in the background go on beside a training; no failure is passed off as success."""
    result = async_saves.run(
        space, bytes_min=300_000, rounds=1, training_steps=2, window_s=0.05, saves=1, tries=1
    )
    _check(result, tmp_path)
    rows = result.facts["rows"]
    assert [row for row in rows if row["tool"].startswith("ckptstore") and row["silent"]] == []
    assert _row(result.tables["stall"], "ckptstore, process").numbers["durable_s"] > 0


@pytest.fixture
def endpoint(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a server to the suites that need one."""
    for name, value in {
        "AWS_ENDPOINT_URL": moto_server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("endpoint")
def test_s3(space: Workspace, tmp_path: Path) -> None:
    """All ways to keep a state on S3 load what they saved."""
    result = s3.run(space, bytes_min=300_000, rounds=1, training_steps=2)
    assert result is not None
    _check(result, tmp_path)


@pytest.mark.slow
def test_bytes(space: Workspace, tmp_path: Path) -> None:
    """Over slow connections, a client loads what it saved, with requests late or refused too."""
    result = byte_paths.run(
        space, bytes_min=300_000, rounds=1, training_steps=2, widths=(4,), ways=("ckptstore raw",),
        bytes_per_s=100e6, slow_s=0.1,
    )  # fmt: skip
    _check(result, tmp_path)
    for name in ("save", "load", "save, no limit", "load, no limit", "slow", "busy"):
        rows = result.tables[name]
        assert {one.name.partition(":")[0] for one in rows} == {"ckptstore raw"}
        assert all(one.numbers["requests"] > 0 for one in rows)
    assert {one.numbers["width"] for one in result.tables["width"]} == {4}
    assert min(result.facts["bound"].values()) > 0


@pytest.mark.slow
def test_sharing(space: Workspace, tmp_path: Path) -> None:
    """Ranks that share load what was saved, and the server sends them it once."""
    result = sharing.run(
        space, bytes_min=3_000_000, rounds=1, training_steps=2, ranks=2, paces=("no limit",)
    )
    _check(result, tmp_path)
    rows = result.tables["no limit"]
    sent = {one.name: one.numbers["sent_states"] for one in rows}
    assert sent["each rank by itself"] > 1.9
    assert max(sent["group=WORLD"], sent["cache_folder"]) < 1.2


@pytest.mark.slow
@pytest.mark.usefixtures("endpoint")
def test_link(space: Workspace, tmp_path: Path) -> None:
    """Behind a link are measured saves, loads, and replications that are what was asked for."""
    plan = {"bytes_min": 300_000, "rounds": 1, "training_steps": 2}
    bucket = Bucket()
    result = link.measure(space, bucket, "moto", plan)
    bucket.remove()
    _check(result, tmp_path)
    assert set(result.tables) == {"save", "load", "replicate", "replicate, read back"}
    assert _row(result.tables["replicate, read back"], "replicate, threads").seconds


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and tc")
def test_a_link_holds_back_one_port() -> None:
    """Each direction of one port has the rate that was asked for, all else as good as none."""
    program = (
        "import subprocess; from benchmarks.link import limited; limited(7480, bits_per_s=10**9)\n"
        "for what in ('class', 'filter'):\n"
        "    subprocess.run(['tc', what, 'show', 'dev', 'lo'], check=True)"
    )
    command = ["unshare", "--net", sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("rate 1Gbit") == 2
    assert printed.count("rate 100Gbit") == 1
    for match, flow in (("00001d38/0000ffff at 20", "1:2"), ("1d380000/ffff0000 at 20", "1:3")):
        assert match in printed.split(f"flowid {flow}")[1].split("flowid")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("endpoint")
def test_replicate(space: Workspace, tmp_path: Path) -> None:
    """Every engine brings the version, and a repetition takes under 10 requests and no pack."""
    result = replicate.run(
        space, bytes_min=300_000, rounds=1, calls=2, versions=(1,), chunks=100, training_steps=2
    )
    assert result is not None
    _check(result, tmp_path)
    requests = result.facts["requests"]
    assert requests["first"]["open_writer"] > 0
    assert sum(requests["again"].values()) < 10
    assert "open_writer" not in requests["again"]
