"""Makes the tests' own modules of this folder importable by their plain name ``faultkit``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("faultkit")
