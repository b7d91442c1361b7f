"""``ckptstore doctor``: probe the guarantees and the speed of a storage; needs no store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore import limits
from ckptstore.backends.registry import open_backend
from ckptstore.cli.output import Output, Screen
from ckptstore.cli.probe_table import advice, draw_findings
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import location
from ckptstore.cli.store_options import (
    AsJson,
    Quiet,
    StorageOptions,
    StoreUrl,
    parse_storage_options,
)
from ckptstore.cli.text import bytes_text, parse_bytes

if TYPE_CHECKING:
    from ckptstore.backends.probe import ProbeReport, Speed


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="URL")] = None,
    size: Annotated[str | None, typer.Option(metavar="BYTES")] = None,
    store: StoreUrl = None,
    option: StorageOptions = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Test a storage: its guarantees and its speed. A store is not needed.

    Writes, reads and deletes small objects and one large one below probe/ at the location.

    Parameters
    ----------
    url
        Location; default: --store or CKPTSTORE_URL.
    size
        Bytes to write and read for the throughput; 0 skips this. Default: 64MiB.
    """
    from ckptstore.backends.probe import measure, probe

    output = Output("doctor", as_json=json, quiet=quiet)
    size_bytes = limits.MEASURE_BYTES if size is None else parse_bytes(size)
    storage_options = parse_storage_options(option or ())
    backend = open_backend(location(url or store), **storage_options)
    try:
        with progress_bars(output) as progress:
            report = probe(backend, progress=progress)
            speed = (
                measure(backend, size_bytes=size_bytes, progress=progress) if size_bytes else None
            )
        where = backend.url
    finally:
        backend.close()
    document = {
        "url": where,
        **report.to_dict(),
        "concurrent_writers": report.passed,
        "advice": advice(report.to_dict()),
        "speed": None
        if speed is None
        else {
            "bytes_moved": speed.bytes_moved,
            "write_bytes_per_s": speed.write_bytes_per_s,
            "read_bytes_per_s": speed.read_bytes_per_s,
        },
    }
    output.show(document, lambda screen: _draw(screen, where, report, speed))


def _draw(screen: Screen, url: str, report: ProbeReport, speed: Speed | None) -> None:
    from ckptstore.backends.probe import offset_text

    screen.heading(f"{url} ({report.backend})")
    screen.line()
    draw_findings(screen, report.to_dict())
    screen.line()
    fields = {"storage clock": f"{offset_text(report.clock_offset_s)} from ours"}
    if speed is not None:
        moved = bytes_text(speed.bytes_moved)
        fields["write"] = f"{bytes_text(speed.write_bytes_per_s)}/s, {moved} until durable"
        fields["read"] = f"{bytes_text(speed.read_bytes_per_s)}/s, just written: caches may help"
    screen.fields(fields)
