"""Every block of code in the documentation runs as it stands, or says why it does not.

Blocks of one page run in order, in one namespace and one empty folder. ``python`` blocks are
executed; of ``console`` blocks the lines that begin with ``$`` are, and must end with exit code 0,
or with what a comment ``# exits with N`` says. A block is left out by ``no-run: reason`` after its
language. ``my-bucket`` stands for a bucket of a local server of S3, GCS or Azure.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from docpages import ROOT, pages, read_page

from ckptstore.cli.main import run

if TYPE_CHECKING:
    from docpages import Block, Page

RUN = ("python", "console")
SHOWN = ("text", "py", "json", "toml", "make", "yaml", "diff")
"""Languages that are never commands; ``py`` is for signatures."""
_EXITS = re.compile(r"#\s*exits with (\d+)\s*$")


def test_blocks_say_what_they_are(page: Page) -> None:
    """A block in an unknown language would neither run nor be seen to be left out."""
    for block in page.blocks:
        where = f"{page.path}:{block.line}"
        assert block.language in (*RUN, *SHOWN), f"{where}: language {block.language!r}"
        assert not (block.language in SHOWN and block.reason), f"{where}: never run anyway"


@pytest.mark.short(
    "(?!docs/(howto/(saving-in-the-background|beyond-one-machine|one-training-script|cold-storage"
    "|hugging-face|jax|s3-and-gcs|preemption|torch-checkpointing|trackers|coming-from)"
    "|reference/cli))"
)
def test_blocks_run(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """What a reader copies from a page works."""
    blocks = [block for block in page.blocks if block.language in RUN and not block.reason]
    if not blocks:
        return
    patch = request.getfixturevalue("monkeypatch")
    request.getfixturevalue("_as_before")
    patch.chdir(tmp_path)
    patch.setenv("COLUMNS", "120")
    place = _bucket(blocks, patch, request)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    hook = threading.excepthook
    for block in blocks:
        where = f"{page.path}:{block.line}"
        text = block.text.replace("my-bucket", place)
        if block.language == "python":
            source = "\n" * (block.line - 1) + text  # so that a traceback has the page's lines
            code = compile(source, str(page.path), "exec", dont_inherit=True)
            exec(code, namespace)  # noqa: S102 - that is the test
        else:
            for command in _commands(text):
                _execute(command, patch, where)
        assert threading.excepthook is hook, f"{where} leaves a hook behind"


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Give the next test the signal handlers and the threads that this one found."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    threads = torch.get_num_threads()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():  # a page that failed half way
        torch.distributed.destroy_process_group()


def _bucket(blocks: list[Block], patch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return bucket and prefix for the page, with the settings to reach them in the environment."""
    text = "\n".join(block.text for block in blocks)
    if "s3://" in text:
        bucket = request.getfixturevalue("s3_bucket")
        options = bucket.options()
        patch.setenv("AWS_ENDPOINT_URL", bucket.endpoint_url)
        patch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    elif "az://" in text:
        bucket = request.getfixturevalue("azure_bucket")
        for name, value in bucket.chain().items():
            patch.setenv(name, value)
    elif "gs://" in text:
        bucket = request.getfixturevalue("gcs_bucket")
        patch.setenv("STORAGE_EMULATOR_HOST", bucket.endpoint_url)
    else:
        return "my-bucket"
    return str(bucket.url).partition("://")[2]


def _commands(text: str) -> list[str]:
    """Return the commands of a console block, continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def _execute(command: str, patch: pytest.MonkeyPatch, where: str) -> None:
    exits = _EXITS.search(command)
    expected = int(exits[1]) if exits else 0
    words = shlex.split(command, comments=True)
    if words[0] == "export":
        for word in words[1:]:
            patch.setenv(*word.split("=", 1))
        return
    if words[0] == "ckptstore" and not {"|", ">", "&&"} & set(words):
        code = run(words[1:])  # in this process: starting one takes a second
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            env={**os.environ, "PATH": path},
            check=False,
        )
        code = done.returncode
    assert code == expected, f"{where}: exit code {code} of: {command}"


def test_the_first_example_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run again, the README's first block loads what it saved, and repeats no step."""
    block = read_page(ROOT / "README.md").blocks[0]
    monkeypatch.chdir(tmp_path)
    first: dict[str, Any] = {}
    exec(block.text, first)  # noqa: S102 - that is the test
    again: dict[str, Any] = {}
    exec(block.text, again)  # noqa: S102 - that is the test
    assert again["done"] == first["step"]
    assert "step" not in again
    assert torch.equal(again["model"].weight, first["model"].weight)


def test_every_page_is_seen() -> None:
    """A search that finds no page would let everything pass."""
    names = {path.name for path in pages()}
    assert {"README.md", "CONTRIBUTING.md", "index.md", "quickstart.md", "api.md"} <= names
