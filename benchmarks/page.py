"""benchmarks/RESULTS.md: tables and plots made from the JSON results, between markers.

Text outside of the markers is written by hand and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Result
from benchmarks.plots import draw_plots
from benchmarks.results import read_result
from benchmarks.sections import (
    background,
    catalog,
    codec,
    connections,
    models,
    replication,
    resuming,
    serving,
    sizes,
    storage,
)
from benchmarks.sections.pieces import facts

__all__ = ["sections", "write_page"]


def write_page(page: Path, results: Path) -> None:
    """Rewrite the text between the markers of the page; draw the plots for the documentation.

    Raises
    ------
    ValueError
        A section has no markers in the page.
    """
    text = page.read_text()
    images = page.parent.parent / "docs" / "images"
    for name, make in sections().items():
        result = read_result(results, name)
        if result is None:
            missing = f"*No table yet: `python -m benchmarks.run {name}` makes it.*"
            text = _replaced(text, name, missing)
            continue
        plots = draw_plots(result, images)
        links = [f"![{label}](../docs/images/{path.name})" for label, path in plots.items()]
        text = _replaced(text, name, "\n\n".join([facts(result), *make(result), *links]))
    page.write_text(text)


def sections() -> dict[str, Callable[[Result], list[str]]]:
    """Return, by suite, the function that makes the blocks of its section."""
    return {
        "local": storage.local,
        "s3": storage.s3,
        "bytes": connections.byte_paths,
        "sharing": connections.sharing,
        "replicate": replication.replicate,
        "codecs": codec.codecs,
        "cores": codec.cores,
        "trajectory": sizes.trajectory,
        "rates": sizes.rates,
        "resume": resuming.resume,
        "workloads": models.workloads,
        "many": models.many,
        "weka": models.weka,
        "memory": models.memory,
        "filesystems": storage.filesystems,
        "link": storage.link,
        "encryption": storage.encryption,
        "serve": serving.serve,
        "failures": background.failures,
        "catalog": catalog.catalog,
        "scale": catalog.scale,
        "async": background.async_saves,
        "gpu": background.from_gpu,
    }


def _replaced(text: str, name: str, body: str) -> str:
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    if begin not in text or end not in text:
        msg = f"the page has no markers {begin} and {end}"
        raise ValueError(msg)
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n\n{body}\n\n{end}{rest.split(end, 1)[1]}"
