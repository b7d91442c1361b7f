"""Section of the versions of a real training: their sizes, by keeper and by kind of tensor."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping

from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import seconds, table, times, titled

__all__ = ["rates", "trajectory"]

_KINDS = ("weights", "fp32 masters", "first moments", "second moments", "adapters")


def trajectory(result: Result) -> list[str]:
    """Return a table for each trajectory, one by kind of tensor, and the additions of LoRA."""
    blocks = []
    names = [name.removeprefix("save: ") for name in result.tables if name.startswith("save: ")]
    versions = result.parameters["versions"]
    for name in names:
        saves, loads = result.tables[f"save: {name}"], result.tables[f"load: {name}"]
        size = saves[0].logical_bytes / 1e6
        text = f"{versions} versions of {size:.1f} MB."
        blocks.append(titled(name[:1].upper() + name[1:], text, _kept(saves, loads, versions)))
        if name.startswith("LoRA"):
            blocks.append(_adapters(result, name))
    for keeper in ("ckptstore planes", "ckptstore delta", "ckptstore bf16 + 8 bit"):
        by_kind = {name: kinds.get(keeper, {}) for name, kinds in result.facts["kinds"].items()}
        if any(by_kind.values()):
            blocks.append(titled(f"By kind of tensor: {keeper}", _by_kind(by_kind)))
    blocks += _absent(result.facts["absent"])
    return blocks


def rates(result: Result) -> list[str]:
    """Return a table for each kind of tensor: the size of a delta, by learning rate and steps."""
    columns = ["learning rate", *(_apart(steps) for steps in result.parameters["apart"])]
    columns.append("{versions} versions, {interval} steps apart".format(**result.parameters))
    blocks = []
    for kind, shares in result.facts["pairs"].items():
        stores = result.facts["stores"][kind]
        lines = [
            [rate, *(f"{share:.3f}" for share in pairs), f"{stores[rate]:.3f}"]
            for rate, pairs in shares.items()
        ]
        blocks.append(titled(kind[:1].upper() + kind[1:], table(columns, lines)))
    return blocks


def _apart(steps: int) -> str:
    return f"{steps} steps" if steps > 1 else "1 step"


def _kept(saves: list[Measured], loads: list[Measured], versions: int) -> str:
    """Return the table of each keeper's bytes, and the seconds of a save and of a load."""
    save_base, load_base = saves[0], loads[0]
    lines = []
    for save, load in zip(saves, loads, strict=True):
        if save.error or not save.seconds:
            lines.append([save.name, *[""] * 7, save.error])
            continue
        share = save.numbers["stored_bytes"] / (save.logical_bytes * versions)
        row = [save.name, f"{share:.3f}", *seconds(save), times(save, save_base)]
        row += [*seconds(load), times(load, load_base)] if load.seconds else ["", "", ""]
        lines.append([*row, _note(save, load)])
    columns = ["", "stored/raw", "save", "min-max", "vs torch.save"]
    columns += ["load", "min-max", "vs torch.load", "note"]
    return table(columns, lines)


def _note(save: Measured, load: Measured) -> str:
    """Return the note of a keeper, with the errors that a lossy one left."""
    if load.error:
        return load.error
    errors = [f"{kind} {error:.1e}" for kind, error in load.numbers.items() if error]
    left = f"relative error: {', '.join(errors)}" if errors else ""
    return "; ".join(filter(None, (save.note, left)))


def _by_kind(by_kind: Mapping[str, Mapping[str, float]]) -> str:
    """Return the share of its bytes that each kind takes, in the versions after the first."""
    shown = [kind for kind in _KINDS if any(kind in shares for shares in by_kind.values())]
    lines = [
        [name, *(f"{shares[kind]:.3f}" if kind in shares else "" for kind in shown)]
        for name, shares in by_kind.items()
        if shares
    ]
    return table(["versions after the first", *shown], lines)


def _adapters(result: Result, name: str) -> str:
    """Return the text on the bytes that a version adds beside its adapters."""
    raw = result.facts["adapter_bytes"]
    new = raw + result.facts.get("generator_bytes", 0)  # older results lack it
    said = []
    for keeper, after in result.facts["stored after"][name].items():
        if not keeper.startswith("ckptstore") or len(after) < 2 or "bf16" in keeper:
            continue
        added = statistics.median(newer - old for old, newer in itertools.pairwise(after))
        shares = f"{added / raw:.3f} of the first, {added / new:.3f} of both"
        said.append(f"{added / 1e6:.3f} MB with {keeper} ({shares})")
    return (
        f"A version's adapters and their moments have {raw / 1e6:.3f} MB, the state of the random "
        f"generator, which is new as well, {(new - raw) / 1e6:.3f} MB. Each version after the "
        f"first adds to the store, manifest and commit included: {', '.join(said)}."
    )


def _absent(missing: Mapping[str, str]) -> list[str]:
    if not missing:
        return []
    said = ", ".join(f"{name} (`{how}`)" for name, how in missing.items())
    return [f"Not installed here, and so not measured: {said}."]
