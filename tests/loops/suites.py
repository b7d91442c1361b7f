"""Checkpoint tests of Accelerate, Trainer and Lightning, run on stores in place of their folders.

::

    python tests/loops/suites.py accelerate CHECKOUT   # its source distribution holds the tests
    python tests/loops/suites.py lightning CHECKOUT    # git clone --depth 1 --branch RELEASE
    python tests/loops/suites.py transformers CHECKOUT

`CHECKOUT` is the source of the installed release; options of pytest may follow (``-k``). The saving
methods of the library are replaced by those of ckptstore, and nothing else. A failed test counts as
*not applicable* if the statement that failed asks for something that a store does not have, by the
list of reasons below; any other is a failure. Prints a table.

pytest and what the tests import beside the library (``parameterized``, ``jsonargparse``,
``omegaconf``, ``pytest-rerunfailures``) must be installed.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

import ckptstore
from ckptstore.store import Store

FILES: Final = {
    "accelerate": ["tests/test_state_checkpointing.py", "tests/test_accelerator.py"],
    "lightning": [
        "tests/tests_pytorch/checkpointing",
        "tests/tests_pytorch/plugins/test_checkpoint_io_plugin.py",
        "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
        "tests/tests_pytorch/models/test_restore.py",
        "tests/tests_pytorch/loops/test_loops.py",
    ],
    "transformers": [
        "tests/trainer/test_trainer_checkpointing.py",
        "tests/trainer/test_trainer_resume.py",
    ],
}
REASONS: Final = {
    "looks for files or folders": r"listdir|\.exists\(|isfile|isdir|iterdir|glob\(|No such file|"
    r"FileNotFoundError|\.load_from_checkpoint|torch\.load\(|check_saved_checkpoints|st_mtime",
    "hooks write into the folder": r"hooks of register_save_state_pre_hook",
    "other strategies write files": r"writes files, and does not ask",
    "counts calls of torch.save": r"save_mock\.call_count",
    "expects the error of a missing file": r"is neither a ref nor a path|there is no run",
    "pickles the trainer, and with it the store": r"Can't pickle",
    "an object among hyper-parameters, which needs an adapter": r"DictConfig, which cannot be",
    "storage_options of another plugin": r"instance_storage_options|storage_options has",
    "reads a file of its own server or file system": r"EOFError|memory://",
    "no network": r"huggingface\.co|offline mode|LocalEntryNotFoundError|URLError",
}


@dataclass
class Table:
    """Plugin of pytest: notes the tests that saved or loaded, and how they ended."""

    calls: int = 0
    number: int = 0
    ended: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))
    _before: int = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Note the calls so far."""
        self._before = self.calls
        self.number += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended that saved or loaded through ckptstore."""
        if report.skipped or (report.passed and report.when != "call"):
            return
        if self.calls == self._before:
            kind = "without a checkpoint"
        else:
            kind = "passed" if report.passed else _reason(str(report.longrepr))
        self.ended[kind].append(report.nodeid)

    def show(self) -> None:
        """Print the numbers, and the names of what did not pass."""
        for kind, tests in sorted(self.ended.items(), key=lambda each: -len(each[1])):
            named = tests if kind not in ("passed", "without a checkpoint") else []
            lines = [f"{len(tests):4} {kind}", *(f"       {test}" for test in named)]
            sys.stdout.write("\n".join(lines) + "\n")


def _reason(text: str) -> str:
    """Return why a test is not applicable, by the statement and the error; else ``failed``."""
    lines = [line for line in text.splitlines() if line.startswith((">", "E "))]
    for reason, pattern in REASONS.items():
        if re.search(pattern, "\n".join(lines)):
            return f"not applicable: {reason}"
    return "failed"


def accelerate(store: Store, table: Table) -> None:
    """Give ``Accelerator`` the functions of the integration."""
    from accelerate import Accelerator

    from ckptstore.integrations import accelerate as ours

    saved: dict[str, int] = {}
    run = store.run("suite")

    def named(accelerator: Any, folder: str | None, *, newest: bool) -> str:
        if folder is not None:
            return os.path.realpath(folder)
        at = accelerator.save_iteration - newest
        return os.path.realpath(f"{accelerator.project_dir}/checkpoints/checkpoint_{at}")

    def save_state(accelerator: Any, output_dir: str | None = None, *_: object, **__: Any) -> str:
        table.calls += 1
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        name = named(accelerator, None if automatic else output_dir, newest=False)
        version = ours.save_state(accelerator, run, step=len(saved))
        saved[name] = version.step
        accelerator.project_configuration.iteration += 1
        return name

    def load_state(accelerator: Any, input_dir: str | None = None, *_: object, **__: Any) -> None:
        table.calls += 1
        ours.load_state(accelerator, run, saved[named(accelerator, input_dir, newest=True)])

    Accelerator.save_state, Accelerator.load_state = save_state, load_state


def lightning(store: Store, table: Table) -> None:
    """Make the plugin of the integration the default ``CheckpointIO``, with a run for each test.

    Tests look for the files of checkpoints. For each version that is not deleted there is an empty
    file of its name; reading that gives the version.
    """
    import torch
    from lightning.fabric.utilities import cloud_io
    from lightning.pytorch.core import saving
    from lightning.pytorch.strategies import strategy

    from ckptstore.integrations.lightning import CkptStoreIO

    files: dict[str, CkptStoreIO] = {}

    class Counted(CkptStoreIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            table.calls += 1
            super().save_checkpoint(checkpoint, path, storage_options)
            files[os.path.realpath(path)] = self
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.show()

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            table.calls += 1
            return super().load_checkpoint(os.path.realpath(path), *args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            super().remove_checkpoint(path)
            if Path(path).is_symlink():
                Path(path).unlink()
            self.show()

        def show(self) -> None:
            named = {_path_of(each) for each in self.run.versions()}
            for path in named & files.keys():
                Path(path).touch()
            for path in [each for each, io in files.items() if io.run.name == self.run.name]:
                if path not in named:
                    Path(path).unlink(missing_ok=True)

    def _path_of(version: Any) -> str:
        path: str = version.metadata["lightning"]["path"]
        return os.path.realpath(path)

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        def load(path: Any, *args: Any, **kwargs: Any) -> Any:
            name = os.path.realpath(path) if isinstance(path, str | os.PathLike) else ""
            return (
                files[name].load_checkpoint(name) if name in files else read(path, *args, **kwargs)
            )

        return load

    torch.load = reading(torch.load)
    cloud_io._load = saving.pl_load = reading(saving.pl_load)
    strategy.TorchCheckpointIO = lambda: Counted(store, f"suite-{table.number}")


def transformers(store: Store, table: Table) -> None:
    """Put the mixin of the integration in front of ``Trainer``."""
    import transformers as library
    from transformers import trainer as module

    from ckptstore.integrations.transformers import StoreTrainerMixin

    class Trainer(StoreTrainerMixin, library.Trainer):  # type: ignore[misc]
        def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
            name = re.sub(r"[^\w.-]+", "-", args.output_dir if args else "none").strip("-.")
            super().__init__(model, args, run=store.run(f"suite/{name}"), **kwargs)

        def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
            if isinstance(resume_from_checkpoint, str) and "checkpoint-" in resume_from_checkpoint:
                resume_from_checkpoint = resume_from_checkpoint.rpartition("checkpoint-")[2]
            table.calls += resume_from_checkpoint is not None
            return super().train(resume_from_checkpoint, **kwargs)

        def _save_checkpoint(self, *args: Any) -> None:
            table.calls += 1
            super()._save_checkpoint(*args)

    library.Trainer = module.Trainer = Trainer


PATCHES: Final[dict[str, Callable[[Store, Table], None]]] = {
    each.__name__: each for each in (accelerate, lightning, transformers)
}


def main(arguments: Sequence[str]) -> int:
    """Run the tests of one library, and print the table."""
    library, checkout, *more = arguments
    root, table = Path(checkout).resolve(), Table()
    paths = [str(root / each) for each in FILES[library] if (root / each).exists()]
    sys.path.insert(0, str(root / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with ckptstore.open(Path(folder, "ckpts"), create=True) as store:
            PATCHES[library](store, table)
            options = ["--rootdir", str(root), "-q", "-p", "no:cacheprovider", *more, *paths]
            pytest.main(options, plugins=[table])
    table.show()
    return int("failed" in table.ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
