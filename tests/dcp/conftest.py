"""Sets the environment of ranks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks, few processors
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
