"""Every limit says where it comes from, and the limits fit together."""

from __future__ import annotations

import inspect
import re

from ckptstore import limits

UNITS = {"KIB", "MIB", "GIB"}


def test_every_limit_has_a_source() -> None:
    """A number without a reason cannot be judged by who wants to change it."""
    lines = inspect.getsource(limits).splitlines()
    reasons: dict[str, str] = {}
    comment = ""
    for above, line in zip(["", *lines], lines, strict=False):
        if line.startswith("#"):
            comment = f"{comment} {line}" if above.startswith("#") else line
        elif found := re.match(r"([A-Z][A-Z0-9_]*): Final = [^#]*(#.*)?", line):
            reasons[found[1]] = found[2] or comment
        elif not line.strip():
            comment = ""
    unexplained = [name for name, text in reasons.items() if "Source:" not in text]
    assert set(unexplained) <= UNITS
    assert set(reasons) == {name for name in vars(limits) if name.isupper()}


def test_sizes_are_ordered() -> None:
    """A default lies within what readers accept, and small things within large ones."""
    assert limits.CHUNK_BYTES_MIN <= limits.CHUNK_BYTES_DEFAULT <= limits.CHUNK_RAW_BYTES_MAX
    assert limits.SMALL_TENSOR_BYTES <= limits.SLAB_BYTES <= limits.CHUNK_BYTES_DEFAULT
    assert limits.CHUNK_RAW_BYTES_MAX < limits.CHUNK_STORED_BYTES_MAX < limits.PACK_BYTES_MAX
    assert limits.CHUNK_RAW_BYTES_MAX < limits.HOST_BYTES_DEFAULT
    assert limits.MANIFEST_STORED_BYTES_MAX <= limits.MANIFEST_RAW_BYTES_MAX
    assert limits.METADATA_BYTES_MAX < limits.COMMIT_BYTES_MAX
    assert limits.COMMIT_NUMBER_MAX // limits.COMMITS_PER_FOLDER < 10**6


def test_limits_are_positive() -> None:
    """Zero or less would refuse everything."""
    values = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert all(value > 0 for value in values.values())
