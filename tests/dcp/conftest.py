"""Makes the module ``rankkit`` of this folder importable, here and in the processes of ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("rankkit")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks, few processors
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
