"""torch's cast in the thread that asks for it: what it gives, and what it leaves as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ckptstore.tensors import bfloat16
from ckptstore.tensors.bfloat16 import to_bfloat16

Functions = tuple[Callable[[], int], Callable[[int], None]]

# None: no OpenMP in the process. The other one is not the library that torch is made with.
WITHOUT: list[Functions | None] = [None, (lambda: 7, lambda _count: None)]
SIZES = (0, 1, 32_704, 32_705, 32_768, 1 << 20, (1 << 20) + 17)


def _cast(size: int) -> bool:
    values = np.random.default_rng(size).standard_normal(size, np.float32)
    made = np.zeros(size, np.uint16)
    to_bfloat16(values, made)
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    return np.array_equal(made, wanted.view(np.uint16))


@pytest.mark.parametrize("size", SIZES)
def test_it_gives_what_torch_gives(size: int) -> None:
    """Arrays of every size are rounded whole, whether or not torch would call threads for them."""
    assert _cast(size)


@pytest.mark.parametrize("functions", WITHOUT)
@pytest.mark.parametrize("size", SIZES)
def test_no_openmp_changes_nothing(size: int, functions: Functions | None) -> None:
    """Where torch's threads cannot be set from outside, the result is the same."""
    with patch.object(bfloat16, "_openmp", lambda: functions):
        assert _cast(size)


def test_the_setting_of_the_thread_is_kept() -> None:
    """A cast leaves the number of torch's threads as it was, in its thread and in others."""
    before = torch.get_num_threads()
    found: list[int] = []

    def own() -> None:
        torch.set_num_threads(3)
        _cast(1 << 20)
        found.append(torch.get_num_threads())

    try:
        thread = threading.Thread(target=own)
        thread.start()
        thread.join()
        _cast(1 << 20)
        assert found == [3]
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_a_cast_that_fails_keeps_the_setting() -> None:
    """Arrays that do not fit each other raise, and the number of threads is as it was."""
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        to_bfloat16(np.zeros(1 << 20, np.float32), np.zeros(7, np.uint16))
    assert torch.get_num_threads() == before
