"""DeepSpeed's universal checkpoints: imported, exported, and resumed from by DeepSpeed itself.

Other libraries change where DeepSpeed is installed, so ``make test-all`` gives it an environment of
its own beside theirs, if a C++ compiler is there. The other tests write the files that DeepSpeed
0.19.8 wrote.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.cli.main import run as command
from ckptstore.errors import ConflictError, FormatError, InvalidInputError, PolicyError, StateError
from ckptstore.integrations.files import export_universal, import_file
from ckptstore.integrations.weights import load_weights
from ckptstore.store import Store

ENVIRONMENT = Path(sys.prefix) / "deepspeed"
PYTHON = str(ENVIRONMENT / "bin" / "python")


class Scaler:
    """A class in a pickle, as DeepSpeed's files about the whole have."""


def weights() -> dict[str, torch.Tensor]:
    """Return the weights of a small model."""
    torch.manual_seed(1)
    return {name: one.detach() for name, one in torch.nn.Linear(3, 2).named_parameters()}


def written(folder: Path, *, flat: bool) -> Path:
    """Write a universal checkpoint as of ZeRO 3 (`flat`), or of ZeRO 1 and 2."""
    for name, value in weights().items():
        (folder / "zero" / name).mkdir(parents=True)
        for at, kind in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
            one = value + at
            content = one.reshape(-1) if flat else {"cat_dim": 0, "param": one}
            torch.save(content, folder / "zero" / name / f"{kind}.pt")
        if not flat:
            torch.save(torch.tensor(4.0), folder / "zero" / name / "step.pt")
    torch.save({"loss_scaler": Scaler()}, folder / "zero" / "optimizer_state.pt")
    shapes = [collections.OrderedDict((name, one.shape) for name, one in weights().items())]
    about = {"global_steps": 4, "param_shapes": shapes, "lr_scheduler": None}
    for rank in range(2 if flat else 1):
        torch.save(about, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (folder / "empty").touch()
    return folder


def content(folder: Path) -> dict[str, Any]:
    """Return all files of a folder: those of parameters as values, others as bytes."""
    found: dict[str, Any] = {}
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = str(file.relative_to(folder))
        parameter = name.startswith("zero/") and name.count("/") == 2
        found[name] = torch.load(file) if parameter else file.read_bytes()
    return found


def assert_equal(one: Any, other: Any) -> None:
    """Assert that two folders, or states, hold the same."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("flat", [False, True])
def test_a_folder_comes_back_and_its_weights_load(store: Store, tmp_path: Path, flat: bool) -> None:
    """Export writes what import read; the version says its step, and any model gets its weights."""
    folder = written(tmp_path / "universal", flat=flat)
    version = import_file(store, folder, run="gpt")
    assert version.step == 4
    assert version.metadata["import"]["format"] == "deepspeed universal"
    before = os.umask(0o077)
    made = export_universal(store, "gpt@latest", tmp_path / "out" / "step4")
    os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o700
    assert_equal(content(folder), content(made))
    assert (tmp_path / "out" / "latest_universal").read_text() == "step4"
    model = torch.nn.Linear(3, 2)
    load_weights(model, store.run("gpt"))
    assert_equal(weights(), dict(model.state_dict()))
    states = store.load("gpt@latest")["optimizer"]["state"]
    assert torch.equal(states["weight"]["exp_avg"], weights()["weight"] + 1)


def test_a_fork_and_later_versions_share_what_is_equal(store: Store, tmp_path: Path) -> None:
    """A second import of equal files stores none of their tensors; a fork exports as its origin."""
    folder = written(tmp_path / "universal", flat=True)
    import_file(store, folder, run="gpt")
    again = import_file(store, folder, run="gpt", step=5)
    assert again.receipt["shared_bytes"] == again.receipt["logical_bytes"] > 0
    store.fork("gpt@4", "other")
    assert_equal(content(folder), content(export_universal(store, "other@4", tmp_path / "out")))


def test_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``import`` follows ``latest_universal``; ``export --deepspeed`` writes a fork's folder."""
    folder = written(tmp_path / "zero" / "universal", flat=False)
    (tmp_path / "zero" / "latest_universal").write_text("universal")
    url = str(tmp_path / "ckpts")
    assert command(["-s", url, "init"]) == 0
    assert command(["-s", url, "import", str(tmp_path / "zero"), "gpt"]) == 0
    assert command(["-s", url, "fork", "gpt@latest", "tuned"]) == 0
    export = ["-s", url, "export", "tuned@latest", str(tmp_path / "out" / "u"), "--deepspeed"]
    assert command([*export, "--include", "model"]) == 2
    assert command(export) == 0
    assert "of tuned@" in capsys.readouterr().out
    assert_equal(content(folder), content(tmp_path / "out" / "u"))


def test_what_is_refused(store: Store, tmp_path: Path) -> None:
    """Partitions, classes in pickles, other versions, names out of the folder: nothing is made."""
    (tmp_path / "zero").mkdir()
    torch.save({}, tmp_path / "zero" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(InvalidInputError, match=r"partitions.*ds_to_universal"):
        import_file(store, tmp_path / "zero", run="gpt", step=1)
    folder = written(tmp_path / "universal", flat=False)
    out = tmp_path / "out" / "u"
    store.run("plain").save({"model": weights()}, step=1)
    with pytest.raises(StateError, match="no universal checkpoint"):
        export_universal(store, "plain@1", out)
    store.run("alike").save({"universal": {"files": {}}}, step=1)
    with pytest.raises(StateError, match="no universal checkpoint"):
        export_universal(store, "alike@1", out)
    import_file(store, folder, run="gpt")
    store.fork("gpt@4", "weights", include=["model", "universal"])
    with pytest.raises(StateError, match="no such 'optimizer'"):
        export_universal(store, "weights@4", out)
    state = store.load("gpt@4")
    state["universal"]["files"]["../escaped"] = torch.zeros(1, dtype=torch.uint8)
    store.run("bad").save(state, step=1)
    with pytest.raises(InvalidInputError, match="outside"):
        export_universal(store, "bad@1", out)
    assert not list(out.parent.glob("*"))
    with pytest.raises(ConflictError, match="is there already"):
        export_universal(store, "gpt@4", folder)
    (folder / "linked").symlink_to(tmp_path / "zero")
    (folder / "latest").symlink_to("/etc/hostname")
    with pytest.raises(InvalidInputError, match="leads out of its folder"):
        import_file(store, folder, run="gpt", step=5)
    (folder / "latest").unlink()
    torch.save({"param": torch.zeros(2), "x": Scaler()}, folder / "zero" / "bias" / "fp32.pt")
    with pytest.raises(PolicyError, match="weights_only"):
        import_file(store, folder, run="gpt", step=5)
    torch.save({"x": 1}, folder / "zero" / "bias" / "fp32.pt")
    with pytest.raises(FormatError, match="no entry 'param'"):
        import_file(store, folder, run="gpt", step=5)
    assert [version.step for version in store.versions("gpt")] == [4]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (ENVIRONMENT / ".made").exists(), reason="make test-all installs DeepSpeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_resumes_at_another_number_of_ranks(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    ranks: Callable[..., list[int]],
    stage: int,
) -> None:
    """From an exported folder 1 and 2 ranks have the bits of 2, and 2 the same losses too."""
    program = "deepspeed_ranks.py"
    # What torch compiles at home is locked for ever by a process that was killed meanwhile.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.getbasetemp() / "extensions"))

    def trained(count: int, tag: str, name: str) -> Any:
        out = str(tmp_path / name)
        assert ranks(program, count, str(stage), tag, out, python=PYTHON) == [0] * count
        return torch.load(out)

    first = trained(2, "-", "first.pt")
    convert = [PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    convert += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    places = ["--input_folder", f"{tmp_path}/zero/global_step4", "--output_folder"]
    around = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([*convert, *places, str(tmp_path / "universal")], env=around, check=True)
    with ckptstore.open(tmp_path / "ckpts", create=True) as store:
        import_file(store, tmp_path / "universal", run="gpt")
        export_universal(store, "gpt@4", tmp_path / "exported" / "u4")
    (tmp_path / "exported" / "direct").symlink_to(tmp_path / "universal")
    direct = trained(2, "direct", "direct.pt")
    for count in (1, 2):
        found = trained(count, "u4", f"resumed-{count}.pt")
        assert found["steps"].tolist() == [4, 8]
        assert_equal(first["last"], found["first"])
        if count == 2:
            assert found["losses"].tolist() == direct["losses"].tolist()
            assert_equal(direct["last"], found["last"])
