"""Every way to read a tensor gives the same elements, whatever recipe they follow from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from metered import MeteredBackend
from peaks import memory_below
from recipekit import Form, save, stored_bytes
from safetensors.torch import load_file
from shortening import examples
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.checkpoint.content import Content, read_content
from ckptstore.checkpoint.ranges import Range, read_ranges
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.config import Options
from ckptstore.errors import CorruptTensorError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.paths import path_text
from ckptstore.integrations.dcp import CkptStoreReader
from ckptstore.integrations.files import export_safetensors
from ckptstore.limits import CHUNK_BYTES_MIN
from ckptstore.repo import create_on

Stores = Callable[..., ckptstore.Store]

FORMS = {
    "model.weight": Form(of="optimizer.master"), "model.conv": Form(code="linear", block=64),
    "model.bias": Form(to="float8_e5m2"), "optimizer.m": Form(code="dynamic-signed"),
    "optimizer.v": Form(code="dynamic-unsigned", block=100), "optimizer.half": Form(to="bfloat16"),
    "optimizer.double": Form(to="float32"), "optimizer.brain": Form(code="linear", block=2048),
    "empty": Form(to="bfloat16"), "scalar": Form(code="linear"),
}  # fmt: skip


def state() -> dict[str, Any]:
    """Return tensors of many pieces, small ones, one in another order, an empty one."""
    random = torch.Generator().manual_seed(3)
    master = torch.randn(301, 403, generator=random)
    return {
        "model": {
            "weight": master.to(torch.bfloat16),
            "conv": torch.randn(8, 9, 31, 17, generator=random).contiguous(
                memory_format=torch.channels_last
            ),
            "bias": torch.randn(403, generator=random, dtype=torch.float16),
            "plain": torch.randn(70, 70, generator=random),
        },
        "optimizer": {
            "master": master,
            "m": torch.randn(301, 403, generator=random) * 1e-3,
            "v": torch.rand(301, 403, generator=random) ** 8,
            "half": torch.randn(301, 403, generator=random),
            "double": torch.randn(111, 113, generator=random, dtype=torch.float64),
            "brain": torch.randn(50_001, generator=random).to(torch.bfloat16),
        },
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(0.625),
        "step": 7,
    }


def leaf_of(loaded: dict[str, Any], name: str) -> torch.Tensor:
    """Return a tensor of a loaded state by its path."""
    found: Any = loaded
    for key in name.split("."):
        found = found[key]
    assert isinstance(found, torch.Tensor)
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are equal bit for bit, and laid out alike."""
    return one.dtype == other.dtype and stored_bytes(one) == stored_bytes(other)


@pytest.mark.parametrize("host_bytes", [1, 200_000, 1 << 28])
def test_a_whole_load_gives_back_what_the_recipes_say(stores: Stores, host_bytes: int) -> None:
    """Each tensor has the elements that its form keeps, and its place in memory, at any budget."""
    store = stores(host_bytes=host_bytes)
    given = state()
    _, expected = save(store, given, FORMS)

    loaded = store.load("gpt")

    for name, tensor in expected.items():
        assert same(leaf_of(loaded, name), tensor), name
        assert leaf_of(loaded, name).stride() == leaf_of(given, name).stride() or not tensor.numel()
    assert same(loaded["model"]["weight"], given["model"]["weight"])
    assert same(loaded["model"]["plain"], given["model"]["plain"])
    assert loaded["step"] == 7


@dataclass(frozen=True, slots=True)
class Kept:
    """A version with tensors of every form, and what it gives back."""

    store: ckptstore.Store
    content: Content
    expected: dict[str, torch.Tensor]
    stored: dict[str, bytes]
    """The same, in stored order."""

    def index(self, name: str) -> int:
        """Return the record of a tensor."""
        return next(n.index for n in self.content.leaves if path_text(n.path) == name)


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    """Return one version for all tests that only read, with little memory to do so."""
    options = Options(host_bytes=300_000)
    backend = MemoryBackend("recipes/kept")
    with ckptstore.Store(create_on(backend, chunk_bytes=CHUNK_BYTES_MIN, options=options)) as store:
        version, expected = save(store, state(), FORMS)
        found = Kept(store, read_content(store.repo.manifests.load(version)), expected, {})
        for name, tensor in expected.items():
            order = found.content.manifest.tensors[found.index(name)].order
            found.stored[name] = stored_bytes(tensor, order)
        yield found


def read_bytes(store: ckptstore.Store, do: Callable[[], object]) -> int:
    """Return how many bytes of packs something reads."""
    backend = store.repo.backend
    assert isinstance(backend, MeteredBackend)
    before = backend.snapshot()["read_into"].bytes_moved
    do()
    return backend.snapshot()["read_into"].bytes_moved - before


def test_a_whole_load_reads_what_others_follow_from_once(stores: Stores) -> None:
    """Weights that follow from masters, which are loaded too, cost no byte more."""
    store = stores()
    save(store, state(), {"model.weight": FORMS["model.weight"]})
    names = ["optimizer.master", "model.weight"]
    store.load("gpt", include=names[:1])

    alone, both, weight = (
        read_bytes(store, lambda part=part: store.load("gpt", include=part))  # type: ignore[misc]
        for part in (names[:1], names, names[1:])
    )

    assert both == alone == weight > 0


INDICES: list[Any] = [
    5, -1, slice(7, 9), slice(290, 400), slice(3, 3), (slice(10, 12), slice(5, 300, 7)),
    (4, slice(100, 103)), (200, 17), (..., 5), torch.tensor([1, 299]),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", ["model.weight", "optimizer.m", "optimizer.v", "optimizer.half"])
def test_a_slice_is_that_of_the_whole(kept: Kept, name: str, index: Any) -> None:  # noqa: ANN401
    """Indexing an unread tensor gives what indexing the loaded one would."""
    found = kept.store.version("gpt")[name][index]

    assert same(found, kept.expected[name][index])
    assert found.shape == kept.expected[name][index].shape


def test_slices_of_a_tensor_in_another_order(kept: Kept) -> None:
    """Leading integers and slices select by the order in memory, codes and scales alike."""
    lazy = kept.store.version("gpt")["model.conv"]

    for index in (3, slice(2, 5), (1, 4), (slice(None), 2), (0, slice(1, 3), 5)):
        assert same(lazy[index], kept.expected["model.conv"][index]), index


@pytest.mark.parametrize("name", ["model.weight", "optimizer.m"])
def test_a_slice_reads_the_codes_and_scales_that_it_needs(stores: Stores, name: str) -> None:
    """One row costs a piece of the codes and one of the scales, however large the tensor."""
    store = stores()
    save(store, state(), {name: FORMS[name]})
    lazy = store.version("gpt")[name]
    lazy.load()

    whole, row = read_bytes(store, lazy.load), read_bytes(store, lambda: lazy[150])

    assert 0 < row < 0.7 * whole


@pytest.mark.parametrize("host_bytes", [1, 1 << 28])
@pytest.mark.parametrize("name", ["model.weight", "model.conv", "optimizer.v", "optimizer.double"])
def test_boxes(kept: Kept, name: str, host_bytes: int) -> None:
    """A box, as readers of torch.distributed.checkpoint ask for, is that of the whole tensor."""
    whole, backend = kept.expected[name], kept.store.repo.backend
    random = np.random.default_rng(1)
    for _ in range(6):
        low = [int(random.integers(0, size)) for size in whole.shape]
        high = [int(random.integers(a, n)) + 1 for a, n in zip(low, whole.shape, strict=True)]
        part = whole[tuple(map(slice, low, high))]
        out = np.zeros(part.shape, f"V{part.element_size()}")
        index, start = kept.index(name), tuple(low)
        region = Region(content=kept.content, index=index, offsets=start, out=out)
        read_regions([region], backend=backend, options=Options(host_bytes=host_bytes))

        assert out.tobytes() == stored_bytes(part)


def test_tensors_that_are_there_are_filled_in_place(stores: Stores) -> None:
    """A load into existing tensors makes the elements in their memory; a transfer casts them."""
    store = stores()
    given = state()
    _, expected = save(store, given, FORMS)
    mine = {"model": {k: torch.zeros_like(v) for k, v in given["model"].items()}}
    places = {name: tensor.data_ptr() for name, tensor in mine["model"].items()}

    store.load("gpt", include=["model"], into=mine)

    for name, tensor in mine["model"].items():
        wanted = expected.get(f"model.{name}", given["model"][name])
        assert same(tensor, wanted), name
        assert tensor.data_ptr() == places[name]
    other = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in given["model"].items()}
    report = store.load_into("gpt", {"model": other}, include=["model"])

    assert report.complete
    for name, tensor in other.items():
        wanted = expected.get(f"model.{name}", given["model"][name])
        assert torch.equal(tensor, wanted.double()), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_readers_of_torch_distributed_checkpoint(stores: Stores) -> None:
    """A state is filled through torch's own loader, whatever it follows from."""
    store = stores()
    given = state()
    _, expected = save(store, given, FORMS)
    names = {"model": given["model"], "optimizer": given["optimizer"]}
    into = {part: {k: torch.zeros_like(v) for k, v in names[part].items()} for part in names}

    load_distributed(into, storage_reader=CkptStoreReader(store.run("gpt")))

    for part, tensors in into.items():
        for name, tensor in tensors.items():
            wanted = expected.get(f"{part}.{name}", given[part][name])
            assert same(tensor, wanted), name


def test_exports_hold_what_a_load_gives(stores: Stores, tmp_path: Path) -> None:
    """A safetensors file has the restored elements, and none of what is hidden."""
    store = stores()
    given = state()
    _, expected = save(store, given, FORMS)
    whole = {"empty": expected["empty"], "scalar": expected["scalar"]}
    for part in ("model", "optimizer"):
        for name, tensor in given[part].items():
            whole[f"{part}.{name}"] = expected.get(f"{part}.{name}", tensor)

    export_safetensors(store, "gpt", tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")

    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert same(found[name], tensor), name


@pytest.mark.slow
def test_a_tensor_larger_than_the_memory_is_made_in_pieces(stores: Stores) -> None:
    """Beside the tensor itself, a load holds no more than its budget and some pieces."""
    store = stores(host_bytes=1 << 20)
    big = torch.randn(6_000_000, generator=torch.Generator().manual_seed(1))
    save(store, {"big": big}, {"big": Form(code="linear")})
    into = {"big": torch.zeros_like(big)}
    store.load("gpt", include=["big"], into=into)
    with memory_below(8 << 20):  # its codes are 6 MB, itself 24 MB
        store.load("gpt", into=into)


def test_a_check_holds_no_tensor(stores: Stores) -> None:
    """Verify makes every element, and drops each part at once."""
    store = stores(host_bytes=1 << 20)
    big = torch.randn(6_000_000, generator=torch.Generator().manual_seed(1))
    save(store, {"big": big}, {"big": Form(code="dynamic-signed")})
    store.verify(level="records")
    with memory_below(8 << 20):
        assert store.verify().ok


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data(), host_bytes=st.sampled_from([1, 10_000, 400_000, 1 << 28]))
def test_any_range_is_that_of_the_whole(kept: Kept, data: st.DataObject, host_bytes: int) -> None:
    """Whatever elements are asked for, of many tensors at once, with any memory: they are right."""
    backend = kept.store.repo.backend
    ranges, wanted = [], []
    for name in data.draw(st.lists(st.sampled_from(sorted(kept.stored)), min_size=1, max_size=4)):
        index = kept.index(name)
        item = ITEM_BYTES[kept.content.manifest.tensors[index].dtype]
        count = len(kept.stored[name]) // item
        low = data.draw(st.integers(0, count)) * item
        high = data.draw(st.integers(low // item, count)) * item
        out = memoryview(bytearray(high - low))
        ranges.append(Range(index=index, start=low, nbytes=high - low, out=out))
        wanted.append(kept.stored[name][low:high])
    read_ranges(kept.content, ranges, backend=backend, options=Options(host_bytes=host_bytes))

    assert [bytes(one.out or b"") for one in ranges] == wanted


def test_elements_that_differ_from_the_digest_are_noticed(stores: Stores) -> None:
    """A tensor that is not what was restored at the save is refused, by its path."""
    store = stores()
    save(store, state(), {"optimizer.m": FORMS["optimizer.m"]}, change={"digest": b"x" * 32})

    with pytest.raises(CorruptTensorError, match=r"tensor optimizer\.m: .* another digest"):
        store.load("gpt")
    assert store.load("gpt", exclude=["optimizer.m"])["step"] == 7


def test_an_export_in_parts_is_compared_whole(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor larger than the window of an export has the digest of its recipe, or is refused."""
    monkeypatch.setattr(limits, "EXPORT_WINDOW_BYTES", 100_000)
    store = stores()
    forms = {name: FORMS[name] for name in ("optimizer.m", "optimizer.half")}
    _, expected = save(store, state(), forms, step=1)
    save(store, state(), forms, step=2, change={"digest": b"x" * 32})

    export_safetensors(store, "gpt@1", tmp_path / "right.safetensors")
    found = load_file(tmp_path / "right.safetensors")
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(CorruptTensorError, match="another digest"):
        export_safetensors(store, "gpt@2", tmp_path / "wrong.safetensors")
    assert not (tmp_path / "wrong.safetensors").exists()
