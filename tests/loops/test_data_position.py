"""Positions in the data: resumed at any number of ranks, each batch of an epoch is seen once."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from rankkit.groups import run_ranks
from rankkit.reading import take_and_save
from shortening import examples
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations import accelerate, data_position
from ckptstore.integrations.accelerate import load_state, save_state
from ckptstore.integrations.data_position import ElasticLoader, per_rank, this_rank
from ckptstore.integrations.lightning import CkptStoreCallback, CkptStoreIO
from ckptstore.store import Store

Make = Callable[[int, int], Any]


class Asked(Exception):
    """A rank told its part; the others have not yet."""


class Ranks:
    """Ranks of a training, each with its loader, in one process."""

    def __init__(self, count: int, make: Make, **options: Any) -> None:
        self.count, self._rank = count, 0
        self._told: list[Any] | None = None
        self._parts: list[Any] = []
        self.loaders = [ElasticLoader(make, **options) for _ in range(count)]
        self._passes: list[Iterator[Any] | None] = [None] * count

    @contextmanager
    def _as(self, rank: int) -> Iterator[ElasticLoader]:
        def gathered(value: object, _: object) -> list[Any]:
            if self._told is None:
                self._parts.append(copy.deepcopy(value))
                raise Asked
            return self._told

        names: dict[str, Any] = vars(data_position)
        before = {name: names[name] for name in ("place", "gathered")}
        names.update(place=lambda _: (rank, self.count), gathered=gathered)
        try:
            yield self.loaders[rank]
        finally:
            names.update(before)

    def take(self, rank: int, most: int | None = None) -> list[Any]:
        """Return the next batches of a rank."""
        with self._as(rank) as loader:
            batches = self._passes[rank]
            if batches is None:
                batches = self._passes[rank] = iter(loader)
            return list(itertools.islice(batches, most))

    def steps(self, count: int | None = None) -> list[Any]:
        """Return the batches of all ranks in steps that they take together."""
        found: list[Any] = []
        for _ in itertools.count() if count is None else range(count):
            step = [batch for rank in range(self.count) for batch in self.take(rank, 1)]
            if count is None and not step:
                return found
            found += step
        return found

    def save(self) -> dict[str, Any]:
        """Return the position, which all ranks agree on, as a store returns it."""
        self._told, self._parts = None, []
        for rank in range(self.count):
            with self._as(rank) as loader, pytest.raises(Asked):
                loader.state_dict()
        self._told = self._parts
        found = []
        for rank in range(self.count):
            with self._as(rank) as loader:
                found.append(loader.state_dict())
        assert all(repr(one) == repr(found[0]) for one in found)
        return found[0]

    def resume(self, saved: dict[str, Any], count: int, make: Make, **options: Any) -> Ranks:
        """Return other ranks that resume the position."""
        again = Ranks(count, make, **options)
        for rank in range(count):
            with again._as(rank) as loader:
                loader.load_state_dict(copy.deepcopy(saved))
        return again

    def next_epoch(self) -> None:
        self._passes = [None] * self.count


class Sharded:
    """The loader of a rank: batches of every n-th number, with a position as torchdata has it."""

    def __init__(self, size: int, rank: int, ranks: int, *, sized: bool) -> None:
        self._batches = [(self.epoch, one) for one in range(size)][rank::ranks]
        self._next: int | None = None
        self._at = 0
        self._sized = sized

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._batches = [(epoch, one) for _, one in self._batches]

    def __len__(self) -> int:
        if not self._sized:
            raise TypeError("no length")
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._at, self._next = self._next or 0, None
        while self._at < len(self._batches):
            self._at += 1
            yield self._batches[self._at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["at"]


@settings(max_examples=examples(200), deadline=None)
@given(
    size=st.integers(0, 60),
    sized=st.booleans(),
    first=st.integers(1, 6),
    plan=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=6)), max_size=4
    ),
)
def test_each_batch_is_seen_once(
    size: int, sized: bool, first: int, plan: list[tuple[int, list[int]]]
) -> None:
    """Saved at any point and resumed at any number of ranks, several times, in step or not."""

    def make(rank: int, ranks: int) -> Sharded:
        return Sharded(size, rank, ranks, sized=sized)

    ranks, seen = Ranks(first, make), []
    for count, taken in plan:
        for rank, most in zip(range(ranks.count), taken, strict=False):
            seen += ranks.take(rank, most)
        saved = ranks.save()
        assert ranks.save() == saved
        ranks = ranks.resume(saved, count, make)
        if saved["done"]:
            break
    seen += ranks.steps()
    epochs = Counter(seen)
    wanted = {(0, one) for one in range(size)}
    extra = set(epochs) - wanted  # the last resume may have been of an epoch that was over
    assert extra in (set(), {(1, one) for one in range(size)})
    assert set(epochs) >= wanted
    assert set(epochs.values()) <= {1}

    ranks.next_epoch()
    assert sorted(ranks.steps()) == [(2 if extra else 1, one) for one in range(size)]


@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4), (3, 2), (4, 6), (1, 5), (6, 1)])
def test_the_order_stays(first: int, second: int) -> None:
    """Ranks in step take the batches in the order in which the first ranks would have."""

    def make(rank: int, ranks: int) -> Sharded:
        return Sharded(60, rank, ranks, sized=True)

    ranks = Ranks(first, make)
    seen = ranks.steps(3)
    for count in (second, first, second):
        ranks = ranks.resume(ranks.save(), count, make)
        seen += ranks.steps(2)
    saved = ranks.save()
    assert not saved["ahead"]
    assert all(one["at"] <= 60 for one in saved["streams"].values())
    assert seen + ranks.steps() == [(0, one) for one in range(60)]
    assert ranks.save()["done"]


def test_ranks_that_get_as_many() -> None:
    """``drop_last`` leaves out what not all ranks would get; only after a resume elsewhere."""

    def make(rank: int, ranks: int) -> Sharded:
        return Sharded(24, rank, ranks, sized=True)

    ranks = Ranks(4, make, drop_last=True)
    assert len(ranks.steps(1)) == 4
    elsewhere = ranks.resume(ranks.save(), 3, make, drop_last=True)
    assert [len(elsewhere.take(rank)) for rank in range(3)] == [6, 6, 6]
    assert elsewhere.save()["done"]
    after = elsewhere.resume(elsewhere.save(), 4, make, drop_last=True)
    assert sorted(after.steps()) == [(1, one) for one in range(24)]
    again = ranks.resume(ranks.save(), 4, make, drop_last=True)
    assert len(again.steps()) == 20


def map_style(sampler: type, workers: int) -> Make:
    """Return what makes loaders of torchdata for a data set whose order is of seed and epoch."""

    def make(rank: int, ranks: int) -> StatefulDataLoader[Any]:
        words: Any = {"num_replicas": ranks, "rank": rank, "shuffle": True, "seed": 3}
        rows: Any = range(48)
        return StatefulDataLoader(
            rows, batch_size=2, sampler=sampler(rows, **words), num_workers=workers
        )

    return make


def streaming(shards: int, *, batched: bool, workers: int = 0) -> Make:
    """Return what makes streams of Hugging Face's datasets, alone or in loaders of torchdata."""

    def make(rank: int, ranks: int) -> Any:
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node

        rows = Dataset.from_dict({"row": list(range(48))}).to_iterable_dataset(num_shards=shards)
        mine = split_dataset_by_node(rows, rank=rank, world_size=ranks)
        if not batched:
            return mine
        return StatefulDataLoader(mine, batch_size=2, num_workers=workers)

    return make


def rows_of(batches: Sequence[Any]) -> list[int]:
    """Return the rows in batches."""
    found: list[int] = []
    for batch in batches:
        rows = batch["row"] if isinstance(batch, dict) else batch
        found += torch.as_tensor(rows).reshape(-1).tolist()
    return found


@pytest.mark.short(r"datasets by|datasets, torchdata\]|torchdata\]")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(map_style(StatefulDistributedSampler, 0), id="torchdata"),
        pytest.param(map_style(StatefulDistributedSampler, 2), id="torchdata, workers"),
        pytest.param(map_style(DistributedSampler, 0), id="torch's sampler"),
        pytest.param(streaming(12, batched=False), id="datasets by shards"),
        pytest.param(streaming(1, batched=False), id="datasets by examples"),
        pytest.param(streaming(12, batched=True), id="datasets, torchdata"),
        pytest.param(streaming(12, batched=True, workers=2), id="datasets, torchdata, workers"),
    ],
)
def test_loaders_as_released(make: Make) -> None:
    """4 ranks, then 3, then 2: every row once; the next epoch has every row once again."""
    ranks, seen = Ranks(4, make), []
    for count in (3, 2):
        seen += ranks.steps(2)
        ranks = ranks.resume(ranks.save(), count, make)
    seen += ranks.steps()
    assert sorted(rows_of(seen)) == list(range(48))
    ranks.next_epoch()
    after = rows_of(ranks.steps(2))
    again = ranks.resume(ranks.save(), 1, make)
    assert again.loaders[0].epoch == 1
    assert sorted(after + rows_of(again.steps())) == list(range(48))


@pytest.mark.parametrize("steps", [0, 5, 12, 13, 24])
def test_the_shuffling_goes_on(steps: int) -> None:
    """At as many ranks the order of this and the next epoch is that of the uninterrupted one."""

    def make(*_: int) -> StatefulDataLoader[Any]:
        rows: Any = range(24)
        torch.manual_seed(7)
        return StatefulDataLoader(rows, batch_size=2, shuffle=True)

    def some(ranks: Ranks, count: int | None) -> list[int]:
        found = rows_of(ranks.take(0, count))
        if count is None:
            ranks.next_epoch()
        return found

    whole = Ranks(1, make)
    wanted = [some(whole, None) for _ in range(3)]
    ranks, seen = Ranks(1, make), []
    for _ in range(steps // 12):
        seen += some(ranks, None)
    seen += some(ranks, steps % 12)
    again = ranks.resume(ranks.save(), 1, make)
    while len(seen) < 72:
        seen += some(again, None)
    assert seen == [row for epoch in wanted for row in epoch]


# --- ranks of torch.distributed ------------------------------------------------------------------
@pytest.mark.slow
def test_ranks_as_they_are(store: Store) -> None:
    """2 ranks, 3 and 1, in processes, which save a value for each rank too: every row once."""
    seen: list[int] = []
    for ranks, steps in ((2, 3), (3, 2), (1, 100)):
        told = run_ranks(take_and_save, ranks, store.url, steps)
        seen += [row for rows in told for row in rows]
    assert sorted(seen) == list(range(48))


# --- training libraries --------------------------------------------------------------------------
def prepared(*registered: Any) -> tuple[Any, Any]:
    """Return an Accelerator and a stateful loader that it has prepared."""
    for singleton in (AcceleratorState, PartialState, GradientState):
        singleton._reset_state()
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    rows: Any = range(12)
    loader = accelerator.prepare(DataLoader(rows, batch_size=2))
    accelerator.register_for_checkpointing(*registered)
    return accelerator, loader


def test_accelerate(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic loader is registered; a stateful one resumes at as many ranks, or restarts."""
    run = store.run("gpt")
    elastic = [ElasticLoader(map_style(StatefulDistributedSampler, 0)) for _ in range(2)]
    accelerator, loader = prepared(elastic[0])
    seen = rows_of(list(itertools.islice(elastic[0], 5)))
    save_state(accelerator, run, step=0)
    assert rows_of(list(itertools.islice(loader, 2))) == [0, 1, 2, 3]
    save_state(accelerator, run, step=1)
    list(loader)
    save_state(accelerator, run, step=2)

    accelerator, loader = prepared(elastic[1])
    load_state(accelerator, run, 1)
    assert rows_of(list(loader)) == list(range(4, 12))
    assert sorted(seen + rows_of(list(elastic[1]))) == list(range(48))

    for module in (data_position, accelerate):
        monkeypatch.setattr(module, "place", lambda: (0, 2))
    accelerator, loader = prepared(elastic[1])
    with pytest.raises(StateError, match="of 1 ranks, and this training has 2"):
        load_state(accelerator, run, 1)
    for ref, options in ((0, {}), (1, {"restart_epoch": True}), (2, {})):
        load_state(accelerator, run, ref, **options)
        assert rows_of(list(loader)) == list(range(12))


def shuffled(seed: int, *, seedable: bool, workers: int) -> tuple[Any, Any]:
    """Return an Accelerator and a stateful loader that shuffles; another seed, another order."""
    for singleton in (AcceleratorState, PartialState, GradientState):
        singleton._reset_state()
    configuration = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=seedable
    )
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    torch.manual_seed(seed)
    rows: Any = range(12)
    loader = DataLoader(rows, batch_size=2, shuffle=True, num_workers=workers)
    return accelerator, accelerator.prepare(loader)


def drawn(loader: Any) -> Iterator[tuple[list[int], float]]:
    """Yield the rows of each batch of two epochs, and a number such as a dropout draws."""
    for _ in range(2):
        for batch in loader:
            yield batch.tolist(), torch.rand(()).item()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("at", [0, 2, 6, 8])
def test_accelerate_shuffles_again(
    store: Store, at: int, seedable: bool, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume draws what the training would have drawn; if it cannot know that, it is refused."""
    run = store.run("gpt")
    accelerator, loader = shuffled(1, seedable=seedable, workers=workers)
    steps = drawn(loader)
    list(itertools.islice(steps, at))
    save_state(accelerator, run, step=1)
    wanted = list(steps)
    warned = "use_seedable_sampler" in caplog.text
    accelerator, loader = shuffled(2, seedable=seedable, workers=workers)
    assert warned == (at in (2, 8) and not (seedable and (at == 8 or not workers)))
    if warned:
        with pytest.raises(StateError, match=r"order was not saved.*restart_epoch=True"):
            load_state(accelerator, run)
        load_state(accelerator, run, restart_epoch=True)
        steps = drawn(loader)
        rows = rows_of([batch for batch, _ in itertools.islice(steps, 2)])
        caplog.clear()
        save_state(accelerator, run, step=2)
        assert ("use_seedable_sampler" in caplog.text) == (not seedable)
        rows += rows_of([batch for batch, _ in itertools.islice(steps, 4)])
        assert sorted(rows) == list(range(12))
        return
    load_state(accelerator, run)
    if at or not workers:  # else a worker has rows from before the save
        assert list(drawn(loader))[: len(wanted)] == wanted


class Watching(pl.LightningModule):  # type: ignore[misc]  # not followed by mypy
    """A module that remembers the rows that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen += batch.tolist()
        loss: torch.Tensor = self.net(batch[:, None].float()).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [10, 24])
def test_lightning(store: Store, steps: int) -> None:
    """Lightning saves the position of the loader that it trains with, and goes on there."""

    def fit(**options: Any) -> Watching:
        io = CkptStoreIO(store, "small")
        saving = ModelCheckpoint(every_n_train_steps=steps, save_top_k=-1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, plugins=[io], callbacks=[CkptStoreCallback(io), saving],
            **quiet, **options,
        )  # fmt: skip
        module = Watching()
        data = ElasticLoader(map_style(StatefulDistributedSampler, 0))
        trainer.fit(module, data, ckpt_path=io.resume)
        return module

    before = fit(max_steps=steps).seen
    after = fit(max_epochs=2).seen
    assert len(before) == 2 * steps
    assert sorted(before + after) == sorted([*range(48), *range(48)])
    assert sorted((before + after)[:48]) == list(range(48))


# --- refusals ------------------------------------------------------------------------------------
def test_one_process_without_a_group(store: Store) -> None:
    """A loader is used as any other; its position is a plain value of a state."""
    make = map_style(StatefulDistributedSampler, 0)
    loader = ElasticLoader(make)
    assert len(loader) == 24
    batches = iter(loader)
    seen = rows_of([next(batches), next(batches)])
    run = store.run("gpt")
    run.save({"data": loader.state_dict()}, step=1)
    again = ElasticLoader(make)
    again.load_state_dict(run.load()["data"])
    assert again.epoch == 0
    assert sorted(seen + rows_of(list(again))) == list(range(48))
    assert again.epoch == 1


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders without a position, other states, other numbers of ranks: with the next step."""
    with pytest.raises(InvalidInputError, match="make is a function"):
        ElasticLoader([1, 2])  # type: ignore[arg-type]
    rows: Any = range(4)
    with pytest.raises(InvalidInputError, match="a DataLoader, has no state_dict -- use torchdata"):
        next(iter(ElasticLoader(lambda *_: DataLoader(rows))))
    loader = ElasticLoader(map_style(StatefulDistributedSampler, 0))
    saved = loader.state_dict()
    wrongs: Any = [{}, {**saved, "ranks": 0}, {**saved, "taken": -1}, {"rank 0": {}}, [1]]
    for wrong in wrongs:
        with pytest.raises(StateError, match="no position of an ElasticLoader"):
            loader.load_state_dict(wrong)
    values = per_rank({"seen": 3})
    assert values == {"rank 0": {"seen": 3}}
    assert this_rank(values) == {"seen": 3}
    monkeypatch.setattr(data_position, "place", lambda: (1, 2))
    with pytest.raises(StateError, match="of 1 ranks, and this training has 2 -- resume it at 1"):
        this_rank(values)
