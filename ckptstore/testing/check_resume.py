"""A check, for tests of one's own, that a training resumes as if it had never stopped."""

from __future__ import annotations

import os
import random  # noqa: TID251 - a new process has other states than this one
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

import ckptstore
from ckptstore.errors import InvalidInputError
from ckptstore.resuming.comparison import ResumeReport, has_state


class Trainer(Protocol):
    """A training, by what :func:`check_resume` calls."""

    def train_step(self) -> object:
        """Do one step; return the loss, or loss and batch."""

    def state_dict(self) -> Any:  # noqa: ANN401 - whatever a store can hold
        """Return what is saved."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Restore it."""


def check_resume(
    make_trainer: Callable[[], Trainer], *, steps: int = 3, before: int = 3, tolerance: float = 0.0
) -> ResumeReport:
    """Train, save and train on; then resume in a second trainer, and compare the two.

    Compared are the attributes of the trainer that have a state (modules, optimizers, schedulers,
    loaders, generators, numbers), the global generators, and the loss and gradients of each step.

    Parameters
    ----------
    make_trainer
        Returns a new trainer, as at the start of a process.
    steps
        Steps after the save that both do.
    before
        Steps before it.
    tolerance
        Relative difference of loss and gradients that is accepted.

    Raises
    ------
    AssertionError
        The second does not go on as the first; names what differs and when.
    InvalidInputError
        `make_trainer` is no function, or what it returns lacks a method, or has nothing to compare.

    Examples
    --------
    >>> def test_resume():
    ...     assert check_resume(MyTrainer).verdict == "exact"
    """
    given: object = make_trainer
    if not callable(given):
        msg = f"make_trainer is a function that returns a new trainer, not {given!r:.80}"
        raise InvalidInputError(msg, hint="such as the class of the trainer")
    with (
        tempfile.TemporaryDirectory() as folder,
        ckptstore.open(os.path.join(folder, "store"), create=True) as store,  # noqa: PTH118
    ):
        run, trainer = store.run("checked"), make_trainer()
        _check(trainer)
        for _ in range(before):
            trainer.train_step()
        with ckptstore.Witness(run, steps=steps, **_compared(trainer)) as witness:
            run.save(trainer.state_dict(), step=before, metadata=witness.metadata())
            _train(trainer, witness, steps)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(int.from_bytes(os.urandom(4)))
        resumed = make_trainer()
        resumed.load_state_dict(run.load())
        with ckptstore.Witness(
            run, steps=steps, tolerance=tolerance, **_compared(resumed)
        ) as witness:
            _train(resumed, witness, steps)
        report = witness.report
    assert report is not None  # noqa: S101  # as many steps as were noted
    if report.verdict == "differs":
        raise AssertionError(str(report))
    return report


def _check(trainer: Trainer) -> None:
    """Refuse an object that cannot be checked."""
    name = type(trainer).__name__
    for method in ("train_step", "state_dict", "load_state_dict"):
        if not callable(getattr(trainer, method, None)):
            msg = f"the trainer {name} has no method {method}()"
            raise InvalidInputError(msg, hint="see docs/howto/proved-resumes.md")
    if not _compared(trainer):
        msg = f"no attribute of the trainer {name} has a state to compare"
        raise InvalidInputError(msg, hint="make model, optimizer, scheduler ... its attributes")


def _train(trainer: Trainer, witness: ckptstore.Witness, steps: int) -> None:
    for _ in range(steps):
        told = trainer.train_step()
        loss, batch = told if isinstance(told, tuple) else (told, None)
        witness.step(loss=loss if isinstance(loss, float | torch.Tensor) else None, batch=batch)


def _compared(trainer: Trainer) -> dict[str, Any]:
    """Return the attributes that have a state to compare.

    Iterators are over when a training resumes; their batches are compared.
    """
    return {
        name.lstrip("_") or name: partial(getattr, trainer, name)
        for name, value in vars(trainer).items()
        if has_state(value) and not hasattr(value, "__next__")
    }
