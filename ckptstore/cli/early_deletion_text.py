"""How commands say what leaves its storage class early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptstore.cli.text import bytes_text, counted

if TYPE_CHECKING:
    from ckptstore.maintenance.retention.early_deletion import Early


def early_document(early: Early) -> dict[str, Any]:
    """Return it for a JSON document."""
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(early)
    return found


def early_lines(early: Early) -> Iterator[str]:
    """Yield a sentence a class, and one for what was not looked at."""
    for one in early.classes:
        packs = f"{counted(one.packs_count, 'pack')} of {bytes_text(one.size_bytes)}"
        yield (
            f"{packs} in {one.storage_class}, of {counted(one.versions_count, 'version')}: up to"
            f" {one.days_left} of {one.min_days} days left, charged if gc deletes them before"
        )
    for what in early.unknown:
        yield f"storage classes: {what}"
