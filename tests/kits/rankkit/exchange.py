"""One small model, trained by each trainer: what one stores, each other one loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptstore
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.integrations.weights import load_weights
from ckptstore.store import Store
from rankkit.groups import Rank
from rankkit.trainers import forget, told_that_cpus_count

__all__ = ["PATHS", "TRAINERS", "exchange"]

Weights = dict[str, bytes]
AtStart = Callable[[torch.nn.Module], None]
PATHS = {
    "plain loop": "model", "DCP": "model", "Accelerate": "models.0", "Accelerate FSDP2": "models.0",
    "Trainer": "model", "Trainer FSDP2": "model", "Lightning": "state_dict.net",
    "Lightning model-parallel": "state_dict.net",
}  # fmt: skip
"""Where each trainer stores the weights."""
RELATED = (("Trainer", "Trainer FSDP2"), ("Lightning", "Lightning model-parallel"))
"""Those that resume each other's trainings; of Accelerate, see test_sharded."""
ROWS = [torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(n)) for n in range(8)]


def _model(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _whole(model: torch.nn.Module) -> Weights:
    """Return the weights of a model, on rank 0. All ranks call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: Any = get_model_state_dict(model, options=options)
    return {name: one.numpy().tobytes() for name, one in found.items()}


def _step(model: torch.nn.Module, optimizer: Any, backward: Any = torch.Tensor.backward) -> None:
    rows = torch.stack(ROWS[:2])
    backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step()
    optimizer.zero_grad()


def _plain(
    me: Rank, store: Store, name: str, seed: int, at_start: AtStart, _: str | None
) -> Weights:
    model = DistributedDataParallel(_model(seed))
    at_start(model)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    if me.rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        store.run(name).save(state, step=1)
    return _whole(model)


def _dcp(me: Rank, store: Store, name: str, seed: int, at_start: AtStart, _: str | None) -> Weights:
    model = _model(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (me.world,)))
    at_start(model)
    _step(model, torch.optim.AdamW(model.parameters()))
    state = {"model": get_model_state_dict(model), "step": 1}
    state_dict_saver.save(state, storage_writer=CkptStoreWriter(store.run(name), step=1))
    return _whole(model)


def _accelerate(
    me: Rank, store: Store, name: str, seed: int, at_start: AtStart, kind: str | None
) -> Weights:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from ckptstore.integrations.accelerate import save_state

    words: dict[str, Any] = {}
    told_that_cpus_count(me, counts=bool(kind))
    if kind:
        words["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap"
        )
    accelerator = Accelerator(cpu=not kind, **words)
    net = _model(seed)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    at_start(model)
    _step(model, optimizer, accelerator.backward)
    save_state(accelerator, store.run(name), step=1)
    return _whole(model)


def _trainer(
    me: Rank,
    store: Store,
    name: str,
    seed: int,
    at_start: AtStart,
    kind: str | None,
    resume: str | None = None,
) -> Weights:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ckptstore.integrations.transformers import StoreTrainerMixin

    class Stored(StoreTrainerMixin, Trainer):  # type: ignore[misc]  # not followed by mypy
        """A Trainer on a store."""

    class Begin(TrainerCallback):  # type: ignore[misc]  # not followed by mypy
        """Calls what is to be done before the first step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at_start(made.model)

    told_that_cpus_count(me, counts=False)
    words: dict[str, Any] = {}
    if kind:
        words = {"fsdp": True, "fsdp_config": {
            "version": 2, "sync_module_states": False, "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
        }}  # fmt: skip
    arguments = TrainingArguments(
        output_dir="unused", use_cpu=True, report_to=[], disable_tqdm=True, ddp_backend="gloo",
        max_steps=2 if resume else 1, save_steps=1, per_device_train_batch_size=2, **words,
    )  # fmt: skip
    if kind:
        told_that_cpus_count(me)  # the arguments have begun another state
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    made = Stored(
        _model(seed), arguments, train_dataset=rows, callbacks=[Begin()], run=store.run(name)
    )
    made.train(resume_from_checkpoint=resume)
    return _whole(made.model)


def _lightning(
    me: Rank,
    store: Store,
    name: str,
    seed: int,
    at_start: AtStart,
    kind: str | None,
    resume: str | None = None,
) -> Weights:
    import lightning.pytorch as pl

    from ckptstore.integrations.lightning import (
        CkptStoreCallback,
        CkptStoreIO,
        CkptStoreModelParallel,
    )

    class Module(pl.LightningModule):  # type: ignore[misc]  # not followed by mypy
        """The model in a module of Lightning."""

        def __init__(self) -> None:
            super().__init__()
            self.net = _model(seed)

        def configure_model(self) -> None:
            if kind:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_train_start(self) -> None:
            at_start(self.net)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    told_that_cpus_count(me, counts=False)
    io = CkptStoreIO(store, name)
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=me.world, max_steps=2 if resume else 1, plugins=[io],
        strategy=CkptStoreModelParallel(
            data_parallel_size=me.world, tensor_parallel_size=1
        ) if kind else "ddp",
        callbacks=[
            CkptStoreCallback(io),
            pl.callbacks.ModelCheckpoint(dirpath="named", every_n_train_steps=1),
        ],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=resume)
    return _whole(module.net)


TRAINERS: dict[str, tuple[Any, str | None]] = {
    "plain loop": (_plain, None), "DCP": (_dcp, None), "Accelerate": (_accelerate, None),
    "Accelerate FSDP2": (_accelerate, "FSDP2"), "Trainer": (_trainer, None),
    "Trainer FSDP2": (_trainer, "FSDP2"), "Lightning": (_lightning, None),
    "Lightning model-parallel": (_lightning, "parallel"),
}  # fmt: skip


def _load_by_dcp(model: torch.nn.Module, store: Store, writer: str) -> None:
    """Load as a user of torch.distributed.checkpoint does, by the path of the writer."""
    weights = get_model_state_dict(model)
    head, _, tail = PATHS[writer].partition(".")
    state: Any = {head: weights}
    if tail.isdigit():
        state = {head: [weights]}
    elif tail:
        state = {head: {f"{tail}.{name}": one for name, one in weights.items()}}
    state_dict_loader.load(state, storage_reader=CkptStoreReader(store, f"{_run_of(writer)}@1"))
    set_model_state_dict(model, weights)


def _run_of(trainer: str) -> str:
    return trainer.replace(" ", "-").lower()


def exchange(me: Rank, url: str) -> list[tuple[str, str, str]]:
    """Train by each trainer and save; load each one's weights in each other one.

    Returns writer, reader, and what was equal: ``weights``, or ``resume`` if the reader also goes
    on with the writer's training.
    """
    found: list[tuple[str, str, str]] = []
    with ckptstore.open(url) as store:
        saved: dict[str, Weights] = {}
        for seed, (name, (train, kind)) in enumerate(TRAINERS.items()):
            forget()
            saved[name] = train(me, store, _run_of(name), seed, lambda _: None, kind)
            assert me.rank or len(set(map(str, saved.values()))) == len(saved)

        for reader, (train, kind) in TRAINERS.items():

            def load_all(model: torch.nn.Module, reader: str = reader) -> None:
                for writer in TRAINERS:
                    if reader == "DCP":
                        _load_by_dcp(model, store, writer)
                    else:
                        version = load_weights(model, store.run(_run_of(writer)), 1)
                        assert version.run == _run_of(writer)
                    if _whole(model) == saved[writer] or me.rank:
                        found.append((writer, reader, "weights"))

            forget()
            train(me, store, f"{_run_of(reader)}-2", 99, load_all, kind)

        for pair in RELATED:
            for writer, reader in (pair, pair[::-1]):
                train, kind = TRAINERS[reader]

                def compare(model: torch.nn.Module, cell: Any = (writer, reader)) -> None:
                    if _whole(model) == saved[cell[0]] or me.rank:
                        found.append((*cell, "resume"))

                forget()
                ref = f"{_run_of(writer)}@1"
                train(me, store, _run_of(writer), 99, compare, kind, resume=ref)
    return found
