"""What one trainer stores, each other one loads: the table of docs/reference/trainers.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rankkit.exchange import TRAINERS, exchange
from rankkit.groups import run_ranks

import ckptstore
from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations.model_names import set_whole, untrained
from ckptstore.integrations.weights import load_weights
from ckptstore.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "trainers.md"
RESUMES = {"Accelerate": 2, "Trainer": 2, "Lightning": 2}
"""Trainers whose kinds resume each other's trainings; for Accelerate test_sharded shows it."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_trainer_loads_the_weights_of_each_other_one(tmp_path: Path) -> None:
    """64 pairs on two ranks, bit by bit; the page has the table."""
    url = str(tmp_path / "ckpts")
    ckptstore.open(url, create=True).close()
    found = run_ranks(exchange, 2, url, timeout_s=500)[0]
    resumed = {(writer, reader) for writer, reader, what in found if what == "resume"}
    loaded = {(writer, reader) for writer, reader, what in found if what == "weights"}
    assert loaded == {(writer, reader) for writer in TRAINERS for reader in TRAINERS}
    assert len(resumed) == 4

    def cell(writer: str, reader: str) -> str:
        of_one = writer.split()[0] == reader.split()[0] in RESUMES
        assert not of_one or writer[:4] == "Acce" or writer == reader or (writer, reader) in resumed
        return "resume" if of_one else "weights"

    table = [
        f"| {writer} | " + " | ".join(cell(writer, reader) for reader in TRAINERS) + " |"
        for writer in TRAINERS
    ]
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(table) in page, "\n".join(table)


def _net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def _compiled(net: Any) -> Any:
    return torch.compile(net, backend="eager")


def test_weights_are_found_by_their_names(store: Store) -> None:
    """At the root, below any path, compiled or not; tied weights may be stored once."""
    run, net = store.run("gpt"), _net()
    for step, state in enumerate(
        [
            dict(net.state_dict()),
            {"model": net.state_dict(), "step": 3, "optimizer": {"0.weight": {"m": torch.ones(1)}}},
            {"nets": {"a": [net.state_dict()]}},
            {"model": _compiled(net).state_dict()},
        ]
    ):
        run.save(state, step=step)
        for other in (_net(), _compiled(_net())):
            assert load_weights(other, run, step).step == step
            pairs = zip(other.parameters(), net.parameters(), strict=True)
            assert all(torch.equal(mine, saved) for mine, saved in pairs)

    tied = _net()
    tied[1].weight = tied[0].weight
    once = {name: one for name, one in net.state_dict().items() if name != "1.weight"}
    run.save({"model": once}, step=9)
    load_weights(tied, run)
    assert torch.equal(tied[1].weight, net[0].weight)


def test_weights_that_are_elsewhere_are_refused(store: Store) -> None:
    """Several places, none, other shapes, a name for a run: nothing is changed."""
    run, net = store.run("gpt"), _net()
    run.save({"model": net.state_dict(), "ema": net.state_dict()}, step=1)
    other = _net()
    before = [one.clone() for one in other.parameters()]
    with pytest.raises(InvalidInputError, match="at 'ema', 'model'") as told:
        load_weights(other, run)
    assert told.value.hint == "name one: path='ema'"
    with pytest.raises(StateError, match="does not have the weights of the Sequential"):
        load_weights(torch.nn.Sequential(_net()), run)
    run.save({"model": {**net.state_dict(), "0.bias": torch.ones(3)}}, step=2)
    with pytest.raises(StateError, match=r"differ in 1 names or shapes, as 'model\.0\.bias'"):
        load_weights(other, run)
    run.save({"model": {**net.state_dict(), "2.bias": torch.ones(3)}}, step=3)
    with pytest.raises(StateError, match=r"differ in 1 names or shapes, as 'model\.2\.bias'"):
        load_weights(other, run)
    with pytest.raises(InvalidInputError, match="run of a store"):
        load_weights(other, "gpt")  # type: ignore[arg-type]
    assert all(map(torch.equal, other.parameters(), before))
    load_weights(other, run, 1, path="ema")
    assert all(map(torch.equal, other.parameters(), net.parameters()))


def test_what_is_not_trained_may_be_missing(store: Store) -> None:
    """All frozen weights or none of them; parts of quantized ones belong to them."""
    net = _net()
    net[0].requires_grad_(False)
    names = {"0.weight", "0.bias", "0.weight.absmax", "1.weight", "1.bias"}
    assert untrained(net, names) == {"0.weight", "0.bias", "0.weight.absmax"}
    state = _net().state_dict()
    trained = {name: one for name, one in state.items() if name.startswith("1.")}
    assert not any(set_whole(net, trained))
    assert torch.equal(net[1].weight, state["1.weight"])
    some = {**trained, "0.bias": state["0.bias"]}
    assert set_whole(net, some).missing_keys == ["0.weight"]
    run = store.run("gpt")
    run.save({"model": trained}, step=1)
    load_weights(net, run)
    run.save({"model": some}, step=2)
    with pytest.raises(StateError, match="does not have the weights"):
        load_weights(net, run)
    with pytest.raises(StateError, match=r"as 'model\.0\.weight'"):
        load_weights(net, run, path="model")
    net.requires_grad_(True)
    with pytest.raises(StateError, match="does not have the weights"):
        load_weights(net, run, 1)
