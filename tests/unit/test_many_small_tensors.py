"""Many small tensors are saved and loaded by columns, and each stays a tensor of its own."""

import gc
import io
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.collector_pause import collector_paused


def _mixed() -> dict[str, torch.Tensor]:
    """Return tensors of one slab that differ in all that a copy of them together depends on."""
    return {
        "scalar": torch.tensor(1.5),
        "nan": torch.tensor([0x7FA00001, -0x7FFFFFFF], dtype=torch.int32).view(torch.float32),
        "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        "again": torch.arange(6.0).reshape(2, 3),
        "row": torch.arange(12.0).reshape(3, 4)[1],
        "empty": torch.zeros(0, 3),
        "last": torch.arange(100.0, 107.0),
    }


@pytest.mark.parametrize("odd", [None, torch.arange(12.0).reshape(3, 4).T, torch.arange(6.0)[::2]])
def test_every_bit_of_a_slab_comes_back(tmp_path: Path, odd: torch.Tensor | None) -> None:
    """Equal tensors of a slab, shared ones and strided ones leave the bits of all others alone."""
    state = _mixed() if odd is None else {"first": torch.ones(3), "odd": odd, **_mixed()}
    with ckptstore.open(tmp_path, create=True) as store:
        run = store.run("r")
        run.save({"last": state["last"], "scalar": state["scalar"]}, step=0, codec="raw")
        run.save(state, step=1, codec="raw")
        assert store.verify().ok
        loaded = store.load("r@1")
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        found = loaded[name]
        assert type(found) is type(tensor)
        bits = [one.detach().contiguous().view(torch.int32) for one in (found, tensor)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool,
        torch.int8, torch.uint8, torch.uint16, torch.int64, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_every_pattern_of_bits_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """Tiny tensors of one dtype, of one and two dimensions, keep all NaNs and odd bools."""
    count = 1 << 16
    bits = torch.arange(count, dtype=torch.int32).to(torch.int16).repeat_interleave(4)
    bits[1::4], bits[3::4] = 0x7FB5, 0x7FF4  # quiet and signalling NaNs, where the dtype has any
    tensors = torch.split(bits.view(dtype), 256)
    state = {f"t{at}": one if at % 2 else one.view(2, -1) for at, one in enumerate(tensors)}
    with ckptstore.open(tmp_path, create=True) as store:
        store.run("r").save(state, step=1, codec="raw")
        loaded = store.load("r@1")
    for name, tensor in state.items():
        assert loaded[name].dtype is dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_loaded_tensor_owns_its_memory(tmp_path: Path) -> None:
    """A small tensor of a load has storage of its own size, and is no view."""
    state = {f"t{at}": torch.full((16,), float(at)) for at in range(50)}
    with ckptstore.open(tmp_path, create=True) as store:
        store.run("r").save(state, step=0)
        loaded = store.load("r@0")
    one, other = loaded["t3"], loaded["t4"]
    assert one.untyped_storage().nbytes() == 64
    assert not one._is_view()
    written = io.BytesIO()
    torch.save(one, written)
    assert written.tell() < 2500
    one.share_memory_().fill_(7)
    assert torch.equal(other, state["t4"])


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_after_a_pause(enabled: bool) -> None:
    """Pauses nest, end by errors too, and leave the collector as they found it."""

    def fail() -> None:
        """Raise inside of two pauses."""
        with collector_paused():
            with collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError

    if not enabled:
        gc.disable()
    try:
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
