"""``ckptstore doctor``: probe the guarantees and the speed of a storage; needs no store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ckptstore import limits
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.posix_settings import SETTINGS
from ckptstore.backends.probe import ProbeReport, Speed, failed_check, measure, offset_text, probe
from ckptstore.backends.registry import open_backend
from ckptstore.cli import store_options
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import location
from ckptstore.cli.text import bytes_text, parse_bytes, seconds_text
from ckptstore.errors import ReadOnlyError, StorageError, StorageFullError


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="URL")] = None,
    size: Annotated[str | None, typer.Option(metavar="BYTES")] = None,
    store: store_options.StoreUrl = None,
    option: store_options.StorageOptions = None,
    json: store_options.AsJson = False,
    quiet: store_options.Quiet = False,
) -> None:
    """Test a storage: its guarantees and its speed. A store is not needed.

    Writes, reads and deletes small objects and one large one below probe/ at the location.

    Parameters
    ----------
    url
        Location; default: --store or CKPTSTORE_URL.
    size
        Bytes to write and read for the throughput; 0 skips this, and so does a failed check that
        every store needs. Default: 64MiB.

    Examples
    --------
    ckptstore doctor s3://bucket/ckpts
    ckptstore doctor /mnt/nfs/ckpts --size 64MiB
    """
    output = Output("doctor", as_json=json, quiet=quiet)
    size_bytes = limits.MEASURE_BYTES if size is None else parse_bytes(size)
    given = store_options.parse_storage_options(option or ())
    backend = open_backend(location(url or store), **given)
    try:
        if backend.capabilities.read_only:
            msg = f"doctor tests a storage by writing to it, and {backend.url} is read-only"
            hint = f"to check a store there: ckptstore verify RUN --store {backend.url}"
            raise ReadOnlyError(msg, hint=hint)
        with output.progress() as progress:
            report = probe(backend, progress=progress)
            speed, unmeasured = None, ""
            if size_bytes and not failed_check(report.to_dict()):
                try:
                    speed = measure(backend, size_bytes=size_bytes, progress=progress)
                except StorageError as error:
                    hint = " (try --size 1MiB)" if isinstance(error, StorageFullError) else ""
                    unmeasured = f"not measured: {error.message}{hint}"
        if backend.name in SETTINGS:  # a folder, which other members of a group could not write to
            with suppress(OSError):  # it is not empty, or another's
                os.rmdir(f"{backend.url}/probe")  # noqa: PTH106
        where, remarks = backend.url, list(backend.remarks())
    finally:
        backend.close()
    document = {
        "url": where,
        **report.to_dict(),
        "concurrent_writers": report.passed,
        "advice": advice(report.to_dict()),
        "remarks": remarks,
        "speed": speed and asdict(speed),
        "speed_failure": unmeasured or None,
    }
    output.show(document, lambda screen: _draw(screen, where, report, speed or unmeasured, remarks))


def _draw(
    screen: Screen, url: str, report: ProbeReport, speed: Speed | str, remarks: Sequence[str]
) -> None:
    screen.heading(f"{url} ({report.backend})")
    screen.line()
    draw_findings(screen, report.to_dict())
    screen.line()
    fields = {"storage clock": f"{offset_text(report.clock_offset_s)} from ours"}
    if isinstance(speed, str):
        fields.update({"speed": speed} if speed else {})
    else:
        moved = bytes_text(speed.bytes_moved)
        fields["write"] = f"{bytes_text(speed.write_bytes_per_s)}/s, {moved} until durable"
        fields["read"] = f"{bytes_text(speed.read_bytes_per_s)}/s, just written: caches may help"
    screen.fields(fields)
    for remark in remarks:
        screen.line()
        screen.line(remark)


_ADVICE = {
    PutIfAbsent.ATOMIC: "safe for concurrent writers",
    PutIfAbsent.IGNORED: "single writer only: the storage takes no notice of the condition to "
    "create an object only if it is absent, so that concurrent writers would lose commits",
    PutIfAbsent.REFUSED: "single writer only: the storage refuses to create an object only if it "
    "is absent",
    PutIfAbsent.UNKNOWN: "single writer only: not everything that concurrent writers need held",
}


def advice(report: Mapping[str, Any]) -> str:
    """Return what a storage may be used for, by the report of a probe as JSON values."""
    if failed := failed_check(report):
        return f"no store can be kept here, not even for a single writer: {failed} failed"
    return _ADVICE[PutIfAbsent(report["put_if_absent"])]


def draw_findings(screen: Screen, report: Mapping[str, Any]) -> None:
    """Draw the checks, the latencies and the verdict of a probe.

    Parameters
    ----------
    report
        As :meth:`ckptstore.backends.probe.ProbeReport.to_dict` gives it; an empty one (a store
        that was made elsewhere) draws nothing but a remark.
    """
    from rich.text import Text

    if not report:
        screen.line("nothing is recorded about the storage")
        return
    said = {True: Text("holds", "green"), False: Text("FAILS", "bold red")}
    rows = [(one["name"], said[bool(one["passed"])], one["detail"]) for one in report["checks"]]
    screen.table((Column("CHECK"), Column(""), Column("SEEN")), rows)
    screen.line()
    latencies = [(name, seconds_text(ms / 1000)) for name, ms in report["latencies_ms"].items()]
    screen.table((Column("OPERATION"), Column("LATENCY (MEDIAN)", right=True)), latencies)
    screen.line()
    verdict = PutIfAbsent(report["put_if_absent"])
    atomic = verdict is PutIfAbsent.ATOMIC
    screen.line(f"put-if-absent: {verdict.value}", "green" if atomic else "bold red")
    screen.line(f"{report['backend']}: {advice(report)}", "bold")
