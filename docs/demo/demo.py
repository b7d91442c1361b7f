"""The demo: train, save, kill -9 in the middle of a save, resume bit for bit, share what is equal.

    make demo [STORE=URL]         or: python docs/demo/demo.py [STORE]

Every claim that it prints is checked; it exits with 1 at the first that does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpt import Gpt, add_adapters
from train import Plan, Training

import ckptstore

HERE = Path(__file__).parent
LORA_SAVES = 3


class DemoError(Exception):
    """A claim of the demo does not hold."""


def claim(text: str, holds: bool) -> None:
    """Print a claim; stop the demo if it does not hold."""
    print(f"  {'ok  ' if holds else 'NOT '} {text}", flush=True)
    if not holds:
        raise DemoError(text)


def chapter(title: str) -> None:
    """Print a heading with the time since the demo began."""
    print(f"\n== {title}  [{time.monotonic() - BEGAN:.0f} s]", flush=True)


def mib(size: float) -> str:
    """Return bytes for people."""
    return f"{size / 2**20:.2f} MiB" if size >= 10_000 else f"{size:.0f} B"


def shell(*command: str) -> None:
    """Show a command line as a user would type it, and run it."""
    print(f"\n  $ {' '.join(command)}", flush=True)
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], check=False)  # noqa: S603 - our own program
    claim(f"{command[0]} {command[1]} ends with exit code {done.returncode}", done.returncode == 0)


class Trainer:
    """A training process (docs/demo/train.py), whose output is passed on line by line."""

    def __init__(self, store: str, run: str, plan: Plan, losses: Path, *, hold: int = -1) -> None:
        sizes = {
            "--steps": plan.steps,
            "--save-every": plan.save_every,
            "--width": plan.width,
            "--batch": plan.batch,
            "--hold-in-save": hold,
            "--losses": losses,
        }
        options = [str(part) for pair in sizes.items() for part in pair]
        self.process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, HERE / "train.py", store, run, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def follow(self, until: str = "") -> str:
        """Print what the process prints, up to and with the line that begins with `until`."""
        for line in self.process.stdout:
            if until and line.startswith(until):
                return line
            print(f"  | {line}", end="", flush=True)
        code = self.process.wait()
        claim(f"the training process ends with exit code {code}", code == 0)
        return ""

    def kill(self) -> None:
        """Kill it as the kernel would: no handler, no clean-up."""
        self.process.kill()
        claim("the process was ended by SIGKILL", self.process.wait() == -9)


def read_losses(path: Path) -> list[tuple[int, str]]:
    """Return step and exact loss of every line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


def free_name(store: ckptstore.Store, wanted: str) -> str:
    """Return `wanted`, or with a number if the store has such a run from an earlier demo."""
    taken = {run.name for run in store.runs()}
    names = [wanted, *(f"{wanted}-{number}" for number in range(2, 1000))]
    return next(name for name in names if name not in taken)


def show_kill(url: str, store: ckptstore.Store, name: str, plan: Plan, losses: Path) -> None:
    """Train, kill in the middle of a save, start again."""
    chapter("Train, and kill -9 in the middle of a save")
    hold = plan.steps // plan.save_every // 2 * plan.save_every + plan.save_every
    first = Trainer(url, name, plan, losses, hold=hold)
    _, done, total = first.follow(until="half-way").split()
    print(f"  the save of step {hold} has written {mib(int(done))} of {mib(int(total))}: kill -9")
    first.kill()
    steps = [version.step for version in store.versions(name)]
    last = hold - plan.save_every
    claim(f"step {hold} is not in the store; {name}@latest is step {steps[-1]}", steps[-1] == last)
    report = store.verify([f"{name}@{step}" for step in steps])
    claim(f"every byte of the {len(steps)} earlier versions is as it was written", report.ok)

    chapter("Start the same command again: it resumes")
    Trainer(url, name, plan, losses).follow()


def compare(store: ckptstore.Store, name: str, reference: str, ours: Path, theirs: Path) -> None:
    """Show that killed and resumed equals uninterrupted, bit for bit."""
    chapter("Compare with a run that was never interrupted")
    expected = dict(read_losses(theirs))
    seen = read_losses(ours)
    repeated = len(seen) - len(dict(seen))
    same = all(expected[step] == loss for step, loss in seen) and len(dict(seen)) == len(expected)
    claim(
        f"all {len(expected)} losses are equal bit for bit; {repeated} were computed twice, before "
        "the kill and after the resume",
        same and repeated > 0,
    )
    pairs = list(zip(store.versions(name), store.versions(reference), strict=True))
    claim(
        f"all {len(pairs)} validation losses are equal bit for bit",
        all(a.metrics == b.metrics for a, b in pairs),
    )
    claim(
        f"the final states (weights, moments, RNG, data) are equal: {pairs[-1][0].content[:16]}...",
        all(a.content == b.content for a, b in pairs),
    )


def row(label: str, version: ckptstore.Version) -> None:
    """Print what one version took."""
    logical, new, stored = (
        sum(getattr(part, column) for part in version.roles.values())
        for column in ("logical", "new", "stored")
    )
    print(f"  {label:<34}{mib(logical):>12}{mib(new):>12}{mib(stored):>12}")


def head_row() -> None:
    """Print the titles over :func:`row`."""
    print(f"  {'':<34}{'holds':>12}{'new':>12}{'stored':>12}")


def show_unchanged(store: ckptstore.Store, name: str) -> None:
    """Save a state a second time."""
    chapter("Save a state that has not changed")
    run = store.run(name)
    before = run.resolve("latest")
    again = run.save(run.load("latest"), step=before.step, metrics=before.metrics)
    head_row()
    row(f"{name}@{before.step}", before)
    row("the same state, saved again", again)
    claim("saving it again stored no tensor bytes", all(p.new == 0 for p in again.roles.values()))
    claim("both are one content", again.content == before.content)
    print("  Sharing helps where tensors stay equal. Every step of AdamW changes every weight:")
    print("  successive versions of a full training share next to nothing (see the du below).")


def show_best(store: ckptstore.Store, name: str, plan: Plan) -> Gpt:
    """Load the weights of the best version, and nothing else; return the model."""
    chapter("Load the best weights")
    best = store.resolve(f"{name}@best:val_loss")
    training = Training(plan)
    training.model.load_state_dict(store.load(f"{name}@best:val_loss", include=["model"])["model"])
    print(f"  {name}@best:val_loss is step {best.step}; loaded its weights, not its optimizer")
    loss = training.validate()
    claim(
        f"their validation loss is what was recorded, {loss:.6f}, bit for bit",
        loss == best.metrics["val_loss"],
    )
    return training.model


def show_adapters(store: ckptstore.Store, name: str, model: Gpt, plan: Plan) -> None:
    """Train adapters on the frozen model, saving the whole state each time."""
    chapter("Fine-tune adapters on a frozen base, saving everything each time")
    trained = add_adapters(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    batches = Training(plan).batches
    run = store.run(name, metrics={"loss": "min"})
    head_row()
    versions = []
    for step in range(1, LORA_SAVES + 1):
        loss = model.loss(batches.next())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        versions.append(run.save(state, step=step, metrics={"loss": loss.item()}))
        row(f"{name}@{step}", versions[-1])
    adapters = sum(weight.nbytes for weight in trained)
    new = [sum(part.new for part in version.roles.values()) for version in versions]
    slack = 4096  # step counters of the optimizer
    claim(
        f"after the first, a save takes no more than the adapters ({mib(adapters)}) and their two "
        "moments; the frozen base costs nothing",
        all(size <= 3 * adapters + slack for size in new[1:]),
    )


def tell(url: str, plan: Plan, folder: Path) -> None:
    """Run the demo from beginning to end."""
    ours, theirs = folder / "losses", folder / "losses-reference"
    chapter(f"Open a store at {url}")
    with ckptstore.open(url, create=True) as store:
        name = free_name(store, "gpt")
        suffix = name.removeprefix("gpt")
        reference, adapted = f"gpt-uninterrupted{suffix}", f"gpt-lora{suffix}"
        print(f"  run {reference} trains in the background, into the same store, for comparison")
        background = Trainer(url, reference, plan, theirs)
        try:
            show_kill(url, store, name, plan, ours)
            output, _ = background.process.communicate()
            code = background.process.returncode
            claim(f"the training in the background ends with exit code {code}", code == 0)
        finally:
            background.process.kill()
        print(f"\n  meanwhile, in the background:\n  | {output.strip().splitlines()[-1]}")
        compare(store, name, reference, ours, theirs)
        show_unchanged(store, name)
        show_adapters(store, adapted, show_best(store, name, plan), plan)
    chapter("The same from the command line")
    shell("ckptstore", "ls", "--store", url)
    shell("ckptstore", "show", f"{name}@best:val_loss", "--store", url)
    shell("ckptstore", "du", "--store", url)
    shell("ckptstore", "verify", "--store", url)


def main() -> int:
    """Read the arguments, tell the story, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", nargs="?", default="demo-store", help="path or URL; demo-store")
    parser.add_argument("--steps", type=int, default=300, help="of training; a multiple of 5")
    parser.add_argument("--width", type=int, default=128, help="of the model; a multiple of 4")
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    plan = Plan(
        steps=given.steps, save_every=given.steps // 5, width=given.width, batch=given.batch
    )
    with tempfile.TemporaryDirectory(prefix="ckptstore-demo-") as folder:
        try:
            tell(given.store, plan, Path(folder))
        except (DemoError, ckptstore.CkptStoreError) as error:
            print(f"\nThe demo FAILED: {error}", file=sys.stderr)
            return 1
    print(f"\nEverything that was claimed held. {time.monotonic() - BEGAN:.0f} seconds.")
    print(f"The store stays at {given.store}; look around: ckptstore ls --store {given.store}")
    return 0


BEGAN = time.monotonic()

if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "110")  # where the output is no terminal
    sys.exit(main())
