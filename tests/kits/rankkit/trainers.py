"""Trainings of Accelerate, Trainer and Lightning whose states are divided among gloo ranks.

Accelerate and Trainer divide states on accelerators only: on CPUs they fall back to DDP. Here
they are told that the CPU is an accelerator; all else in them is as released.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import ckptstore
from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations.dcp import CkptStoreWriter
from ckptstore.integrations.sharded_states import has_parts, is_sharded
from ckptstore.store import Run
from rankkit.groups import Rank

__all__ = [
    "Training", "accelerate", "forget", "lightning", "refusal_of_flat_parameters", "refusals",
    "several", "told_that_cpus_count", "trainer",
]  # fmt: skip


def told_that_cpus_count(me: Rank, *, counts: bool = True) -> None:
    """Make Accelerate take the CPU for an accelerator, and this process for one of its ranks."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ.update(
        RANK=str(me.rank), LOCAL_RANK=str(me.rank), WORLD_SIZE=str(me.world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    PartialState(cpu=True)
    if counts:
        shared = PartialState._shared_state
        shared["distributed_type"] = DistributedType.MULTI_GPU
        shared["device"] = torch.device("cpu")


def gathered(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return whole weights and optimizer states as bytes, by name; all ranks call it."""
    fsdp1 = is_sharded(model) and not has_parts(dict(model.named_parameters()))
    options = StateDictOptions(full_state_dict=not fsdp1, cpu_offload=True)  # else torch crashes
    weights: Any = get_model_state_dict(model, options=options)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=options)
    found = {name: _bytes(value) for name, value in weights.items()}
    for name, state in moments.get("state", {}).items():
        found |= {f"{name} {key}": _bytes(one) for key, one in state.items()}
    return found


def _bytes(value: torch.Tensor) -> bytes:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.numpy().tobytes()


def dies_in_a_save(me: Rank) -> None:
    """Kill a rank in the next save: the last, when others may have written, or the one alone."""

    def dies(*_: object, **_options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if me.rank == me.world - 1:
        CkptStoreWriter.write_data = dies  # type: ignore[method-assign,assignment]
    Run.save = dies  # type: ignore[method-assign,assignment]


def seed(number: int) -> None:
    """Seed all generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Net(torch.nn.Sequential):
    """Two layers with dropout, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))


class TiedNet(torch.nn.Sequential):
    """Two layers that share their weights."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 4))
        self[2].weight = self[0].weight


def adapted(net: torch.nn.Module) -> torch.nn.Module:
    """Return a model with an adapter of PEFT, a layer that is trained, and an inactive adapter."""
    from peft import LoraConfig, get_peft_model

    def config(first: str) -> LoraConfig:
        return LoraConfig(target_modules=[first], r=3, modules_to_save=["2"])

    model: torch.nn.Module = get_peft_model(net, config("0"))
    model.add_adapter("other", config("0"))  # type: ignore[operator]
    return model


def accelerator_of(kind: str, me: Rank) -> Any:
    """Return an Accelerator that divides states in some way."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    told_that_cpus_count(me, counts="ddp" not in kind)
    words: dict[str, Any] = {}
    if "compiled" in kind:
        words["dynamo_backend"] = "eager"
    if "fsdp2" in kind or kind == "hsdp":
        form = "FULL_STATE_DICT" if "full" in kind else "SHARDED_STATE_DICT"
        words["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type=form
        )
    if "fsdp1" in kind:
        words["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=1, auto_wrap_policy="no_wrap", use_orig_params="flat" not in kind,
            state_dict_type="FULL_STATE_DICT" if "full" in kind else "SHARDED_STATE_DICT",
        )  # fmt: skip
    if kind == "hsdp" and me.world == 4:
        words["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    if kind == "tensor parallel" and me.world > 1:
        words["parallelism_config"] = ParallelismConfig(tp_size=me.world)
    return Accelerator(cpu="ddp" in kind, **words)


def net_of(kind: str, accelerator: Any, world: int) -> torch.nn.Module:
    """Return the model, divided where Accelerate wants that to be done before ``prepare``."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if "lora" in kind:
        weights = torch.get_rng_state()
        torch.manual_seed(0)  # the base model is the same in each training
        base = Net()
        torch.set_rng_state(weights)
        return adapted(base)
    net: torch.nn.Module = TiedNet() if "tied" in kind else Net()
    if kind == "tensor parallel" and world > 1:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, accelerator.torch_device_mesh["tp"], plan)
        net.tp_size = world  # type: ignore[assignment]  # as models of Transformers have it
    return net


class Training:
    """A training of Accelerate, of 5 steps an epoch on two ranks; of kind ``ddp``, undivided."""

    def __init__(self, kind: str, me: Rank, number: int) -> None:
        self.accelerator = accelerator_of(kind, me)
        seed(number)
        net = net_of(kind, self.accelerator, me.world)
        trained = [one for one in net.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        rows: Any = torch.linspace(-1, 1, 80).reshape(-1, 4)
        loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            net, optimizer, loader, schedule
        )
        torch.manual_seed(number + me.rank)
        self.losses: list[float] = []
        divided = not ("fsdp1" in kind or kind == "tensor parallel") or me.world > 1
        assert "ddp" in kind or "flat" in kind or is_sharded(self.model) == divided

    def epoch(self) -> None:
        """Train an epoch."""
        for batch in self.loader:
            noise = random.random() + float(np.random.rand())
            loss = self.model(batch + noise).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def gathered(self) -> dict[str, Any]:
        """Return weights and optimizer states."""
        return gathered(self.model, self.optimizer.optimizer)


def accelerate(me: Rank, url: str, kind: str, plan: dict[str, Any]) -> Any:
    """Train; return the losses, states at the beginning and after each epoch, learning rate."""
    from ckptstore.integrations.accelerate import load_state, save_state, save_state_async, watched

    epochs, dies, resume = plan["epochs"], plan.get("dies"), plan.get("resume", False)
    training = Training(kind, me, 99 if resume else 1)
    with ckptstore.open(url) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        ref = "latest" if resume is True else resume
        began = load_state(training.accelerator, run, ref).step if resume else 0
        states = [training.gathered()] if began else [{}]
        with watched(training.accelerator, run):
            for epoch in range(began + 1, epochs + 1):
                training.epoch()
                states.append(training.gathered())
                if dies == epoch:
                    dies_in_a_save(me)
                if plan.get("saves"):
                    background = plan.get("background", False)
                    words: Any = {"step": epoch, "metrics": {"loss": training.losses[-1]}}
                    words["trained_only"] = "lora" in kind
                    save = save_state_async if background else save_state
                    made: Any = save(training.accelerator, run, **words)
                    me.tell(("saved", epoch, made.result().id if background and made else None))
    return training.losses, states, training.schedule.get_last_lr()


def refusals(me: Rank, url: str) -> None:
    """Hold that what cannot be saved or loaded is refused on all ranks, and changes nothing."""
    from accelerate import DistributedType

    from ckptstore.integrations.accelerate import load_state, save_state

    training = Training("fsdp2", me, 1)
    training.epoch()
    with ckptstore.open(url) as store:
        run = store.run("gpt")
        with pytest.raises(InvalidInputError, match="encodings: not for") as told:
            save_state(training.accelerator, run, step=1, encodings={"*": "bf16"})
        assert "FULL_STATE_DICT" in (told.value.hint or "")
        save_state(training.accelerator, run, step=1)
        before = training.gathered()

        extra = torch.nn.Parameter(torch.ones(2))
        training.optimizer.optimizer.add_param_group({"params": [extra]})
        with pytest.raises(StateError, match="parameters that are not those of its model"):
            load_state(training.accelerator, run)
        training.optimizer.optimizer.param_groups.pop()
        training.model.register_buffer("more", torch.ones(2))
        with pytest.raises(StateError, match=r"differ in 1 names or shapes, as 'models\.0\.more'"):
            load_state(training.accelerator, run)
        del training.model.more
        groups = training.optimizer.optimizer.param_groups
        groups.append({**groups[0], "params": [groups[0]["params"].pop()]})
        with pytest.raises(StateError, match="the version's groups of parameters"):
            load_state(training.accelerator, run)
        assert before == training.gathered()
        groups.pop()
        groups[0]["params"] = [*training.model.parameters()][::-1]
        load_state(training.accelerator, run)
        assert before == training.gathered()  # by names, and not by places

        training.accelerator.state._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        with pytest.raises(InvalidInputError, match="type DEEPSPEED") as told:
            save_state(training.accelerator, run, step=2)
        assert all(way in (told.value.hint or "") for way in ("FSDP2", "ds_to_universal"))


def refusal_of_flat_parameters(me: Rank, url: str) -> None:
    """Hold that a model of FSDP1 whose parameters have no names is refused."""
    from ckptstore.integrations.accelerate import save_state

    training = Training("fsdp1 flat", me, 1)
    refused = pytest.raises(InvalidInputError, match="use_orig_params=False")
    with ckptstore.open(url) as store, refused as told:
        save_state(training.accelerator, store.run("gpt"), step=2)
    assert "FSDP2" in (told.value.hint or "")


def trainer(me: Rank, url: str, kind: str, plan: dict[str, Any]) -> Any:
    """Train a GPT-2 with tied weights by the Trainer of Transformers; as :func:`accelerate`."""
    told_that_cpus_count(me, counts=False)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from ckptstore.integrations.transformers import StoreTrainerMixin

    losses: list[float] = []
    states: list[dict[str, Any]] = []

    class Stored(StoreTrainerMixin, Trainer):  # type: ignore[misc]  # not followed by mypy
        """A Trainer on a store."""

    class Watch(TrainerCallback):  # type: ignore[misc]  # not followed by mypy
        """Notes losses and states."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

        def note(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert is_sharded(made.model) or (me.world == 1 and "fsdp1" in kind)
            if state.global_step % 5 == 0:
                states.append(gathered(made.model, made.optimizer.optimizer))

        on_train_begin = note

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.note(args, state, control)
            if state.global_step == 5 * plan.get("dies", 0):
                dies_in_a_save(me)

    seed(3 if plan.get("resume") else 4)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    seed(0 if "lora" in kind else int(torch.initial_seed()))
    model: Any = GPT2LMHeadModel(config)
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        seed(3 if plan.get("resume") else 4)
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
        model = get_peft_model(model, lora)
    rows = [
        torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(n)) for n in range(40)
    ]
    arguments = TrainingArguments(
        output_dir="unused", use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=2, max_steps=5 * plan["epochs"], learning_rate=1e-2,
        save_strategy="steps" if plan.get("saves") else "no", save_steps=5,
        torch_compile_backend="eager" if "compiled" in kind else None, label_names=["labels"],
        fsdp=True, fsdp_config={
            "version": int(kind[4]), "sync_module_states": False, "use_orig_params": True,
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
            "state_dict_type": "FULL_STATE_DICT" if "full" in kind else "SHARDED_STATE_DICT",
        },
        **plan.get("arguments", {}),
    )  # fmt: skip
    told_that_cpus_count(me)  # the arguments have begun another state
    with ckptstore.open(url, **plan.get("store", {})) as store:
        made = Stored(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            eval_dataset=[{"input_ids": row, "labels": row} for row in rows[:4]],
            callbacks=[Watch()],
            run=store.run("gpt", metrics={"eval_loss": "min"}),
            background=plan.get("background", False),
            trained_only="lora" in kind,
        )
        made.train(resume_from_checkpoint=plan.get("resume"))
        if plan.get("arguments"):
            states.append(gathered(made.model, made.optimizer.optimizer))
    return losses, states


def lightning(me: Rank, url: str, kind: str, plan: dict[str, Any]) -> Any:
    """Fit a module with ``fully_shard`` by Lightning, on the CPU as released; as accelerate."""
    told_that_cpus_count(me, counts=False)
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from ckptstore.integrations.lightning import (
        CkptStoreCallback,
        CkptStoreIO,
        CkptStoreModelParallel,
    )

    losses: list[float] = []
    states: list[dict[str, Any]] = []

    class Module(pl.LightningModule):  # type: ignore[misc]  # not followed by mypy
        """Two layers, divided; dies in the save of an epoch."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            if "frozen" in kind:
                for one in self.net[0].parameters():
                    torch.nn.init.ones_(one)

        def configure_model(self) -> None:
            if "frozen" in kind:
                self.net[0].requires_grad_(False)
            if "compiled" in kind:
                self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if "frozen" in kind:
                checkpoint["state_dict"] = {
                    name: one for name, one in checkpoint["state_dict"].items() if ".0." not in name
                }

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch + float(np.random.rand())).square().mean()
            losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def on_train_start(self) -> None:
            states.append(gathered(self, self.optimizers().optimizer))

        def on_train_epoch_end(self) -> None:
            states.append(gathered(self, self.optimizers().optimizer))
            if self.current_epoch + 1 == plan.get("dies"):
                dies_in_a_save(me)

        def configure_optimizers(self) -> Any:
            trained = [one for one in self.parameters() if one.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)]

    seed(99 if plan.get("resume") else 1)
    module = Module()
    seed((99 if plan.get("resume") else 1) + me.rank)
    rows: Any = torch.linspace(-1, 1, 80).reshape(-1, 4)
    strategy = ModelParallelStrategy if kind == "files" else CkptStoreModelParallel
    with ckptstore.open(url) as store:
        io = CkptStoreIO(
            store, "gpt", metrics={"loss": "min"}, background=plan.get("background", False)
        )
        keep = pl.callbacks.ModelCheckpoint(
            dirpath="named", monitor="loss", mode="min", save_top_k=plan.get("keep", -1),
            save_on_train_epoch_end=True,
        )  # fmt: skip
        trainer = pl.Trainer(
            accelerator="cpu", devices=me.world, max_epochs=plan["epochs"], plugins=[io],
            strategy=strategy(
                data_parallel_size=me.world, tensor_parallel_size=1,
                save_distributed_checkpoint="full" not in kind,
            ),
            callbacks=[CkptStoreCallback(io), *([keep] if plan.get("saves") else [])],
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=plan.get("saves", False),
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
        trainer.fit(module, loader, ckpt_path=io.resume if plan.get("resume") else None)
        schedule = trainer.lr_scheduler_configs[0].scheduler
    return losses, states, schedule.get_last_lr()


def forget() -> None:
    """Let the next Accelerator of this process begin as the first."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def several(me: Rank, tasks: list[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    """Do several trainings, one after the other; return their results."""
    found = []
    for train, args in tasks:
        forget()
        found.append(train(me, *args))
    return found
