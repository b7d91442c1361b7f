"""Numbers, times and names as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ckptstore.cli.text import (
    age_text,
    bytes_text,
    counted,
    metric_text,
    parse_bytes,
    printable,
    seconds_text,
    time_text,
)
from ckptstore.errors import InvalidInputError


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1023, "1.00 KiB"), (1024, "1.00 KiB"),
        (1536, "1.50 KiB"), (10 * 1024, "10.0 KiB"), (999 * 1024, "999 KiB"), (1 << 20, "1.00 MiB"),
        (int(152.4 * (1 << 30)), "152 GiB"), (3 << 70, "3072 EiB"),
    ],
)  # fmt: skip
def test_bytes_in_binary_units(size: int, text: str) -> None:
    """Three digits and a binary unit, at every order of magnitude."""
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4MiB", 4 << 20), ("64KiB", 64 << 10), ("4M", 4 << 20), ("1 gib", 1 << 30), ("123", 123)],
)
def test_bytes_are_read_back(text: str, size: int) -> None:
    """Binary units in the usual spellings."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "4MB", "4.5MiB", "-1", "4 X", "4MiBMiB", "KKKK", "²"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(InvalidInputError, match="number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"), (45, "45s"), (150, "2m"), (3600, "60m"), (7300, "2h"), (3 * 86_400, "3d"),
        (800 * 86_400, "2y"), (-0.5, "0s"), (-300, "in 5m"),
    ],
)  # fmt: skip
def test_ages(seconds: float, text: str) -> None:
    """The largest sensible unit; a clock that is ahead is not a negative age."""
    assert age_text(seconds) == text


def test_durations_and_metrics() -> None:
    """Three digits for durations, six for metrics, and what is not finite by name."""
    assert [seconds_text(x) for x in (0.00042, 0.25, 3.14159, 90, 1200)] == [
        "0.42 ms", "250 ms", "3.14 s", "90 s", "20 min",
    ]  # fmt: skip
    assert [metric_text(x) for x in (2.5, 1 / 3, 1e-9, float("nan"))] == [
        "2.5", "0.333333", "1e-09", "nan",
    ]  # fmt: skip


def test_long_durations_are_in_hours() -> None:
    """From two hours on, with commas where there are many."""
    assert [seconds_text(x) for x in (6000, 43_200, 5_400_000)] == ["100 min", "12 h", "1,500 h"]


def test_one_is_not_many() -> None:
    """A count and its noun agree."""
    found = [counted(count, "pack") for count in (0, 1, 2, 1200)]
    assert found == ["0 packs", "1 pack", "2 packs", "1,200 packs"]


def test_times_are_local_or_marked_utc() -> None:
    """UTC carries a Z; local time is the machine's."""
    moment = datetime(2024, 7, 1, 12, 30, 5, 999_000, tzinfo=UTC)
    assert time_text(moment, utc=True) == "2024-07-01 12:30:05Z"
    assert time_text(moment, utc=False) == moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def test_what_does_not_print_is_escaped() -> None:
    """No text from storage reaches the terminal as a command; printable text is left alone."""
    assert printable("grüße 模型 🙂") == "grüße 模型 🙂"
    assert printable("a\x1b[31mb\n\x9b\u202e\ud800") == "a\\x1b[31mb\\n\\x9b\\u202e\\ud800"
