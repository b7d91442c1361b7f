"""``ckptstore interval``: recommended time between saves, after Young and Daly."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.catalog.intervals import Advice, Observed, advise, observe_failures
from ckptstore.catalog.retention_rules import parse_duration
from ckptstore.cli.options import CommonOptions
from ckptstore.cli.output import Screen
from ckptstore.cli.session import opened
from ckptstore.cli.text import counted, parse_wait, seconds_text
from ckptstore.errors import InvalidInputError


def interval(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run whose saves were measured.")],
    *,
    mtbf: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Mean time between failures of the whole training, for example 12h; for n "
            "machines, that of one machine divided by n. Default: estimated from the "
            "log.",
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time of a save, for example 30s. Default: from the receipts."
        ),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time from a failure until training continues. Default: 0s."
        ),
    ] = None,
    options: CommonOptions,
) -> None:
    """Recommend how often to save, from the cost of saves and the rate of failures."""
    output = options.output("interval")
    with opened(options) as opening:
        catalog = opening.repo.refresh()
        catalog.run(run)
        observed = None
        if mtbf is None:
            observed = observe_failures(opening.log(), run)
        mtbf_s = parse_duration(mtbf) if mtbf else _observed_s(observed, run)
        advice = advise(
            catalog,
            run,
            mtbf_s=mtbf_s,
            save_s=parse_duration(save) if save else None,
            restart_s=parse_wait(restart) if restart else 0.0,
        )
        document = {
            "run": run,
            "save_s": advice.save_s,
            "mtbf_s": advice.mtbf_s,
            "restarts_observed": observed.restarts_count if observed else None,
            "young_s": advice.young_s,
            "daly_s": advice.daly_s,
            "daly_steps": advice.steps,
            "lost": advice.lost,
            "interval_s": advice.interval_s,
            "interval_lost": advice.interval_lost,
        }
        output.show(document, lambda screen: _draw(screen, advice, observed))


def _observed_s(observed: Observed | None, run: str) -> float:
    seconds = observed.mtbf_s if observed else None
    if not seconds:
        msg = f"the log of run {run!r} shows no restart to measure failures by"
        raise InvalidInputError(msg, hint="give the time between failures: --mtbf 12h")
    return seconds


def _draw(screen: Screen, advice: Advice, observed: Observed | None) -> None:
    seen = f" ({counted(observed.restarts_count, 'restart')} in the log)" if observed else ""
    pairs = {
        "save": seconds_text(advice.save_s),
        "time between failures": seconds_text(advice.mtbf_s) + seen,
        "interval (Young)": seconds_text(advice.young_s),
        "interval (Daly)": seconds_text(advice.daly_s),
    }
    if advice.steps is not None:
        pairs["interval (Daly)"] += f", {counted(advice.steps, 'step')}"
    pairs["time lost at that"] = f"{advice.lost:.2%}"
    if advice.interval_s is not None and advice.interval_lost is not None:
        now = f"{seconds_text(advice.interval_s)}, loses {advice.interval_lost:.2%}"
        pairs["interval now"] = now
    screen.fields(pairs)
