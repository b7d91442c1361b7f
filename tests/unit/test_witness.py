"""A resumed training is compared with the saved one; what was not restored is named."""

from __future__ import annotations

import random  # noqa: TID251 - what a training draws from
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ckptstore
from ckptstore.errors import InvalidInputError
from ckptstore.hashing import blake3_of
from ckptstore.resuming import witness as witness_module
from ckptstore.resuming.comparison import Moment, digests, leaves_of
from ckptstore.testing.check_resume import check_resume

pytestmark = pytest.mark.usefixtures("generators_stay")

SAVED_AT = 5
ACCUMULATED = 2


class Training:
    """A training with all that one may forget: each part is one entry of its state."""

    def __init__(self, seed: int = 0) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 1)
        )
        self.adapter = nn.Linear(8, 1, bias=False)
        self.ema = nn.Linear(8, 1)
        self.optimizer = torch.optim.AdamW(
            [*self.model.parameters(), *self.adapter.parameters()], lr=1e-2
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = {"scale": 2.0**16, "growth": 0}
        self.shuffling = torch.Generator().manual_seed(seed)
        self.augmenting = np.random.default_rng(seed)
        self.masking = random.Random(seed)
        rows = torch.arange(64.0).reshape(8, 8).repeat(8, 1)
        self.loader = DataLoader(
            TensorDataset(rows), sampler=RandomSampler(rows, generator=self.shuffling)
        )
        self.position = 0
        self.micro = 0
        self.best = float("inf")
        self.clip = 1.0
        self.temperature = torch.tensor(1.0)

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Do one micro-step; the optimizer steps at each second one."""
        order = torch.randperm(64, generator=self.shuffling)
        x = self.loader.dataset.tensors[0][order[:16]] + self.position  # type: ignore[attr-defined]
        x = (
            x
            + torch.from_numpy(self.augmenting.normal(size=x.shape)).float() * self.masking.random()
        )
        x = x * random.random() + float(np.random.random()) * self.temperature
        self.position += 16
        for module in [*self.model.children()][3:4]:  # frozen for every fifth step
            module.requires_grad_(self.position % 5 != 0)
        loss = (self.model(x) + self.adapter(x)).square().mean() / 1e4
        (loss * self.scaler["scale"]).backward()
        self.micro += 1
        if self.micro % ACCUMULATED == 0:
            grads = [one.grad for one in self.model.parameters() if one.grad is not None]
            for grad in grads:
                grad.div_(self.scaler["scale"])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.scaler["growth"] += 1
            self.clip *= 0.99
            self.temperature.mul_(0.9)
            with torch.no_grad():
                self.ema.weight.lerp_(self.adapter.weight, 0.1)
                self.ema.bias.add_(0.5)
        self.best = min(self.best, loss.item())
        return loss, x

    PARTS: ClassVar = {
        "model": ("model", "adapter", "ema", "optimizer", "scheduler"),
        "value": ("scaler", "position", "micro", "best", "clip", "temperature"),
    }

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        state: dict[str, Any] = {
            name: getattr(self, name).state_dict() for name in self.PARTS["model"]
        }
        for name in self.PARTS["value"]:
            value = getattr(self, name)
            state[name] = dict(value) if isinstance(value, dict) else value
        state["shuffling"] = self.shuffling.get_state()
        state["augmenting"] = self.augmenting.bit_generator.state
        state["masking"] = self.masking.getstate()
        state["python"], state["numpy"] = random.getstate(), np.random.get_state()
        state["torch"] = torch.get_rng_state()
        modules = {"model": self.model, "adapter": self.adapter}
        state["grads"] = {
            f"{name}.{path}": one.grad
            for name, module in modules.items()
            for path, one in module.named_parameters()
            if one.grad is not None
        }
        state["frozen"] = [one.requires_grad for one in self.model.parameters()]
        return state

    def load_state_dict(self, state: dict[str, Any], without: str = "") -> None:
        """Restore everything but one part, which a person forgot."""
        state = dict(state)
        for name in self.PARTS["model"]:
            part = state[name]
            if f"{name}/" in f"{without}/" and "/" in without:
                part = self._partly(name, part, without)
            elif name == without:
                continue
            getattr(self, name).load_state_dict(part)
        for name in self.PARTS["value"]:
            if name != without:
                setattr(self, name, state[name])
        setters: dict[str, Callable[[Any], Any]] = {
            "shuffling": self.shuffling.set_state,
            "augmenting": lambda one: setattr(self.augmenting.bit_generator, "state", one),
            "masking": self.masking.setstate,
            "python": random.setstate,
            "numpy": np.random.set_state,
            "torch": torch.set_rng_state,
        }
        for name, put in setters.items():
            if name != without:
                put(state[name])
        if without != "grads":
            for path, grad in state["grads"].items():
                name, _, rest = path.partition(".")
                getattr(self, name).get_parameter(rest).grad = grad
        if without != "frozen":
            for one, flag in zip(self.model.parameters(), state["frozen"], strict=True):
                one.requires_grad_(flag)
        if without == "train mode":
            self.model.eval()

    def _partly(self, name: str, part: Any, without: str) -> Any:  # noqa: ANN401
        """Return a part without one of its entries."""
        own = getattr(self, name).state_dict()
        path = without.partition("/")[2]
        if name == "optimizer":
            kept = {key: one for key, one in part["state"].items() if key != int(path)}
            return {**part, "state": kept}
        return {**part, path: own[path]}


OMISSIONS = {
    "model": "model.0.weight", "model/3.bias": "model.3.bias",
    "model/1.running_var": "model.1.running_var",
    "model/1.num_batches_tracked": "model.1.num_batches_tracked", "adapter": "adapter.weight",
    "ema": "ema.weight", "optimizer": "optimizer.state.0.step (missing)",
    "optimizer/3": "optimizer.state.3.step (missing)", "scheduler": "scheduler.last_epoch",
    "scaler": "scaler.growth", "position": "position", "micro": "micro", "best": "best",
    "clip": "clip", "temperature": "temperature", "shuffling": "shuffling",
    "augmenting": "augmenting", "masking": "masking", "python": "the generator of Python",
    "numpy": "the generator of NumPy", "torch": "the generator of torch",
    "frozen": "model (frozen)", "train mode": "model (train and eval)",
    "grads": "the gradients accumulated at the save of model",
}  # fmt: skip
"""What a person forgets to restore, and the name that the report gives it."""


def _objects(training: Training) -> dict[str, Any]:
    return {name: partial(getattr, training, name) for name in vars(training) if name != "loader"}


def _steps(training: Training, witness: ckptstore.Witness, count: int) -> None:
    for _ in range(count):
        loss, batch = training.train_step()
        witness.step(loss=loss, batch=batch)


def _trained(run: ckptstore.Run, seed: int = 0) -> None:
    """Train, save in the middle of an accumulation, and train on."""
    training = Training(seed)
    with ckptstore.Witness(run, **_objects(training)) as witness:
        _steps(training, witness, SAVED_AT)
        run.save(training.state_dict(), step=SAVED_AT, metadata=witness.metadata())
        _steps(training, witness, 4)
        assert witness.report is None


def _resumed(run: ckptstore.Run, without: str = "") -> ckptstore.ResumeReport:
    """Resume as another process does; return what the witness says."""
    training = Training(seed=99)
    training.load_state_dict(run.load(), without)
    with ckptstore.Witness(run, **_objects(training)) as witness:
        _steps(training, witness, 4)
    assert witness.report is not None
    return witness.report


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ckptstore.Run]:
    """Return a run of a new store."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        yield store.run("r")


@pytest.mark.short(sample=6)
@pytest.mark.parametrize("without", OMISSIONS)
def test_what_was_forgotten_is_named(run: ckptstore.Run, without: str) -> None:
    """Each omission is found within two steps, and named first."""
    _trained(run)
    report = _resumed(run, without)
    assert report.verdict == "differs"
    assert report.steps <= 2
    assert report.names[0] == OMISSIONS[without], report.names
    assert report.names[0] in str(report)


@pytest.mark.short(sample=8)
@pytest.mark.parametrize("seed", range(50))
def test_a_clean_resume_raises_no_alarm(run: ckptstore.Run, seed: int) -> None:
    """Whatever the seed, a complete resume is exact, and the log says so."""
    _trained(run, seed)
    report = _resumed(run)
    assert (report.verdict, report.names, report.steps) == ("exact", (), 3)
    assert run.resolve().metadata["resumed"] == {"verdict": "exact", "steps": 3, "names": []}


def test_the_position_of_a_generator_is_compared(run: ckptstore.Run) -> None:
    """A generator that was seeded alike, but has drawn a few more numbers, is named at once."""
    for source in (torch.Generator().manual_seed(7), torch.default_generator):
        generator = source.manual_seed(7)
        given: dict[str, Any] = {"shuffling": generator}
        if source is torch.default_generator:
            given = {}
        torch.rand(3, generator=generator)
        with ckptstore.Witness(run, **given) as witness:
            run.save({"x": 1}, step=1, metadata=witness.metadata())
            for _ in range(3):
                torch.rand(2, generator=generator)
                witness.step()
        run.load()
        torch.rand(1, generator=generator.manual_seed(7))
        report = ckptstore.Witness(run, **given).report
        assert report is not None
        name = "shuffling" if given else "the generator of torch"
        assert (report.verdict, report.steps, report.names) == ("differs", 0, (name,))


def test_gradients_that_may_be_cleared_are_named_after_the_rest(run: ckptstore.Run) -> None:
    """At the save, what was certainly not restored comes first."""
    model, counter = nn.Linear(2, 1), {"epoch": 1}
    model(torch.ones(2)).sum().backward()
    with ckptstore.Witness(run, model=model, counter=counter) as witness:
        run.save(model.state_dict(), step=1, metadata=witness.metadata())
        witness.step()
    run.load()
    model.zero_grad()
    counter["epoch"] = 0
    report = ckptstore.Witness(run, model=model, counter=counter).report
    assert report is not None
    assert report.names == ("counter.epoch", OMISSIONS["grads"])
    assert str(report).endswith("in what was restored")


def test_a_mode_that_the_next_step_sets_raises_no_alarm(run: ckptstore.Run) -> None:
    """A save after an evaluation, and a resume before the first step that calls ``train()``."""
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    for forgotten, verdict in ((False, "exact"), (True, "differs")):
        with ckptstore.Witness(run, steps=1, model=model) as witness:
            model.eval()
            run.save(model.state_dict(), step=1, metadata=witness.metadata())
            model.train()
            witness.step()
        run.load()
        with ckptstore.Witness(run, model=model) as witness:
            model.train(mode=not forgotten)
            witness.step()
        assert witness.report is not None
        names = (OMISSIONS["train mode"],) if forgotten else ()
        assert (witness.report.verdict, witness.report.names) == (verdict, names)


def test_trainers_that_cannot_be_checked_are_refused() -> None:
    """An object instead of a function, a missing method, nothing to compare: never ``exact``."""

    class Empty:
        def train_step(self) -> None:
            """Do nothing."""

        def state_dict(self) -> dict[str, int]:
            return {"x": 1}

    class Full(Empty):
        def load_state_dict(self, state: object) -> None:
            """Restore nothing."""

    wrong: Any
    for wrong, said in (
        (Training(), "returns a new trainer"),
        (Empty, "no method load_state_dict"),
        (Full, "no attribute of the trainer Full"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            check_resume(wrong)


def test_wrong_arguments_are_refused(run: ckptstore.Run) -> None:
    """A store instead of a run, or a tolerance that is no number: the hint shows a right one."""
    wrong: Any = "x"
    for given, options in ((wrong, {}), (run, {"tolerance": -1}), (run, {"tolerance": wrong})):
        with pytest.raises(InvalidInputError) as caught:
            ckptstore.Witness(given, **options)
        assert caught.value.hint


def test_numbers_within_the_tolerance_are_close(run: ckptstore.Run) -> None:
    """A weight that differs by a rounding is named; a loss that does is close, and not exact."""
    training = Training()
    with ckptstore.Witness(run, numbers=training.scaler) as witness:
        run.save({"x": 1}, step=1, metadata=witness.metadata())
        witness.step(loss=1.0)
        witness.step(loss=1.0)
        witness.step(loss=1.0)
    for loss, verdict in ((1.0001, "close"), (1.01, "differs"), (float("nan"), "differs")):
        run.load()
        with ckptstore.Witness(run, numbers=training.scaler) as witness:
            for _ in range(3):
                witness.step(loss=loss)
        assert witness.report is not None
        assert (witness.report.verdict, witness.report.names) == (
            verdict,
            () if verdict == "close" else ("the loss",),
        )


def test_a_witness_of_a_save_in_the_background_finds_its_version(run: ckptstore.Run) -> None:
    """The steps after a save are noted with its version, though others were saved meanwhile."""
    training = Training()
    with ckptstore.Witness(run, steps=2, **_objects(training)) as witness:
        pending = run.save_async(training.state_dict(), step=0, metadata=witness.metadata())
        _steps(training, witness, 1)
        run.save({"other": 1}, step=1)
        _steps(training, witness, 1)
    first, second = pending.result(), run.resolve("1")
    assert len(run.resolve("0").metadata["witness"]) > len(first.metadata["witness"])
    assert "witness" not in second.metadata


@pytest.mark.parametrize(
    "text",
    [
        7, "", "no base64!", "é", b64encode(b"no zlib").decode(),
        b64encode(zlib.compress(b"\xc1")).decode(),
        b64encode(zlib.compress(bytes(100 << 20))).decode(),
        b64encode(zlib.compress(b"\x93\xa1t\x01\x91\x90")).decode(),
    ],
)  # fmt: skip
def test_a_hostile_witness_is_not_compared(run: ckptstore.Run, text: object) -> None:
    """Metadata that is no witness: the report says so, and the training goes on."""
    run.save({"x": 1}, step=1, metadata={"witness": text})
    run.load()
    with ckptstore.Witness(run, x={}) as witness:
        witness.step(loss=1.0)
    assert witness.report is not None
    assert (witness.report.verdict, witness.report.names) == (
        "unknown",
        ("its witness is damaged",),
    )


def test_a_run_that_was_not_resumed_has_no_report(run: ckptstore.Run) -> None:
    """Nothing loaded, or a version without a witness: nothing is said."""
    run.save({"x": 1}, step=1)
    with ckptstore.Witness(run, x={}) as witness:
        witness.step(loss=1.0)
    assert witness.report is None
    run.load()
    assert ckptstore.Witness(run, x={}).report is None


@pytest.mark.parametrize("at", ["restored", "steps"])
def test_a_few_draws_from_a_generator_are_seen(run: ckptstore.Run, at: str) -> None:
    """Draws that change four bytes of its state: not restored, or drawn from in the steps only."""
    torch.manual_seed(0)
    torch.rand(1)  # makes the numbers of the next 623 draws
    state = torch.get_rng_state()
    with ckptstore.Witness(run, x={}) as witness:
        torch.rand(5 if at == "restored" else 0)
        run.save({"x": 1}, step=1, metadata=witness.metadata())
        for _ in range(3):
            torch.rand(1)
            witness.step(loss=1.0)
    run.load()
    if at == "restored":
        torch.set_rng_state(state)
    else:
        torch.manual_seed(1)
    with ckptstore.Witness(run, x={}) as witness:
        assert witness.report is not None
        assert (witness.report.steps, witness.report.names) == (0, ("the generator of torch",))


def test_a_save_that_failed_is_not_waited_for(
    run: ckptstore.Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A witness without its version ends when the training ends, and says that it is not kept."""
    monkeypatch.setattr(witness_module, "_POLL_S", 0.0)
    with ckptstore.Witness(run, steps=1, x={}) as witness:
        witness.metadata()
        witness.step(loss=1.0)
    assert "no save has the witness" in caplog.text
    assert run.versions() == []


def test_generators_that_nothing_draws_from_do_not_matter(run: ckptstore.Run) -> None:
    """They may have any state; if something was drawn, or nothing is known, they are named."""
    for drawn, steps, verdict in ((False, 3, "exact"), (True, 3, "differs"), (False, 0, "differs")):
        with ckptstore.Witness(run, steps=steps, x={}) as witness:
            run.save({"x": 1}, step=1, metadata=witness.metadata())
            for _ in range(steps):
                witness.step(loss=torch.rand(()).item() if drawn else 1.0)
        run.load()
        torch.manual_seed(1)
        with ckptstore.Witness(run, x={}) as witness:
            for _ in range(3):
                witness.step(loss=1.0)
        assert witness.report is not None
        assert witness.report.verdict == verdict
        assert witness.report.names == (("the generator of torch",) if verdict != "exact" else ())
        torch.manual_seed(2)


def test_objects_without_a_state_are_refused(run: ckptstore.Run) -> None:
    """They are named with what can be given."""
    with pytest.raises(InvalidInputError, match="thing is object"):
        ckptstore.Witness(run, thing=object()).metadata()
    with pytest.raises(InvalidInputError, match="epoch=3 would stay") as raised:
        ckptstore.Witness(run, epoch=3)
    assert "epoch=lambda: epoch" in raised.value.hint
    with pytest.raises(InvalidInputError, match="steps"):
        ckptstore.Witness(run, steps=-1)


def test_large_models_have_a_small_witness() -> None:
    """Paths are cut until there are few; any change of a tensor changes its group."""
    layers = {
        f"layers.{n}.{part}.weight": torch.full((3, 3), float(n))
        for n in range(100)
        for part in "abcd"
    }
    before, computed = digests(leaves_of("model", layers), 256)
    assert len(before) == 100
    assert computed == set(before)
    layers["layers.7.c.weight"][1, 1] += 1
    after, _ = digests(leaves_of("model", layers), 256)
    assert [name for name in before if before[name] != after[name]] == ["model.layers.7"]


@pytest.mark.parametrize("alike", [False, True])
def test_a_witness_of_many_ranks_has_those_that_fit(*, alike: bool) -> None:
    """Of 1,024 ranks as many first ones as the limits allow; what is stored can be read."""

    def moment(rank: int) -> Moment:
        names = (f"model.layers.{n}.attention.weight" for n in range(256))
        seed = 0 if alike else rank
        return Moment(
            entries={name: blake3_of([f"{seed}{name}".encode()]).hex()[:8] for name in names}
        )

    ranks = [moment(rank) for rank in range(1024)]
    stored = witness_module._Stored(token="t" * 32, ranks=1024, moments=[ranks, ranks])
    found = witness_module._unpacked(witness_module._packed(stored))
    assert found is not None
    assert (found.ranks, len(found.moments)) == (1024, 2)
    assert len(found.moments[0]) == (128 if alike else 8)
    assert found.moments[0] == ranks[: len(found.moments[0])]


def test_tensors_of_any_kind_have_a_digest() -> None:
    """Strided views, bf16, complex, bool, empty, sparse and meta tensors."""
    kinds = {
        "view": torch.arange(2000.0).reshape(40, 50).t(),
        "bf16": torch.ones(100, dtype=torch.bfloat16),
        "complex": torch.ones(3, dtype=torch.complex64).conj(),
        "bool": torch.ones(100, dtype=torch.bool),
        "empty": torch.ones(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "number": torch.tensor(1.0),
    }
    told, _ = digests(leaves_of("all", kinds), 256)
    assert set(told) == {f"all.{name}" for name in kinds}
    assert told == digests(leaves_of("all", kinds), 256)[0]


def test_values_have_the_same_digest_in_every_process() -> None:
    """Orders of sets and of entries, and addresses of objects, are those of a process."""
    function, other = (lambda: 0 for _ in range(2))
    pairs: list[tuple[Any, Any]] = [
        ({0, 8}, {8, 0}),
        ({"a": {0, 8}}, {"a": {8, 0}}),
        ({frozenset({0, 8})}, {frozenset({8, 0})}),
        ({"a": function}, {"a": other}),
        ({"a": np.array([1.0, 2.0])}, {"a": np.array([1.0, 2.0])}),
    ]
    for one, same in pairs:
        assert _digest(one) == _digest(same), one
    many = {f"{n % 50}.{n}": n for n in range(600)}
    assert digests(_leaves(many), 60) == digests(_leaves(dict(reversed(many.items()))), 60)


def _leaves(value: object) -> list[Any]:
    return list(leaves_of("x", value))


def _digest(value: object) -> dict[str, str]:
    return digests(_leaves(value), 256)[0]


def test_arrays_and_small_types_have_digests_of_their_elements() -> None:
    """NumPy arrays of any order and type; types of less than a byte; tensors made of others."""
    array = np.arange(200.0)
    assert _digest({"a": array}) != _digest({"a": array + 1e-12})
    assert _digest({"a": array}) == _digest({"a": array[::-1][::-1]})
    assert _digest(array.astype(">f8")) != _digest(array.astype(">f8") + 1)
    assert _digest({"a": np.array(["x", None])}) != _digest({"a": np.array(["y", None])})
    halves = torch.arange(200, dtype=torch.uint8)
    assert _digest(halves.view(torch.float4_e2m1fn_x2)) != _digest(
        (halves + 1).view(torch.float4_e2m1fn_x2)
    )
    one, two = (_two_tensor(n) for n in (1.0, 2.0))
    assert _digest({"a": one}) != _digest({"a": two})


def _two_tensor(value: float) -> torch.Tensor:
    made: torch.Tensor = TwoTensor(torch.zeros(90), torch.full((90,), value))  # type: ignore[no-untyped-call]
    return made


def test_a_compiled_module_has_the_paths_of_its_own() -> None:
    """A resumed training may compile its modules, or not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain = dict(leaves_of("model", model))
    compiled = dict(leaves_of("model", torch.compile(model, backend="eager")))
    setattr(model, "0", torch.compile(model[0], backend="eager"))
    inner = dict(leaves_of("model", model))
    assert plain.keys() == compiled.keys() == inner.keys()
    for name in ("model (frozen)", "model (train and eval)"):
        assert plain[name] == compiled[name] == inner[name]


class Ordinary(Training):
    """Has what trainings have besides a state: functions, an iterator, a loader that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.functional.mse_loss
        self.kind = Training
        self.rows: Iterator[int] | None = None
        self.source = Drawing()

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Do a step."""
        self.rows = self.rows or iter(range(100))
        next(self.rows)
        return super().train_step()


class Drawing:
    """Draws from the global generator when it is asked for its state first, as loaders do."""

    asked = False

    def state_dict(self) -> dict[str, int]:
        """Return nothing of interest."""
        if not self.asked:
            torch.rand(1)
        self.asked = True
        return {}


class Forgetful(Training):
    """Restores nothing of its scheduler."""

    def load_state_dict(self, state: dict[str, Any], without: str = "scheduler") -> None:
        """Restore everything else."""
        super().load_state_dict(state, without)


def test_check_resume() -> None:
    """Exact for a training that restores everything; an AssertionError names what is forgotten."""
    assert check_resume(Training).verdict == "exact"
    assert check_resume(Ordinary, steps=0).verdict == "exact"
    with pytest.raises(AssertionError, match=r"scheduler\.last_epoch"):
        check_resume(Forgetful)
