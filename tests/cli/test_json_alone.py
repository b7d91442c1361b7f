"""With ``--json`` stdout is one document, whatever there is to warn of: that is logged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckptstore
from ckptstore import limits
from ckptstore.cli.main import COMMANDS
from ckptstore.format.keys import commit_key
from tests.cli.conftest import Cli

ARGUMENTS = {
    "init": "new", "import": "ckpt.pt gpt", "export": "gpt@100 out.safetensors", "doctor": "",
    "ls": "gpt", "show": "gpt@100", "log": "", "diff": "gpt@100 gpt@200", "du": "--shared",
    "stats": "", "report": "page.html", "top": "--once", "tag": "gpt@200 good",
    "annotate": "gpt@200 acc=1", "fork": "gpt@200 other", "rollback": "gpt@200", "pin": "gpt@200",
    "roles": "gpt", "retain": "--dry-run", "rm": "gpt@200", "undelete": "gpt@300",
    "gc": "--dry-run", "verify": "", "repair": "--dry-run", "serve": "--port -1", "push": "gpt x:y",
    "publish": "gpt@100 --to public", "replicate": "--to copy", "replica": "ls",
    "evict": "gpt@100 --replica cold", "archive": "--class GLACIER", "thaw": "gpt@100", "key": "id",
}  # fmt: skip
DAMAGED = {"end": 7, "middle": 4, "none": 0}


def test_every_command_is_in_the_table() -> None:
    """A new command gets its row."""
    assert ARGUMENTS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", ARGUMENTS)
def test_stdout_is_one_document(
    cli: Cli,
    store_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: str,
) -> None:
    """Of a log that is sound, or damaged at its end or before; what ends well then warns."""
    monkeypatch.chdir(store_path.parent)
    monkeypatch.setattr(limits, "VISIBILITY_WAIT_MIN_S", 0.01)
    with ckptstore.open(store_path) as store:
        store.remove(["gpt@300"])
    for name, number in DAMAGED.items():
        place = shutil.copytree(store_path, store_path.parent / name)
        if number:
            os.truncate(place / commit_key(number), 50)
        caplog.clear()
        given = [] if command == "init" else ["--store", str(place)]
        result = cli(command, *ARGUMENTS[command].split(), *given, "--json")
        assert result.document["schema"] == 1
        assert command == "serve" or f"ckptstore {command} --help" not in result.err
        assert ("error" in result.document) == ("error:" in result.err)
        if name == "end" and "store" in result.document and command not in ("repair", "init"):
            assert caplog.text.count("reading goes on with what is before") == 1
