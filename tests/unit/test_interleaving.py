"""Two trainings under one name: allowed, and said once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from simulated_environment import SimulatedEnvironment

from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import lifecycle_ops
from ckptstore.catalog.log import Build, Log

Saving = Callable[..., Build]


@pytest.fixture
def logs(memory: MemoryBackend, environment: SimulatedEnvironment) -> tuple[Log, Log]:
    """Return the logs of two processes."""
    return Log(memory, environment, by="ann@a 1"), Log(memory, environment, by="bob@b 2")


def test_it_is_said_once_who_saved_in_between(
    logs: tuple[Log, Log], saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """The second save of a run after another's names that other; later ones are silent."""
    ann, bob = logs
    with caplog.at_level(logging.WARNING, "ckptstore"):
        ann.append(saving("gpt", 1))
        bob.append(saving("gpt", 2))  # continues a run: nothing strange about that
        bob.append(saving("gpt", 3))
        assert caplog.messages == []
        ann.append(saving("gpt", 4))
        assert len(caplog.messages) == 1
        assert "run gpt: bob@b 2 saved step 3 between two saves" in caplog.messages[0]
        bob.append(saving("gpt", 5))
        ann.append(saving("gpt", 6))

    assert len(caplog.messages) == 2, "each process says it once"
    assert "ann@a 1 saved step 4" in caplog.messages[1]


def test_who_saves_for_this_process_is_no_other(
    memory: MemoryBackend,
    environment: SimulatedEnvironment,
    saving: Saving,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that was befriended may save in between; a third one may not."""
    ann, child = (Log(memory, environment, by=f"ann@a {pid}") for pid in (1, 7))
    ann.others.befriend(7)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        ann.append(saving("gpt", 1))
        child.append(saving("gpt", 2))
        ann.append(saving("gpt", 3))
        assert caplog.messages == []
        Log(memory, environment, by="ann@b 7").append(saving("gpt", 4))
        ann.append(saving("gpt", 5))

    assert "ann@b 7 saved step 4" in caplog.messages[0]


def test_other_runs_and_rollbacks_are_nothing_strange(
    logs: tuple[Log, Log], saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither saves to another run, nor another's rollback of this one, are mistaken for it."""
    ann, bob = logs
    with caplog.at_level(logging.WARNING, "ckptstore"):
        ann.append(saving("gpt", 1, version="1" * 32))
        ann.append(saving("gpt", 2))
        bob.append(saving("lora", 1))
        bob.append(lambda now: lifecycle_ops.rollback(now, run="gpt", version="1" * 32))
        ann.append(saving("gpt", 3))

    assert caplog.messages == []
