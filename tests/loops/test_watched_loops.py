"""Witnesses of Accelerate and Lightning: one option, and a resume is proved or its gap named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.callbacks import ModelCheckpoint

from ckptstore.errors import InvalidInputError
from ckptstore.integrations.accelerate import load_state, save_state, watched
from ckptstore.integrations.lightning import CkptStoreCallback, CkptStoreIO
from ckptstore.store import Run, Store

pytestmark = pytest.mark.usefixtures("generators_stay")

ROWS: Any = torch.linspace(-1, 1, 48).reshape(-1, 4)
EXACT = {"verdict": "exact", "steps": 3, "names": []}


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))


def _told(run: Run) -> list[Any]:
    return [one.metadata["resumed"] for one in run if "resumed" in one.metadata]


class Training:
    """A training under Accelerate."""

    def __init__(self, seed: int, rows: Any = ROWS) -> None:
        for singleton in (AcceleratorState, PartialState, GradientState):
            singleton._reset_state()
        torch.manual_seed(seed)
        self.accelerator = Accelerator(cpu=True)
        net = _net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            net, optimizer, loader, schedule
        )

    def epoch(self, count: int = 6) -> None:
        """Train on batches; evaluate between two steps, which draws nothing."""
        for batch, _ in zip(self.loader, range(count), strict=False):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.model.eval()(batch + 1)
                self.model.train()


@pytest.mark.parametrize("forgotten", ["", "scheduler", "order"])
def test_accelerate_proves_a_resume(store: Store, forgotten: str) -> None:
    """Around the loop, without a call in it: exact; a scheduler or the order of data is named."""
    run = store.run("gpt")
    first = Training(1)
    with watched(first.accelerator, run) as witness:
        first.epoch()
        save_state(first.accelerator, run, step=6, metadata={"by": "test"})
        first.epoch()
        assert witness.report is None
    assert {"by", "witness"} <= run.resolve("latest").metadata.keys()

    second = Training(2, ROWS.flip(0) if forgotten == "order" else ROWS)
    load_state(second.accelerator, run)
    if forgotten == "scheduler":
        second.schedule.load_state_dict({**second.schedule.state_dict(), "last_epoch": 0})
    with watched(second.accelerator, run) as witness:
        second.epoch()
    (told,) = _told(run)
    if forgotten == "scheduler":
        assert (told["steps"], told["names"][0]) == (0, "schedulers_0.last_epoch")
    elif forgotten == "order":
        assert (told["steps"], told["names"][0]) == (1, "the data")
    else:
        assert told == EXACT
    assert witness.report is not None
    before = len(_told(run))
    second.epoch()  # without hooks now
    save_state(second.accelerator, run, step=12)
    assert (len(_told(run)), "witness" in run.resolve("latest").metadata) == (before, False)


def test_a_witness_belongs_to_one_run(store: Store) -> None:
    """Saves to other runs get none; without an optimizer there is no step to compare."""
    training = Training(1)
    with watched(training.accelerator, store.run("gpt")):
        training.epoch(1)
        other = save_state(training.accelerator, store.run("other"), step=1)
    assert "witness" not in other.metadata
    PartialState._reset_state()
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    with (
        pytest.raises(InvalidInputError, match="no optimizer"),
        watched(accelerator, store.run("gpt")),
    ):
        pass


class Module(pl.LightningModule):  # type: ignore[misc]  # not followed by mypy
    """A module of Lightning; the name of its net may be compiled."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.net: Any = torch.compile(_net(), backend="eager") if compiled else _net()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def _fit(
    store: Store, folder: Path, epochs: int, *, module: Any = None, resume: str | None = None,
    rng: bool = True, every: int | None = None, background: bool = False,
) -> pl.Trainer:  # fmt: skip
    io = CkptStoreIO(store, "gpt", background=background)
    saving = {"every_n_train_steps": every} if every else {"save_on_train_epoch_end": True}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, plugins=[io], logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[
            CkptStoreCallback(io, rng=rng, witness=True),
            ModelCheckpoint(dirpath=folder / "named", save_top_k=-1, **saving),
        ],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2, shuffle=True)
    trainer.fit(module or Module(), loader, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("forgotten", ["", "rng", "scheduler"])
@pytest.mark.short(r"(-|rng-)?False")
def test_lightning_proves_a_resume(
    store: Store, tmp_path: Path, forgotten: str, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an option of the callback: exact; without generators or a scheduler, that is said."""
    torch.manual_seed(1)
    _fit(store, tmp_path, 3, background=background)
    torch.manual_seed(2)
    if forgotten == "scheduler":
        kind = torch.optim.lr_scheduler.StepLR
        monkeypatch.setattr(kind, "load_state_dict", lambda *_: None)
    _fit(store, tmp_path, 3, resume="gpt@12", rng=forgotten != "rng")
    (told,) = _told(store.run("gpt"))
    if forgotten == "rng":
        assert told["names"][0] == "the generator of torch"
    elif forgotten == "scheduler":
        assert told["names"][0].startswith("schedule_0.")
    else:
        assert told == EXACT


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_other_data_in_an_epoch_are_named(store: Store, tmp_path: Path) -> None:
    """A loader without a state begins with its first batch again: the witness says so."""
    torch.manual_seed(1)
    _fit(store, tmp_path, 1, every=3)
    _fit(store, tmp_path, 1, resume="gpt@3", every=3)
    (told,) = _told(store.run("gpt"))
    assert told["steps"] == 1
    assert "the data" in told["names"][:2]  # after gradients, which Lightning clears later


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_module_of_lightning_has_clean_names(
    store: Store, tmp_path: Path, compiled: bool
) -> None:
    """Saved compiled and resumed as written, or the other way round, with the same bits."""
    torch.manual_seed(1)
    _fit(store, tmp_path, 1, module=Module(compiled))
    names = [*store.load("gpt")["state_dict"]]
    assert "net.0.weight" in names
    assert not [name for name in names if "_orig_mod" in name]

    other = Module(not compiled)
    trainer = _fit(store, tmp_path, 1, module=other, resume="gpt@latest")
    saved = store.load("gpt")["state_dict"]
    mine = {name.replace("_orig_mod.", ""): one for name, one in other.state_dict().items()}
    assert trainer.current_epoch == 1
    assert all(torch.equal(mine[name], saved[name]) for name in saved)
