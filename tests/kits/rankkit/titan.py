"""Trainings of torchtitan's debug model on gloo ranks.

torchtitan trains on accelerators only, and asks torch for the one there is. Here torch says that it
is the CPU, and what torchtitan asks of CUDA alone (the memory of the device, its name) is answered;
its Trainer, model, FSDP2, optimizers, schedule and loop are as released.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

import ckptstore
from ckptstore.errors import InvalidInputError, RunNotFoundError, VersionNotFoundError
from ckptstore.store import Run
from rankkit.groups import Rank
from rankkit.trainers import dies_in_a_save, gathered

__all__ = ["import_without_triton", "page", "places", "resumed", "settings", "whole_and_killed"]


def told_that_cpus_count(me: Rank) -> Any:
    """Import torchtitan's trainer as if the CPU were an accelerator; return its module."""
    os.environ.update(RANK=str(me.rank), LOCAL_RANK="0", WORLD_SIZE=str(me.world))
    found = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    import_without_triton()
    from torchtitan import train
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    torch._utils._get_available_device_type = found
    nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
    )
    utils.set_pg_timeouts = lambda **_: None  # a barrier of devices, which gloo has not
    train.time = SimpleNamespace(perf_counter=train.time.perf_counter, sleep=lambda _: None)
    return train


def import_without_triton() -> None:
    """Import torchtitan where Triton is not installed, as with builds of PyTorch for CPUs.

    It decorates kernels for mixtures of experts, which are not called here.
    """
    try:
        import torchtitan
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
    else:
        return
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.language = lambda kernel: kernel, language  # type: ignore[attr-defined]
    language.constexpr = int  # type: ignore[attr-defined]
    sys.modules |= {"triton": triton, "triton.language": language}
    import torchtitan  # noqa: F401

    del sys.modules["triton"], sys.modules["triton.language"]


class Tokens(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Endless random rows, others on each rank; knows its position."""

    def __init__(self, rank: int, seq_len: int) -> None:
        self.rank = rank
        self.seq_len = seq_len
        self.position = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            seed = torch.Generator().manual_seed(self.rank * 1_000_000 + self.position)
            row = torch.randint(0, 2048, (self.seq_len + 1,), generator=seed)
            self.position += 1
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def trainer_of(me: Rank, folder: str, seed: int, losses: list[float], **config: Any) -> Any:
    """Return a Trainer of the debug model, with two of its layers; it notes the losses.

    Parameters
    ----------
    config
        Of the section ``checkpoint``.
    """
    train = told_that_cpus_count(me)
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols import train_spec

    class Heard(MetricsProcessor):  # type: ignore[misc]  # not followed by mypy
        def log(self, step: int, global_avg_loss: float, *args: Any, **words: Any) -> None:
            losses.append(global_avg_loss)
            super().log(step, global_avg_loss, *args, **words)

    def data(dp_world_size: int, dp_rank: int, tokenizer: object, job_config: Any) -> Any:
        tokens = Tokens(dp_rank, job_config.training.seq_len)
        return ParallelAwareDataloader(tokens, dp_rank, dp_world_size, batch_size=2)

    def parallelize(model: Any, *dims: Any) -> Any:
        model = spec.parallelize_fn(model, *dims)
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.set_force_sum_reduction_for_comms(True)  # gloo only sums
        return model

    spec = get_train_spec()
    small = dataclasses.replace(spec.model_args["debugmodel"], n_layers=2)
    train_spec._extra_train_specs["debug"] = dataclasses.replace(
        spec, model_args={"debugmodel": small}, parallelize_fn=parallelize, build_tokenizer_fn=None,
        build_dataloader_fn=data,
        build_metrics_processor_fn=lambda config, dims, _: Heard(config, dims),
        state_dict_adapter=None,
    )  # fmt: skip
    job = JobConfig()
    job.job.dump_folder = folder
    job.model.name, job.model.flavor = "debug", "debugmodel"
    job.metrics.log_freq = 1
    job.optimizer.implementation = "for-loop"
    job.lr_scheduler.warmup_steps = 4
    job.training.seq_len, job.training.local_batch_size, job.training.steps = 32, 2, 20
    job.training.mixed_precision_param = "float32"
    job.activation_checkpoint.mode = "none"
    job.comm.trace_buf_size = 0
    job.debug.seed = seed
    job.checkpoint.enable, job.checkpoint.last_save_model_only = True, False
    for name, value in config.items():
        setattr(job.checkpoint, name, value)
    return train.Trainer(job)


def digests(trainer: Any) -> dict[str, str]:
    """Return digests of whole weights and optimizer states, on rank 0; all ranks call it."""
    whole = gathered(trainer.model_parts[0], trainer.optimizers.optimizers[0])
    return {name: hashlib.sha256(one).hexdigest() for name, one in whole.items()}


def whole_and_killed(me: Rank, url: str, folder: str) -> None:
    """Train to step 20 without a store; then train to a store, and die in the save of step 15.

    Tells, of the first training, the losses and the states at each fifth step.
    """
    told_that_cpus_count(me)
    from ckptstore.integrations import torchtitan

    for run in (None, "llama"):
        losses: list[float] = []
        trainer = trainer_of(me, folder, 1, losses, interval=5, keep_latest_k=0)
        with ckptstore.open(url) as store:
            if run is None:
                states = _only_looks(trainer)
            else:
                _dies(me, torchtitan.store_checkpoints(trainer, store.run(run)), 15)
            trainer.train()
        me.tell((losses, states))


def _only_looks(trainer: Any) -> dict[int, dict[str, str]]:
    """Return a dict that gets the states at each fifth step, instead of a checkpoint."""
    states: dict[int, dict[str, str]] = {}

    def saves(step: int, last_step: bool = False) -> None:
        del last_step
        if step % 5 == 0:
            states[step] = digests(trainer)

    trainer.checkpointer.save = saves
    return states


def _dies(me: Rank, manager: Any, at: int) -> None:
    """Let a rank be killed in the save of a step."""
    save = manager.save

    def saves(step: int, last_step: bool = False) -> None:
        if step == at:
            dies_in_a_save(me)
        save(step, last_step)

    manager.save = saves


def resumed(
    me: Rank, url: str, folder: str, steps: int
) -> tuple[list[float], list[dict[str, str]]]:
    """Resume from the newest version, and train to a step; return losses, first and last state."""
    told_that_cpus_count(me)
    from ckptstore.integrations import torchtitan

    losses: list[float] = []
    # torchtitan does not divide the position of its data among another number of ranks
    without = [] if steps else ["dataloader"]
    trainer = trainer_of(me, folder, 99, losses, load_only=True, exclude_from_loading=without)
    with ckptstore.open(url, read_only=True) as store:
        manager = torchtitan.store_checkpoints(trainer, store.run("llama"))
        assert manager.load()
        assert trainer.step == 10
        states = [digests(trainer)]
        if steps:
            trainer.train()  # loads again
        states.append(digests(trainer))
        trainer.close()
    return losses, states


def places(me: Rank, folder: str, stores: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    """Save two steps in the background to each store, and load the first; return their versions."""
    told_that_cpus_count(me)
    from ckptstore.integrations import torchtitan

    trainer = trainer_of(me, folder, 1, [], interval=1, async_mode="async")
    data = trainer.batch_generator(trainer.dataloader)
    found = []
    for url, options in stores:
        with ckptstore.open(url, **options) as store:
            run = store.run("llama")
            manager = torchtitan.store_checkpoints(trainer, run)
            first = trainer.step + 1
            meant = []
            for _ in range(2):
                trainer.step += 1
                trainer.train_step(data)
                meant.append(digests(trainer))
                manager.save(trainer.step)
            manager._async_wait()
            assert manager.load(first)
            assert trainer.step == first
            found_again = digests(trainer)
            assert found_again == meant[0]
            assert me.rank > 0 or found_again != meant[1]
            roles = {name: role.logical for name, role in run.resolve(first).roles.items()}
            assert roles["optimizer"] > 2 * roles["weights"] > 0
            found.append([version.step - first for version in run.versions()])
    return found


def settings(me: Rank, url: str, folder: str) -> None:
    """Hold that the settings of the section ``checkpoint`` do with versions what they should."""
    told_that_cpus_count(me)
    from ckptstore.integrations import torchtitan

    trainer = trainer_of(me, folder, 1, [], interval=1, keep_latest_k=2)
    data, config = trainer.batch_generator(trainer.dataloader), trainer.job_config.checkpoint

    def train(manager: Any, until: int) -> dict[str, str]:
        while trainer.step < until:
            trainer.step += 1
            trainer.train_step(data)
            manager.save(trainer.step)
        return digests(trainer)

    def steps(run: Run) -> list[int]:
        return [version.step for version in run.versions()]

    # a folder of torchtitan's own is loaded while the run has no version
    old = train(trainer.checkpointer, 2)
    with ckptstore.open(url, create=True) as store:
        run = store.run("llama", metrics={"loss": "min"})
        manager = torchtitan.store_checkpoints(trainer, run)
        with pytest.raises(RunNotFoundError):
            manager.load(2)
        trainer.step = 0
        assert manager.load()
        assert (trainer.step, digests(trainer)) == (2, old)

        # keep_latest_k deletes by commits; tagged versions stay, and a policy of the run wins
        train(manager, 4)
        run.annotate(4, {"loss": 0.5})
        run.tag(4, "good")
        train(manager, 7)
        assert steps(run) == [4, 6, 7]
        assert store.undelete(["llama@5"])[0].step == 5
        run.set_policy({"full": "last 1, best 1 loss"})
        run.annotate(5, {"loss": 0.1})
        train(manager, 9)
        assert steps(run) == [4, 5, 9]
        assert manager.load(4)
        assert trainer.step == 4
        with pytest.raises(VersionNotFoundError):
            manager.load(6)

        # another run begins with the model of a version
        config.folder, config.initial_load_path = "other", "llama@best:loss"
        manager = torchtitan.store_checkpoints(trainer, store.run("tuned"))
        weights = store.load("llama@5", exclude=["optimizer", "dataloader", "lr_scheduler"])
        assert manager.load()
        assert trainer.step == 4
        name = "layers.1.attention.wq.weight"
        assert torch.equal(trainer.model_parts[0].state_dict()[name], weights[name])
        config.initial_load_path = None
        assert not torchtitan.store_checkpoints(trainer, store.run("tuned")).load()

        # the last version may be the model alone, in another dtype
        config.last_save_model_only, config.export_dtype = True, "bfloat16"
        torchtitan.store_checkpoints(trainer, store.run("last")).save(20, last_step=True)
        last = store.load("last@20")
        assert "optimizer" not in last
        assert last[name].dtype == torch.bfloat16

        config.last_save_in_hf = True
        with pytest.raises(InvalidInputError, match="last_save_in_hf writes a folder"):
            torchtitan.store_checkpoints(trainer, run)
        config.last_save_in_hf = False
        words: Any = {"checkpoint_config": config, "ft_manager": SimpleNamespace(enabled=True)}
        with pytest.raises(InvalidInputError, match="torchft saves the position"):
            torchtitan.CkptStoreManager(run, **words)
        with pytest.raises(InvalidInputError, match="a run of a store is needed"):
            torchtitan.CkptStoreManager("llama", **words)  # type: ignore[arg-type]
        config.enable = False
        with pytest.raises(InvalidInputError, match=r"checkpoint\.enable is not set"):
            torchtitan.store_checkpoints(trainer, run)


def page(me: Rank, folder: str, blocks: list[str]) -> None:
    """Run blocks of code of a page."""
    told_that_cpus_count(me)
    os.chdir(folder)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)  # noqa: S102 - that is the test
