"""Saves versions and checks them, as it is told (see labkit/peers.py for the protocol).

Every request runs in a child of its own: modules are imported once (16 s inside a guest), a child
that hangs on dead storage can be killed. What a version must hold follows from who saved it and as
which one, so that a checker needs nothing but the store.

save   {"url", "options", "run", "writer", "first", "count", "numbers", "mark", "without_fsync"}
       saves versions first, first + 1 ... (count 0: for ever), printing an event ``acked`` after
       each; `mark` is a command that is told the count of promises so far, ``{}``.
       `without_fsync` is part of a path: files below it are not synced. For the tests of the tests.
create {"url", "options"}
check  {"url", "options", "acked": {id: [writer, number]}, "save": bool}
       loads everything that is visible and compares; returns counts and the list of ``problems``.
kill   {"pid": ...}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptstore
import ckptstore.backends.posix
import ckptstore.backends.probe
import ckptstore.states.lazy
import ckptstore.states.save
from ckptstore.errors import CkptStoreError, StoreNotFoundError

Words = dict[str, Any]
EVENT_BYTES_MAX = 3500  # one write of less than a page stays whole when several children print


def state_of(writer: int, number: int, numbers: int) -> dict[str, Any]:
    """Return the state that `writer` saves as its version `number`.

    One tensor of `numbers` float32 that changes, one that never does, small ones of other types,
    and plain values. Same arguments, same bits.
    """
    random = np.random.default_rng([writer, number])
    changing = torch.from_numpy(random.standard_normal(numbers, dtype=np.float32))
    frozen = torch.from_numpy(np.random.default_rng(7).standard_normal(numbers, dtype=np.float32))
    return {
        "model": {
            "weight": changing.reshape(-1, 16),
            "half": changing[:256].to(torch.bfloat16),
            "frozen": frozen,
            "bias": torch.from_numpy(random.standard_normal(33)),
        },
        "optimizer": {"step": number, "moments": [changing[:64].clone(), changing[64:128].clone()]},
        "writer": writer,
        "seen": torch.from_numpy(random.integers(0, 2**60, size=50)),
    }


def differences(found: Any, meant: Any, path: str = "") -> list[str]:  # noqa: ANN401
    """Return the paths at which two states differ in a single bit or in type."""
    if isinstance(meant, dict):
        if not isinstance(found, dict) or list(found) != list(meant):
            return [f"{path}: other keys"]
        return [d for key in meant for d in differences(found[key], meant[key], f"{path}.{key}")]
    if isinstance(meant, list):
        if not isinstance(found, list) or len(found) != len(meant):
            return [f"{path}: other length"]
        pairs = zip(found, meant, strict=True)
        return [d for n, (a, b) in enumerate(pairs) for d in differences(a, b, f"{path}[{n}]")]
    if isinstance(meant, torch.Tensor):
        same = (
            isinstance(found, torch.Tensor)
            and found.dtype == meant.dtype
            and found.shape == meant.shape
            and torch.equal(
                found.contiguous().view(torch.uint8), meant.contiguous().view(torch.uint8)
            )
        )
        return [] if same else [f"{path}: other bits"]
    return [] if type(found) is type(meant) and found == meant else [f"{path}: {found!r}"]


def skip_fsync_below(part: str) -> None:
    """Make fsync of files whose path holds `part` do nothing: what the tests must notice."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if part not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    os.fdatasync = fsync  # type: ignore[assignment]


class Requester:
    """Where the events of one request go."""

    def __init__(self, number: int) -> None:
        self._number = number

    def tell(self, event: str, **words: object) -> None:
        """Print one event."""
        line = json.dumps({"id": self._number, "event": event, **words})
        os.write(1, line.encode() + b"\n")


def create(words: Words) -> Words:
    """Create a store, or open it."""
    with ckptstore.open(words["url"], create=True, **words.get("options", {})) as store:
        return {"url": store.url}


def save(words: Words, requester: Requester) -> Words:
    """Save versions, one after the other; return how many."""
    if words.get("without_fsync"):
        skip_fsync_below(words["without_fsync"])
    saved = 0
    with ckptstore.open(words["url"], create=True, **words.get("options", {})) as store:
        run = store.run(words["run"], metrics={"loss": "min"})
        while not words["count"] or saved < words["count"]:
            number = words["first"] + saved
            state = state_of(words["writer"], number, words["numbers"])
            meant = {"writer": words["writer"], "number": number, "numbers": words["numbers"]}
            loss = {"loss": 1 / (number + 1)}
            version = run.save(state, step=number, metrics=loss, metadata=meant)
            saved += 1
            requester.tell("acked", version=version.id, writer=words["writer"], number=number)
            if words.get("mark"):
                command = [word.replace("{}", str(saved)) for word in words["mark"]]
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return {"saved": saved}


def check_version(store: Any, version: Any) -> list[str]:  # noqa: ANN401
    """Return what is wrong with one visible version."""
    meant = version.metadata
    try:
        state = store.load(f"#{version.id}")
    except CkptStoreError as error:
        return [f"{version.run}@{version.step}: {error.kind}: {error}"]
    expected = state_of(meant["writer"], meant["number"], meant["numbers"])
    return [f"{version.run}@{version.step}{d}" for d in differences(state, expected)]


def check(words: Words) -> Words:
    """Load and compare everything; then save once more."""
    acked: dict[str, list[int]] = words["acked"]
    problems: list[str] = []
    options = words.get("options", {})
    seen: set[str] = set()
    numbers: list[int] = []
    try:
        with ckptstore.open(words["url"], read_only=True, **options) as store:
            for version in store.versions():
                seen.add(version.id)
                problems += check_version(store, version)
            numbers = [entry.number for entry in store.log()]
    except StoreNotFoundError:
        problems += ["there is no store"] if acked else []
    except CkptStoreError as error:
        problems.append(f"{error.kind}: {error}")
    problems += [f"acknowledged, but lost: {acked[name]}" for name in acked if name not in seen]
    if sorted(numbers) != list(range(1, len(numbers) + 1)):
        problems.append(f"commit numbers have gaps: {numbers}")
    if words["save"]:
        problems += save_once_more(words["url"], options)
    shown = [problem[:200] for problem in problems[:10]]
    return {"versions": len(seen), "commits": len(numbers), "problems": shown}


def save_once_more(url: str, options: Words) -> list[str]:
    """Save and load through a store that went through something."""
    meant = {"writer": 999, "number": 0, "numbers": 4096}
    state = state_of(999, 0, 4096)
    with ckptstore.open(url, create=True, **options) as store:
        version = store.run("afterwards").save(state, step=0, metadata=meant)
        return [f"afterwards{d}" for d in differences(store.load(f"#{version.id}"), state)]


def carry_out(do: str, words: Words, requester: Requester) -> None:
    """Do what was asked and report how it ended."""
    try:
        match do:
            case "create":
                result = create(words)
            case "save":
                result = save(words, requester)
            case _:
                result = check(words)
        requester.tell("done", result=result)
    except CkptStoreError as error:
        requester.tell("failed", kind=error.kind, message=str(error)[:EVENT_BYTES_MAX])
    except Exception as error:  # noqa: BLE001 - the one who asked decides
        message = f"{error!r}"[:EVENT_BYTES_MAX]
        requester.tell("failed", kind=type(error).__name__, message=message)


def kill(child: int) -> None:
    """End a child, unless it ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def main() -> None:
    """Fork a child for each request until the input ends; then end the children."""
    children: set[int] = set()
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no one to wait for them
    for line in sys.stdin:
        words = json.loads(line)
        requester, do = Requester(words.pop("id")), words.pop("do")
        if do == "kill":
            kill(words["pid"])
            requester.tell("done", result=None)
        else:
            for scheme, backend in (("s3:", "s3"), ("az:", "azure")):
                if words["url"].startswith(scheme):
                    import_module(f"ckptstore.backends.{backend}")
            if words["url"].startswith("paramiko:"):
                import_module("labkit.file_suite")  # which registers the scheme
            child = os.fork()
            if not child:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                carry_out(do, words, requester)
                os._exit(0)
            children.add(child)
            requester.tell("started", pid=child)
    for child in children:
        kill(child)
    os._exit(0)  # taking torch down takes seconds inside a guest


main()
