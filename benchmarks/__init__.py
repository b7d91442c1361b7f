"""Benchmarks; like the tests, they import the modules of ``tests/kits`` by plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kits"))
