"""Arguments of saves and loads: each is in one record, whichever public method takes it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import ckptstore
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.states.load import LoadRequest
from ckptstore.states.save import SaveRequest

INSIDE = {"together"}
"""Fields of a load that no caller gives."""
OF_THE_RUN = {"run", "directions"}
"""Fields of a save that come from the run, and not from the caller."""


def _words(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a method, and the step, which may also stand alone."""
    parameters = inspect.signature(method).parameters.values()
    return {
        one.name: one for one in parameters if one.kind is one.KEYWORD_ONLY or one.name == "step"
    }


def test_both_saves_take_the_record_of_a_save() -> None:
    """A field that one of the two forgets, or takes with another default, shows here."""
    now, later = _words(ckptstore.Run.save), _words(ckptstore.Run.save_async)
    asked = {one.name for one in fields(SaveRequest)} - OF_THE_RUN
    assert set(now) == asked | {"retain"}
    assert set(later) == set(now) | {"if_busy", "stage"}
    assert {name: later[name] for name in now} == now


@pytest.mark.parametrize(
    ("method", "beside"),
    [
        (ckptstore.LazyVersion.load, set()),
        (ckptstore.Store.load, {"fall_through", "refill", "group"}),
        (ckptstore.Run.load, {"fall_through", "refill", "group"}),
    ],
)
def test_each_load_takes_the_record_of_a_load(method: Callable[..., Any], beside: set[str]) -> None:
    """With the same defaults; what is besides says where the bytes may come from."""
    words = _words(method)
    found = {one.name: one.default for one in fields(LoadRequest) if one.name not in INSIDE}
    assert {name: one.default for name, one in words.items() if name not in beside} == found
    assert set(words) - set(found) == beside


def test_the_plain_part_of_a_save_leaves_the_state_behind() -> None:
    """It goes to another process, where adapters and callbacks of the user cannot go."""
    adapter: Any = lambda: None  # noqa: E731 - what no pickle holds
    request = SaveRequest(
        run="gpt",
        step=3,
        directions={"loss": "min"},
        metrics={"loss": 1.5},
        tags=["a"],
        metadata={"n": (1, 2)},
        codec="raw",
        derive=False,
        adapters=[adapter],
        plain=True,
        progress=adapter,
    )
    plain = request.portable()
    assert type(plain) is WriteRequest
    assert plain == WriteRequest(
        run="gpt",
        step=3,
        directions={"loss": "min"},
        metrics={"loss": 1.5},
        tags=("a",),
        metadata={"n": [1, 2]},
        codec="raw",
        derive=False,
    )
    assert pickle.loads(pickle.dumps(plain)) == plain  # noqa: S301 - our own
