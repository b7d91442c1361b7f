"""The one command: ``python -m benchmarks.run``; runs suites, rewrites benchmarks/RESULTS.md.

Each suite writes ``benchmarks/results/NAME.json``; the page is made from those files alone, so
``python -m benchmarks.run --report-only`` makes it again without measuring.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.disk import workspace
from benchmarks.measure import Result, say
from benchmarks.rates import RatesPlan
from benchmarks.results import RESULTS, write_result
from benchmarks.resume import ResumePlan
from benchmarks.trajectories import Plan

__all__ = ["SUITES", "main"]

SUITES = (
    "local",
    "codecs",
    "cores",
    "trajectory",
    "rates",
    "resume",
    "workloads",
    "many",
    "weka",
    "memory",
    "catalog",
    "scale",
    "failures",
    "async",
    "gpu",
    "s3",
    "bytes",
    "sharing",
    "replicate",
    "link",
    "filesystems",
    "encryption",
    "serve",
)
_MODULES = {"async": "async_saves", "bytes": "byte_paths"}  # of suites named by a word of Python
_MB = 10**6
_SMALL_PLAN = Plan(
    width=32, layers=1, warmup=5, versions=3, intervals=(1, 2), rank=2, lora_interval=1
)
_SMALL_RATES = RatesPlan(
    width=32, layers=1, warmup=5, rates=(1e-5, 1e-4), settle=1, apart=(1, 2), versions=3, interval=1
)
_SMALL_RESUME = ResumePlan(
    width=32, layers=1, time=16, batch=2, warmup=20, steps=4, every=2, seeds=2, rows=4
)
_HISTORIES = ((1_000, 500), (10_000, 500), (100_000, 500), (10_000, 5_000))
"""Versions ever saved and versions alive, of the stores whose collection is timed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named suites, all by default; return the exit status."""
    options = _parser().parse_args(arguments)
    if not options.report_only:
        for name in options.suites or SUITES:
            began = time.perf_counter()
            result = run_suite(name, options)
            if result is None:
                continue
            result.header["seconds_in_all"] = round(time.perf_counter() - began, 1)
            result.header["load_average_after"] = list(os.getloadavg())
            write_result(options.results, result)
            say(f"{name}: {result.header['seconds_in_all']} s")
    if options.page is not None:
        from benchmarks.page import write_page

        write_page(options.page, options.results)
    return 0


def run_suite(name: str, options: argparse.Namespace) -> Result | None:
    """Run one suite in a workspace of its own; print a line and return None if it cannot run."""
    module = importlib.import_module(f"benchmarks.{_MODULES.get(name, name)}")
    with workspace(options.folder) as space:
        result: Result | None = module.run(space, **_arguments(name, options))
    return result


def _arguments(name: str, options: argparse.Namespace) -> dict[str, Any]:
    small = options.size_mb < 256
    steps = {"training_steps": 10} if small else {}
    shrunk = {"shrink": 8} if small else {}
    sizes: dict[str, dict[str, Any]] = {
        "local": {
            "bytes_min": options.size_mb * _MB,
            "rounds": options.rounds,
            "state_name": options.state,
            **steps,
        },
        "cores": {"pieces": 8 if small else 64, "rounds": options.rounds},
        "s3": {"bytes_min": options.s3_size_mb * _MB, "rounds": options.rounds, **steps},
        "bytes": {
            "bytes_min": options.size_mb * _MB,
            "rounds": min(options.rounds, 3),
            **({"bytes_per_s": 100e6, "slow_s": 0.2, "widths": (4,)} if small else {}),
            **steps,
        },
        "sharing": {"bytes_min": options.size_mb * _MB, "rounds": min(options.rounds, 3), **steps},
        "replicate": {
            "bytes_min": options.s3_size_mb * _MB,
            "rounds": options.rounds,
            "calls": 3 if small else 20,
            "versions": (1, 2) if small else (4, 8),
            "chunks": 2_000 if small else 250_000,
            **steps,
        },
        "link": {"bytes_min": options.size_mb * _MB, "rounds": min(options.rounds, 3), **steps},
        "encryption": {
            "bytes_min": options.size_mb * _MB,
            "rounds": min(options.rounds, 3),
            **steps,
        },
        "serve": {"bytes_min": options.size_mb * _MB, "rounds": options.rounds},
        "gpu": {"bytes_min": options.size_mb * _MB, "rounds": options.rounds, **steps},
        "codecs": {"bytes_min": min(options.size_mb, 64) * _MB, "rounds": options.rounds, **steps},
        "catalog": {
            "versions": 2_000 if small else 100_000,
            "tensors": 200 if small else 2_000,
            "commits": 20 if small else 200,
            "rounds": options.rounds,
            "chunks": 2_000 if small else 250_000,
            "histories": _HISTORIES[:2] if small else _HISTORIES,
        },
        "scale": {
            "writers": (4, 16) if small else (10, 100, 300, 1000),
            "trainings": 20 if small else 300,
            "intervals_s": (60.0,) if small else (600.0, 120.0, 60.0, 30.0),
            "ranks": (8,) if small else (8, 64, 256, 1000),
        },
        "failures": {},
        "trajectory": {"plan": _SMALL_PLAN if small else Plan(), "loads": 2 if small else 4},
        "rates": {"plan": _SMALL_RATES if small else RatesPlan()},
        "resume": {"plan": _SMALL_RESUME if small else ResumePlan()},
        "many": {"rounds": options.rounds, **({"shapes": ((50, 128), (500, 64))} if small else {})},
        "workloads": {"rounds": min(options.rounds, 3), **shrunk, **steps},
        "weka": {"rounds": min(options.rounds, 2), **shrunk, **steps},
        "memory": {"sizes": (1 << 22,), "s3_sizes": (1 << 22,)} if small else {},
        "filesystems": {
            "bytes_min": options.s3_size_mb * _MB,
            "guest_bytes_min": min(options.s3_size_mb, 64) * _MB,
            "rounds": min(options.rounds, 3),
            **steps,
        },
        "async": {
            "bytes_min": options.size_mb * _MB,
            "rounds": options.rounds,
            "state_name": options.state,
            **steps,
            **({"window_s": 0.2, "saves": 1, "tries": 1} if small else {}),
        },
    }
    return sizes[name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--size-mb", type=int, default=1074, help="local state, in 10^6 bytes")
    parser.add_argument("--s3-size-mb", type=int, default=268, help="state on S3, in 10^6 bytes")
    parser.add_argument(
        "--state",
        choices=("follows", "nearly"),
        default="follows",
        help="of local and async: bf16 weights that are their masters, rounded, or a step behind",
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after a warm-up")
    parser.add_argument("--folder", type=Path, help="where to write; its file system is measured")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=RESULTS.parent / "RESULTS.md")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None)
    parser.add_argument("--report-only", action="store_true", help="make the page again")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
