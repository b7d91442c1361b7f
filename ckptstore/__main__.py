"""Entry of the program: ``ckptstore``, or ``python -m ckptstore``."""

from __future__ import annotations

import sys

from ckptstore import __version__


def main() -> None:
    """Run the program; print the version without importing anything else."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        sys.stdout.write(f"ckptstore {__version__}\n")
        return
    from ckptstore.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
