"""Loading into existing tensors and onto devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.errors import InvalidInputError, TensorNotFoundError
from ckptstore.format.paths import PathFilter
from ckptstore.tensors.restore import Restorer

Make = Callable[..., Any]
Same = Callable[[object, object], None]


def test_into_decodes_in_place(shelf: Make) -> None:
    """A tensor of the record's layout is decoded into directly, and is what comes back."""
    kept = shelf({"m": {"w": torch.arange(12.0).view(3, 4)}, "step": 3})
    target = torch.zeros(3, 4)
    restorer = Restorer(kept.node, kept.records, into={"m": {"w": target}})
    destination = restorer.destination(0)
    assert np.frombuffer(destination.view, np.uint8).ctypes.data == target.data_ptr()
    destination.view[:] = kept.records[0].data
    back = restorer.build()
    assert back["m"]["w"] is target
    assert torch.equal(target, torch.arange(12.0).view(3, 4))
    assert back["step"] == 3


def test_into_other_layouts(shelf: Make) -> None:
    """Targets with gaps, other strides, offsets or lazy negation get the values all the same."""
    source = torch.randn(4, 3)
    kept = shelf([source] * 4)
    room = torch.zeros(40)
    negated = torch.zeros(4, 3, dtype=torch.complex64).conj().imag
    targets = [torch.zeros(3, 4).t(), torch.zeros(4, 9)[:, 1::3], room[5:17].view(4, 3)]
    back = kept.load(into=targets)
    for target, value in zip(targets, back, strict=False):
        assert value is target
        assert torch.equal(target, source)
    assert torch.equal(back[3], source)
    assert not room[:5].any()
    assert not room[17:].any()
    kept.load(into=[negated])
    assert torch.equal(negated.resolve_neg(), source)


def test_into_a_live_model(shelf: Make, assert_same: Same) -> None:
    """Parameters of a model are filled through its state dict, tied and requiring grad ones too."""
    saved, live = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)) for _ in "ab")
    for model in (saved, live):
        model[1].weight = model[0].weight
    kept = shelf(saved.state_dict())
    kept.load(into=dict(live.named_parameters(remove_duplicate=False)))
    assert_same(dict(saved.state_dict()), dict(live.state_dict()))
    assert live[1].weight is live[0].weight


def test_into_an_untied_model(shelf: Make) -> None:
    """One tensor of the version fills two of a model that does not tie them."""
    weight = torch.randn(3)
    targets = {"a": torch.zeros(3), "b": torch.zeros(3)}
    shelf({"a": weight, "b": weight}).load(into=targets)
    assert torch.equal(targets["a"], weight)
    assert torch.equal(targets["b"], weight)


def test_into_views(shelf: Make) -> None:
    """A view of the version fills a tensor of its own."""
    flat = torch.randn(10)
    target = torch.zeros(4)
    back = shelf({"flat": flat, "part": flat[2:6]}).load(into={"part": target})
    assert back["part"] is target
    assert torch.equal(target, flat[2:6])
    assert torch.equal(back["flat"], flat)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"w": torch.zeros(3)}, r"'w' is float32\[2\].*but float32\[3\]"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, r"but float64\[2\]"),
        ({"w": torch.empty(2, device="meta")}, "'w' is not a plain"),
        ({"n": torch.zeros(2)}, "'n' is a numpy leaf"),
        ({"v": torch.zeros(3)}, r"'v' is float32\[1\]"),
        (torch.nn.Linear(1, 1), r"state_dict\(\)"),
    ],
    ids=["shape", "dtype", "meta", "numpy", "view", "module"],
)
def test_into_that_does_not_fit(into: object, message: str, shelf: Make) -> None:
    """A difference in shape, dtype or kind is an error that names the path, before any read."""
    weight = torch.ones(2)
    kept = shelf({"w": weight, "n": np.zeros(2), "v": weight[1:]})
    with pytest.raises(InvalidInputError, match=message):
        Restorer(kept.node, kept.records, into=into)


def test_into_unknown_path(shelf: Make) -> None:
    """A tensor that the version does not have would stay unfilled: it is an error."""
    kept = shelf({"w": torch.ones(2)})
    with pytest.raises(TensorNotFoundError, match=r"'m\.w'") as told:
        kept.load(into={"m": {"w": torch.zeros(2)}})
    assert "Store.load_into fills what fits" in told.value.hint
    with pytest.raises(TensorNotFoundError, match="'w'") as told:
        shelf({"m": {"w": torch.ones(2)}}).load(into={"w": torch.zeros(2)})
    assert told.value.hint == "the version has 'm.w': nest into as the state that was saved"
    with pytest.raises(TensorNotFoundError, match="'w'"):
        kept.load(PathFilter([]), into={"w": torch.zeros(2)})


def test_into_shared_memory(shelf: Make) -> None:
    """Two tensors of the version cannot be read into one memory."""
    room = torch.zeros(6)
    kept = shelf({"a": torch.ones(4), "b": torch.zeros(4)})
    with pytest.raises(InvalidInputError, match="'a' and 'b' share memory"):
        kept.load(into={"a": room[:4], "b": room[2:]})
    kept.load(into={"a": torch.zeros(4), "b": torch.zeros(8)[:4]})


def test_map_location(shelf: Make) -> None:
    """Strings, devices, dicts and torch.load's callables are taken; nonsense is refused."""
    kept = shelf({"w": torch.ones(2), "g": torch.Generator()})
    seen: list[tuple[int, str]] = []

    def record(storage: torch.UntypedStorage, saved: str) -> torch.UntypedStorage:
        seen.append((storage.nbytes(), saved))
        return storage

    named: list[Any] = [lambda *_: "cpu", lambda *_: torch.device("cpu")]
    given = (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {"cpu": "cpu"}, record)
    for where in (*given, *named):
        assert kept.load(map_location=where)["w"].device.type == "cpu"
    assert seen == [(0, "cpu")]
    for wrong in ("nowhere", "meta", 3, {"cpu": 5}, lambda *_: 5):
        with pytest.raises(InvalidInputError):
            kept.load(map_location=wrong)


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "xpu", "hpu", "gpu", "vulkan"])
@pytest.mark.parametrize("kind", ["text", "device", "dict"])
def test_a_device_that_is_not_there_is_refused_before_reading(
    shelf: Make, device: str, kind: str
) -> None:
    """Named at once, with what loads instead, and not as memory that cannot be had."""
    if device.startswith(str(torch.accelerator.current_accelerator() or "none")):
        device = f"{device.partition(':')[0]}:99"
    where: Any = {"cpu": device} if kind == "dict" else device
    if kind == "device" and device != "gpu":  # torch makes no such device
        where = torch.device(device)
    kept = shelf({"w": torch.ones(16)})

    with pytest.raises(InvalidInputError, match=f"map_location is '{device}'") as told:
        Restorer(kept.node, kept.records, map_location=where)

    assert "cpu" in told.value.hint


def test_generators_and_random_states_stay_on_the_cpu(shelf: Make) -> None:
    """What torch wants on the CPU is not sent to a device, whatever map_location says."""
    kept = shelf({"rng": torch.get_rng_state(), "n": np.zeros(1), "g": torch.Generator()})
    rng = kept.records[0].__class__(
        dtype="uint8", shape=kept.records[0].shape, order=None, nbytes=kept.records[0].nbytes,
        data=kept.records[0].data, role="rng",
    )  # fmt: skip
    restorer = Restorer(kept.node, [rng, *kept.records[1:]], map_location="cuda")
    for index in restorer.needed:
        restorer.destination(index).view[:] = kept.records[index].data
    assert restorer.build()["rng"].device.type == "cpu"


def test_destinations_from_many_threads(shelf: Make, assert_same: Same) -> None:
    """Destinations can be made and filled from several threads at once."""
    state = {str(i): torch.randn(50) for i in range(40)}
    kept = shelf(state)
    restorer = Restorer(kept.node, kept.records)

    def work(first: int) -> None:
        for index in range(first, 40, 4):
            restorer.destination(index).view[:] = kept.records[index].data

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(state, restorer.build())
