"""``ckptstore retain``: what becomes of each version under a policy, and why; and doing it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Final

import typer

from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention import Decision, RunPlan
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import opened
from ckptstore.cli.store_options import DryRun, WriterOptions, parse_pairs
from ckptstore.cli.text import bytes_text, count_text, counted, freed_later, metric_text
from ckptstore.errors import InvalidInputError, PolicyError
from ckptstore.maintenance.retention.retain import RetainReport
from ckptstore.maintenance.retention.rounding_report import Rounding
from ckptstore.store import Store

_CLOCKS: Final = {
    "storage": "ages are by the storage's clock",
    "machine": "ages are by this machine's clock, since nothing may be written here; "
    "--apply goes by the storage's",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RuleOptions:
    """Options that state a retention policy.

    Parameters
    ----------
    full
        Versions to keep whole: 'last 3'. Repeatable.
    weights
        Versions to keep as weights only: 'best 5 val_loss, every 1000 steps'. Repeatable.
    weights_bf16
        Versions to keep as weights rounded to bfloat16. Repeatable.
    weights_int8
        Versions to keep as weights in 8 bits with one scale per block. Repeatable.
    record
        Versions to keep as a record with metrics only: 'all'. Repeatable.
    lossy
        Error bounds of the two rounded levels: 'int8:rel_l2=0.02,block=64'. Repeatable.
    encoding
        With --set: encoding of the run's future saves: 'role:optimizer=dynamic8'. Repeatable.
    """

    full: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None
    weights: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None
    weights_bf16: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None
    weights_int8: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None
    record: Annotated[list[str] | None, typer.Option(metavar="RULES")] = None
    lossy: Annotated[list[str] | None, typer.Option(metavar="ENCODING")] = None
    encoding: Annotated[list[str] | None, typer.Option(metavar="PATTERN=ENCODING")] = None

    def policy(self) -> Policy | None:
        """Return the policy of these rules; None if there are none."""
        given = {one.name: getattr(self, one.name) or () for one in fields(self)}
        if not any(given.values()):
            return None
        texts = given.pop("encoding")
        encodings = parse_pairs(texts, "PATTERN=ENCODING", "role:optimizer=dynamic8")
        return Policy.parse(**given, encodings=encodings)


def retain(
    run: Annotated[str | None, typer.Argument(metavar="RUN")] = None,
    *,
    rules: _RuleOptions,
    apply: bool = False,
    dry_run: DryRun = False,
    quick: bool = False,
    set_policy: Annotated[bool, typer.Option("--set")] = False,
    clear: bool = False,
    options: WriterOptions,
) -> None:
    """Show what a retention policy keeps of each version and why; --apply carries it out.

    Parameters
    ----------
    run
        Only this run. Default: all runs.
    apply
        Carry out the plan. Without it nothing changes.
    dry_run
        Change nothing; this is the default.
    quick
        Estimate the space that rounding frees, instead of reading and rounding all weights.
    set_policy
        Store the rules as the policy of RUN, or of the store.
    clear
        Remove the stored policy of RUN, or of the store.

    Examples
    --------
    ckptstore retain gpt --full 'last 3' --weights 'best 5 val_loss'
    ckptstore retain gpt --set --full 'last 3' --apply
    """
    output, policy = options.output("retain"), rules.policy()
    _check(rules, policy, apply=apply, dry_run=dry_run, set_policy=set_policy, clear=clear)
    with opened(options, writing=True) as opening:  # a preview reads the storage's clock
        if (set_policy or clear) and not dry_run:
            _store(opening, run, policy)
        if clear or (set_policy and not apply and not dry_run):
            document = {"run": run, "policy": policy.to_json() if policy else None}
            output.tell(document, f"{run or 'the store'}: {policy or 'no policy'}")
            return
        report = opening.retain(policy, run=run, dry_run=not apply, quick=quick)
        output.show(_document(opening, report), lambda screen: _draw(screen, report))
        _notes(output, report)
    if any(plan.refused for plan in report.plans):
        raise typer.Exit(PolicyError.exit_code)


def _check(
    rules: _RuleOptions, policy: Policy | None,
    *, apply: bool, dry_run: bool, set_policy: bool, clear: bool,
) -> None:  # fmt: skip
    what = hint = ""
    if apply and dry_run:
        what, hint = "--apply and --dry-run exclude each other", "leave one of them out"
    elif clear and (policy or set_policy or apply or dry_run):
        what, hint = "--clear stands alone", "ckptstore retain [RUN] --clear"
    elif rules.encoding and not set_policy:
        what, hint = "--encoding is for future saves: a stored policy reaches them", "add --set"
    elif set_policy and policy is None:
        what, hint = "--set wants rules", "such as --full 'last 3' --weights 'best 5 val_loss'"
    if what:
        raise InvalidInputError(what, hint=hint)


def _store(store: Store, run: str | None, policy: Policy | None) -> None:
    if run is None:
        store.set_policy(policy)
    else:
        store.repo.refresh().run(run)  # a misspelled name makes no run
        store.run(run).set_policy(policy)


def _document(store: Store, report: RetainReport) -> dict[str, Any]:
    return {
        "store": store.url,
        "dry_run": report.dry_run,
        "runs": [_run_document(plan, report) for plan in report.plans],
        "deleted_count": sum(decision.fate == "gone" for decision in report.changes),
        "aged_count": sum(decision.fate != "gone" for decision in report.changes),
        "reclaimable_bytes": report.reclaimable_bytes,
        "commits": report.commits,
        "clock": report.clock or None,
    }


def _run_document(plan: RunPlan, report: RetainReport) -> dict[str, Any]:
    return {
        "run": plan.run,
        "policy": plan.policy.to_json() if plan.policy else None,
        "refused": plan.refused or None,
        "versions": [
            {
                "id": decision.version.id,
                "step": decision.version.step,
                "level": decision.version.level,
                "fate": decision.fate,
                "reasons": decision.reasons,
                "reclaimable_bytes": decision.reclaimable_bytes,
                "rounding": _rounding_document(report.roundings.get(decision.version.id)),
                "dropped": report.dropped.get(decision.version.id, {}),
                "skipped": report.skipped.get(decision.version.id),
            }
            for decision in plan.decisions
        ],
    }


def _draw(screen: Screen, report: RetainReport) -> None:
    roundings = report.roundings

    def error(decision: Decision) -> str:
        return _rounding_text(roundings.get(decision.version.id))

    screen.listing(
        [one for plan in report.plans for one in reversed(plan.decisions)],
        Column("RUN", lambda one: one.version.run),
        Column("STEP", lambda one: str(one.version.step), right=True, wrap=False),
        Column("ID", lambda one: one.version.id[:8], wrap=False),
        Column("KEPT", _kept, wrap=False),
        Column("FREES", _frees, right=True, wrap=False),
        Column("ERROR", error, wrap=False, shown=bool(roundings)),
        Column("METRICS", _metrics, drop=1),
        Column("DROPS", report.drops, shown=any(report.dropped.values())),
        Column("WHY", lambda one: "; ".join(one.reasons)),
    )
    for plan in report.plans:
        if plan.refused:
            screen.line(f"{plan.run}: refused: {plan.refused}", "bold red")


def _kept(decision: Decision) -> str:
    return f"{decision.version.level} -> {decision.fate}" if decision.changes else decision.fate


def _frees(decision: Decision) -> str:
    return bytes_text(decision.reclaimable_bytes) if decision.changes else "-"


def _metrics(decision: Decision) -> str:
    first = list(decision.version.metrics.items())[:3]
    return ", ".join(f"{name} {metric_text(value)}" for name, value in first)


def _notes(output: Output, report: RetainReport) -> None:
    gone = sum(decision.fate == "gone" for decision in report.changes)
    aged = len(report.changes) - gone
    done = "would be " if report.dry_run else ""
    text = f"{count_text(gone)} {done}deleted, {count_text(aged)} {done}reduced"
    text += f"; {freed_later(report.reclaimable_bytes)}"
    if report.dry_run and report.changes:
        text += "; --apply does it"
    elif gone:
        text += "; until the first, ckptstore undelete restores them"
    output.note(text)
    if report.clock:
        output.note(_CLOCKS[report.clock])
    for why in report.skipped.values():
        output.note(f"not reduced: {why}")
    exact = sum(len(rounding.problems) for rounding in report.roundings.values())
    if exact:
        output.note(f"{counted(exact, 'tensor')} kept more exactly than the level says: --json")


def _rounding_document(rounding: Rounding | None) -> dict[str, Any] | None:
    """Return errors and bytes of a rounding; None where no weights were read."""
    if rounding is None:
        return None
    tensors = [
        {**asdict(tensor), "bytes": tensor.nbytes, "problem": tensor.problem or None}
        for tensor in rounding.tensors
    ]
    largest = {"max_abs": rounding.max_abs, "rel_l2": rounding.rel_l2}
    return {**asdict(rounding), **largest, "tensors": tensors}


def _rounding_text(rounding: Rounding | None) -> str:
    """Return the largest relative error of a tensor, and the largest difference of an element."""
    if rounding is None or not rounding.tensors:
        return "-"
    return f"rel {rounding.rel_l2:.2g}, abs {rounding.max_abs:.2g}"
