"""One of several processes that commit into one store at the same time; imports no torch.

``python -m benchmarks.committer URL NAME COUNT`` opens the store, prints ``ready``, waits for a
line on its standard input, commits COUNT times, and prints ``done``.
"""

from __future__ import annotations

import sys

import ckptstore

__all__ = ["main"]


def main(url: str, name: str, count: int) -> None:
    """Add a metric to the version of step 0 of the run ``shared``, `count` times."""
    with ckptstore.open(url) as store:
        run = store.run("shared")
        run.versions()
        print("ready", flush=True)
        sys.stdin.readline()
        for place in range(count):
            run.annotate(0, {name: place})
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
