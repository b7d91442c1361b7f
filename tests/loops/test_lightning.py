"""Lightning on a store: resume, refs for ckpt_path, top-k, metrics, what is refused, preemption."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from heldback import BrokenBackend

import ckptstore
from ckptstore.backends.registry import open_backend
from ckptstore.catalog.lifecycle_ops import Delete
from ckptstore.errors import (
    InvalidInputError,
    MissingDependencyError,
    StateError,
    StorageFullError,
    VersionNotFoundError,
)
from ckptstore.integrations.lightning_loop import LoopIO
from ckptstore.integrations.preemption import Preemption
from ckptstore.repo import create_on
from ckptstore.store import Store

BATCHES = 5

pytestmark = pytest.mark.usefixtures("_nothing_pickled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One of the two packages that Lightning comes as, and what goes with it."""

    pl: Any
    callbacks: Any
    ckpt: Any
    root: Path

    def model(self, **hyper: Any) -> Any:
        return _model_class(self.pl)(**{"lr": 0.002, **hyper})

    def trainer(self, io: LoopIO | None, *extra: Any, epochs: int = 2, **options: Any) -> Any:
        """Return a quiet trainer on the CPU."""
        callbacks = [*extra]
        if io is not None:
            options["plugins"] = [io]
            callbacks.append(self.ckpt.CkptStoreCallback(io))
        return self.pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, callbacks=callbacks, logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=self.root,
            **options,
        )  # fmt: skip

    def keep(self, **options: Any) -> Any:
        return self.callbacks.ModelCheckpoint(dirpath=self.root / "named", **options)

    def io(self, store: Store, **options: Any) -> Any:
        return self.ckpt.CkptStoreIO(store, "gpt", metrics={"val_loss": "min"}, **options)


def _model_class(pl: Any) -> Any:
    class Tiny(pl.LightningModule):  # type: ignore[misc]
        """Two layers with dropout, so that a wrong random state shows in the losses."""

        def __init__(self, **hyper: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.body = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
            )
            self.losses: list[float] = []
            self.after: Callable[[int], object] = lambda _: None

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.body(batch).square().mean()
            self.losses.append(loss.item())
            self.log("train_loss", loss)
            self.after(self.global_step + 1)
            return loss

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("val_loss", self.body(batch).square().mean())
            self.log("falling", 1 / (self.current_epoch + 1))

        def test_step(self, batch: torch.Tensor) -> None:
            self.log("test_loss", self.body(batch).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Tiny


def _data(*, shuffle: bool = False) -> Any:
    values = torch.linspace(-1, 1, BATCHES * 2 * 4).reshape(-1, 4)
    rows: Any = values
    return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=shuffle)


def _package(name: str, root: Path) -> Package:
    pl = importlib.import_module("lightning.pytorch" if name == "lightning" else name)
    return Package(
        pl=pl,
        callbacks=importlib.import_module(f"{pl.__name__}.callbacks"),
        ckpt=importlib.import_module(f"ckptstore.integrations.{name}"),
        root=root,
    )


@pytest.fixture
def kit(tmp_path: Path) -> Package:
    """Return the package ``lightning``."""
    return _package("lightning", tmp_path)


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Package:
    """Return each package in turn."""
    return _package(request.param, tmp_path)


@pytest.fixture(autouse=True)
def _sigterm_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


def _fit(kit: Package, io: LoopIO | None, epochs: int, **options: Any) -> Any:
    """Train a new model; return it."""
    model = kit.model()
    extra = [] if io is None else [kit.keep(save_top_k=-1, monitor="val_loss")]
    trainer = kit.trainer(io, *extra, epochs=epochs)
    trainer.fit(model, _data(shuffle=True), _data(), **options)
    return model


@pytest.mark.short(sample=1)
def test_a_resumed_fit_has_the_same_losses(either: Package, store: Store) -> None:
    """Two epochs, all objects new, two more: the losses of four in one go, bit for bit."""
    either.pl.seed_everything(7, verbose=False)
    whole = _fit(either, either.io(store), 4)
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    store.fork("gpt@10", "again")  # the version after two epochs
    io = either.ckpt.CkptStoreIO(store, "again")
    either.pl.seed_everything(99, verbose=False)

    resumed = _fit(either, io, 4, ckpt_path=io.resume)

    assert resumed.losses == whole.losses[2 * BATCHES :]
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, weights[name]), name


class Position:
    """A loader that knows where it is, as torchdata's does; each epoch draws its own order."""

    def __init__(self) -> None:
        self.rows = torch.linspace(-1, 1, BATCHES * 2 * 4).reshape(BATCHES, 2, 4)
        self.at = 0
        self.order: list[int] = []

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(1)  # to begin costs a draw, as with the loaders of torch
        if not 0 < self.at < BATCHES:
            self.at = 0
            self.order = torch.randperm(BATCHES).tolist()
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            self.at += 1
            yield self.rows[self.order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


def test_a_fit_goes_on_in_the_middle_of_an_epoch(kit: Package, store: Store) -> None:
    """With a loader that knows where it is, the losses are those of a fit in one go."""
    keep = {"every_n_train_steps": 3, "save_top_k": -1}
    io = kit.io(store)
    whole = kit.model()
    kit.trainer(io, kit.keep(**keep), epochs=2).fit(whole, Position(), _data())
    resumed = kit.model()
    io = kit.io(store)

    kit.trainer(io, kit.keep(**keep), epochs=2).fit(resumed, Position(), _data(), ckpt_path="gpt@3")

    assert resumed.losses == whole.losses[3:]


def test_a_first_fit_has_nothing_to_resume(kit: Package, store: Store) -> None:
    """The same line of code starts and resumes: before the first save it gives None."""
    io = kit.io(store)
    assert io.resume is None
    _fit(kit, io, 1, ckpt_path=io.resume)
    assert io.resume == f"#{store.resolve('gpt').id}"


def test_versions_have_the_metrics_of_their_moment(kit: Package, store: Store) -> None:
    """What the trainer logged is a version's metrics, so that refs and retention can use it."""
    _fit(kit, kit.io(store), 3)

    versions = store.versions("gpt")
    assert [version.step for version in versions] == [5, 10, 15]
    assert [sorted(version.metrics) for version in versions] == [
        ["falling", "train_loss", "val_loss"]
    ] * 3
    assert len({version.metrics["val_loss"] for version in versions}) == 3
    assert versions[0].metadata["lightning"]["epoch"] == 0
    lowest = min(versions, key=lambda version: version.metrics["val_loss"])
    assert store.resolve("gpt@best:val_loss").id == lowest.id


def test_a_version_has_no_metric_of_other_weights(kit: Package, store: Store) -> None:
    """A validation some steps before says nothing about what is saved now."""
    io = kit.io(store)
    trainer = kit.trainer(io, kit.keep(every_n_train_steps=3, save_top_k=-1))
    trainer.fit(kit.model(), _data(), _data())
    trainer.save_checkpoint("end")

    versions = store.versions("gpt")
    assert [version.step for version in versions] == [3, 6, 9, 10]
    assert [sorted(version.metrics) for version in versions[:3]] == [["train_loss"]] * 3
    assert sorted(versions[3].metrics) == ["falling", "train_loss", "val_loss"]


def test_who_forgets_the_callback_is_told(
    kit: Package, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it: no metrics, no random state; said once, when the first version is saved."""
    io = kit.io(store)
    trainer = kit.trainer(None, kit.keep(), plugins=[io])
    trainer.fit(kit.model(), _data(), _data())

    said = [record for record in caplog.records if record.name == "ckptstore"]
    assert [record.getMessage()[:44] for record in said] == [
        "metrics are not saved, nor is random state: "
    ]
    assert [dict(version.metrics) for version in store.versions("gpt")] == [{}]


@pytest.mark.parametrize(
    "ref", ["gpt@best:val_loss", "gpt@5", "best:val_loss", "gpt@latest-valid", "gpt", "#"]
)
@pytest.mark.short(sample=2)
def test_refs_are_paths_for_validate_and_test(kit: Package, store: Store, ref: str) -> None:
    """``ckpt_path`` takes any ref of the store; the weights are those of that version."""
    io = kit.io(store)
    _fit(kit, io, 2)
    if ref == "#":
        ref += store.resolve("gpt@5").id[:8]
    wanted = store.run("gpt").load("latest" if ref == "gpt" else ref.removeprefix("gpt@"))

    for entry in ("validate", "test"):
        model = kit.model()
        trainer = kit.trainer(io, kit.keep(monitor="val_loss"))
        getattr(trainer, entry)(model, _data(), ckpt_path=ref, verbose=False)
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted["state_dict"][name]), (entry, name)


def test_a_version_aged_to_its_weights_can_be_tested(kit: Package, store: Store) -> None:
    """Retention takes the optimizer away; validation and hyper-parameters need none."""
    io = kit.io(store)
    _fit(kit, io, 2)
    store.age(["gpt@5"], "weights")

    state = store.load("gpt@5")
    assert "optimizer_states" not in state
    model = kit.model(**state["hyper_parameters"])
    trainer = kit.trainer(io, kit.keep(monitor="val_loss"))
    trainer.test(model, _data(), ckpt_path="gpt@5", verbose=False)
    assert torch.equal(model.body[0].weight, state["state_dict"]["body.0.weight"])


def test_names_that_lightning_gave_are_paths(kit: Package, store: Store) -> None:
    """``ckpt_path="best"`` and ``best_model_path`` mean the version, though no file is there."""
    io = kit.io(store)
    keep = kit.keep(monitor="val_loss")
    trainer = kit.trainer(io, keep)
    model = kit.model()
    trainer.fit(model, _data(), _data())

    trainer.test(model, _data(), ckpt_path="best", verbose=False)
    trainer.validate(model, _data(), ckpt_path=keep.best_model_path, verbose=False)

    assert not list(kit.root.rglob("*.ckpt"))


@pytest.mark.parametrize("path", ["elsewhere/epoch=3.ckpt", "gpt@77", "nobody@latest", "#00000000"])
def test_a_path_that_names_nothing_is_told(kit: Package, store: Store, path: str) -> None:
    """A misspelled ref is an error that says what would have been one, never a silent restart."""
    io = kit.io(store)
    _fit(kit, io, 1)
    with pytest.raises(VersionNotFoundError, match="neither a ref nor a path"):
        _fit(kit, io, 2, ckpt_path=path)


def test_a_version_of_another_loop_is_told(kit: Package, store: Store) -> None:
    """It is a state, but none that a trainer could go on from."""
    store.run("other").save({"model": {"w": torch.ones(1)}}, step=1)
    with pytest.raises(StateError, match="not saved by Lightning"):
        _fit(kit, kit.io(store), 1, ckpt_path="other@latest")


def test_top_k_deletes_by_commits(kit: Package, store: Store) -> None:
    """What falls out of the best two is deleted in the log, and can be undeleted."""
    io = kit.io(store)
    trainer = kit.trainer(io, kit.keep(save_top_k=2, monitor="falling"), epochs=5)
    trainer.fit(kit.model(), _data(), _data())

    left = store.versions("gpt")
    deleted = [op for commit in store.log() for op in commit.ops if isinstance(op, Delete)]
    assert len(left) == 2
    assert len(deleted) == 3
    assert all("Lightning" in op.reason for op in deleted)
    back = store.undelete(["gpt@5"])
    assert back[0].metrics["falling"] > max(version.metrics["falling"] for version in left)


@pytest.mark.parametrize("kept", [-1, 3])
def test_names_that_are_taken_get_another(kit: Package, store: Store, kept: int) -> None:
    """As Lightning does with files: as many versions as it keeps checkpoints, each of its name."""
    io = kit.io(store)
    keep = kit.keep(filename="best", save_top_k=kept, monitor="falling")
    trainer = kit.trainer(io, keep, epochs=4)
    trainer.fit(kit.model(), _data(), _data())

    paths = {version.metadata["lightning"]["path"] for version in store.versions("gpt")}
    assert paths == {*keep.best_k_models}
    assert len(paths) == (4 if kept < 0 else kept)


def test_removals_can_be_left_to_a_policy(kit: Package, store: Store) -> None:
    """Where the store decides what stays, ModelCheckpoint's removals mean nothing."""
    io = kit.io(store, remove="keep")
    trainer = kit.trainer(io, kit.keep(save_top_k=1, monitor="falling"), epochs=4)
    trainer.fit(kit.model(), _data(), _data())
    assert len(store.versions("gpt")) == 4


def test_a_tagged_version_is_not_removed(kit: Package, store: Store) -> None:
    """What someone has tagged stays, although Lightning removed it."""
    io = kit.io(store)
    model = kit.model()
    model.after = lambda step: store.tag("gpt@5", "paper") if step == 6 else None
    trainer = kit.trainer(io, kit.keep(save_top_k=1, monitor="falling"), epochs=3)
    trainer.fit(model, _data(), _data())

    assert [version.step for version in store.versions("gpt")] == [5, 15]


def test_saving_last_keeps_one_last(kit: Package, store: Store) -> None:
    """``last.ckpt`` is one name: the version that it named before is deleted."""
    io = kit.io(store)
    trainer = kit.trainer(io, kit.keep(save_top_k=0, save_last=True), epochs=3)
    trainer.fit(kit.model(), _data(), _data())

    assert [version.step for version in store.versions("gpt")] == [15]
    again = kit.trainer(io, kit.keep(save_top_k=0, save_last=True), epochs=4)
    again.fit(kit.model(), _data(), _data(), ckpt_path=io.resume)
    assert [version.step for version in store.versions("gpt")] == [20]


def test_a_link_to_the_last_file_is_refused(kit: Package, store: Store) -> None:
    """There is no file to link to: it is told before the training begins."""
    trainer = kit.trainer(kit.io(store), kit.keep(save_last="link"), epochs=1)
    with pytest.raises(InvalidInputError, match="save_last='link'"):
        trainer.fit(kit.model(), _data(), _data())


def test_saves_in_the_background(kit: Package, store: Store) -> None:
    """The same versions are there when the fit returns, the replaced ones deleted."""
    io = kit.io(store, background=True)
    trainer = kit.trainer(io, kit.keep(save_top_k=1, monitor="falling"), epochs=3)
    model = kit.model()
    trainer.fit(model, _data(), _data())

    assert [version.step for version in store.versions("gpt")] == [15]
    state = store.load("gpt@latest")["state_dict"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_version_stays_if_the_save_that_replaces_it_fails(kit: Package, tmp_path: Path) -> None:
    """What Lightning replaced or removed during a save in the background goes only if that ends."""
    switch = tmp_path / "broken"
    backend = BrokenBackend(open_backend(tmp_path / "s", retry=False), errno.ENOSPC, switch)
    with Store(create_on(backend)) as store:
        io = kit.io(store, background=True)

        def save(path: str, step: int) -> None:
            weights = {"w": torch.full((1000,), float(step))}
            io.save_checkpoint({"state_dict": weights, "global_step": step}, path)

        for step, path in enumerate(("last", "worst", "best"), 1):
            save(path, step)
        io.teardown()
        switch.touch()
        save("last", 4)
        io.remove_checkpoint("worst")
        with pytest.raises(StorageFullError):
            io.teardown()
        io.teardown()
        assert [version.step for version in store.versions("gpt")] == [1, 2, 3]
        switch.unlink()
        save("last", 5)
        io.remove_checkpoint("best")
        io.teardown()
        assert [version.step for version in store.versions("gpt")] == [2, 5]
        save("last", 6)
        assert io.has_saved("last")
        save("other", 7)
        io.remove_checkpoint("last")
        io.remove_checkpoint("other")  # the head, which stays
        assert [version.step for version in store.versions("gpt")] == [2, 7]


def test_hyper_parameters_come_back(kit: Package, store: Store) -> None:
    """Plain ones are stored as they are, and a model can be made from the version alone."""
    model = kit.model(widths=[8, 1], name="tiny", nested={"path": Path("a/b"), "rate": (1, 0.5)})
    kit.trainer(kit.io(store), epochs=1).fit(model, _data(), _data())

    state = store.load("gpt@latest")
    assert state["hyper_parameters"] == dict(model.hparams)
    again = kit.model(**state["hyper_parameters"])
    again.load_state_dict(state["state_dict"])


class Opaque:
    """An object with no plain representation."""


def test_a_hyper_parameter_that_is_an_object_is_refused_by_name(kit: Package, store: Store) -> None:
    """Nothing is pickled: what cannot be represented is named by its path, and nothing is saved."""
    model = kit.model(backbone=Opaque())
    with pytest.raises(StateError, match=r"hyper_parameters\.backbone.*Opaque"):
        kit.trainer(kit.io(store), epochs=1).fit(model, _data(), _data())
    assert store.versions() == []


def test_the_state_of_a_callback_that_is_an_object_is_refused_by_name(
    kit: Package, store: Store
) -> None:
    """As with hyper-parameters."""

    class Keeps(kit.callbacks.Callback):  # type: ignore[misc,name-defined]
        def state_dict(self) -> dict[str, Any]:
            return {"kept": Opaque()}

    trainer = kit.trainer(kit.io(store), Keeps(), epochs=1)
    with pytest.raises(StateError, match=r"callbacks\..*kept"):
        trainer.fit(kit.model(), _data(), _data())


def test_save_checkpoint_takes_tags_and_metrics(kit: Package, store: Store) -> None:
    """``trainer.save_checkpoint`` passes on what a save takes; a typing error is told."""
    trainer = kit.trainer(kit.io(store), kit.keep(save_top_k=0), epochs=1)
    trainer.fit(kit.model(), _data(), _data())

    about = {"tags": ["release"], "metrics": {"bleu": 31.0}, "metadata": {"by": "me"}}
    trainer.save_checkpoint("final", storage_options=about)

    version = store.resolve("gpt@release")
    assert version.metrics["bleu"] == 31
    assert version.metadata["by"] == "me"
    with pytest.raises(InvalidInputError, match="tag"):
        trainer.save_checkpoint("final", storage_options={"tag": "release"})


def test_what_is_no_store_and_no_name_is_refused(store: Store, kit: Package) -> None:
    """A path for a store, a run for its name, a word without meaning: told before the training."""
    with pytest.raises(InvalidInputError, match="open store") as told:
        kit.ckpt.CkptStoreIO("ckpts", "gpt")
    assert told.value.hint == "give ckptstore.open('ckpts')"
    with pytest.raises(InvalidInputError, match="name of a run"):
        kit.ckpt.CkptStoreIO(store, store.run("gpt"))
    with pytest.raises(InvalidInputError, match="'delete' or 'keep'"):
        kit.io(store, remove="never")


def test_who_forgets_the_plugin_is_told(either: Package, store: Store) -> None:
    """Nothing would reach the store: the fit does not begin, and says what to pass."""
    for plugins in ([], [either.io(store)]):  # none, or another than the callback's
        callback = either.ckpt.CkptStoreCallback(either.io(store))
        trainer = either.trainer(None, callback, either.keep(), plugins=plugins)
        with pytest.raises(InvalidInputError, match="does not save with") as told:
            trainer.fit(either.model(), _data(), _data())
        assert "plugins=[io]" in (told.value.hint or "")
    assert store.runs() == []


def test_a_plugin_that_is_wrapped_is_found(kit: Package, store: Store) -> None:
    """Lightning's AsyncCheckpointIO around the plugin still saves to the store."""
    plugins = importlib.import_module(f"{kit.pl.__name__}.plugins.io")
    io = kit.io(store)
    wrapped = plugins.AsyncCheckpointIO(io)
    callback = kit.ckpt.CkptStoreCallback(io)
    trainer = kit.trainer(None, callback, kit.keep(), plugins=[wrapped])
    trainer.fit(kit.model(), _data(), _data())
    assert store.versions("gpt")


def test_preemption_saves_and_ends(kit: Package, store: Store) -> None:
    """SIGTERM in the middle of an epoch: the state of that step is saved, and the code says why."""
    io = kit.io(store)
    model = kit.model()
    model.after = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 7 else None
    with Preemption() as preemption:
        callback = kit.ckpt.CkptStoreCallback(io, preemption=preemption)
        trainer = kit.trainer(None, callback, kit.keep(), plugins=[io], epochs=50)
        with pytest.raises(SystemExit) as ended:
            trainer.fit(model, _data(), _data())

    assert ended.value.code == 143
    head = store.resolve("gpt@latest")
    assert head.step == 7
    resumed = kit.model()
    again = kit.trainer(io, kit.keep(), epochs=2)
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        again.fit(resumed, _data(), _data(), ckpt_path=io.resume)
    assert len(resumed.losses) == 2 * BATCHES - 7


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fit_in_forked_workers(tmp_path: Path, ranks: Callable[..., list[int]]) -> None:
    """The worker saves versions, and hands its weights over to the process that began it."""
    assert ranks("lightning_forked.py", 1) == [0]


@pytest.mark.slow
def test_two_ranks_end_at_one_step(tmp_path: Path, ranks: Callable[[str, int], list[int]]) -> None:
    """With DDP, SIGTERM to one rank ends both, with one version that has both random states."""
    ckptstore.open(tmp_path / "ckpts", create=True).close()

    assert ranks("lightning_ranks.py", 2) == [143, 143]

    with ckptstore.open(tmp_path / "ckpts") as opened:
        assert [version.step for version in opened.versions("gpt")] == [8]
        state = opened.load("gpt@latest")
        assert sorted(state["callbacks"]["ckptstore"]["rng"]) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_package_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lacks the library learns what to install."""
    ours = f"ckptstore.integrations.{name}"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    for theirs in ("lightning.fabric.plugins", "lightning_fabric.plugins"):
        monkeypatch.setitem(sys.modules, theirs, None)
    with pytest.raises(MissingDependencyError, match=f"{name} is not installed.*pip install"):
        importlib.import_module(ours)
