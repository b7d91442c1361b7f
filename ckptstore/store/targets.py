"""Opens the store that versions are to come to, for programs that name it by a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.replicas.options import open_target
from ckptstore.replicas.places import PLACE, name_in
from ckptstore.store.store import Store


def check_selection(
    source: Store, *, runs: Sequence[str] | None, keep: str | Sequence[str] | None
) -> None:
    """Refuse runs and rules that name nothing, before a store is made for what they name.

    Raises
    ------
    RunNotFoundError, InvalidInputError
        There is no such run; or a rule does not follow the grammar, or its metric no direction.
    """
    from ckptstore.maintenance.core.select_versions import select_versions

    select_versions(source.repo, runs=runs or (), rules=keep)


@contextmanager
def open_target_of(
    source: Store,
    url: str,
    /,
    *,
    dry_run: bool,
    **options: Any,  # noqa: ANN401 - passed on to open_target
) -> Iterator[Store]:
    """Open what versions of a store are to come to: a place, or ``replica:NAME``.

    Raises
    ------
    NotFoundError
        The store has no replica of this name.
    CkptStoreError
        As :func:`ckptstore.replicas.targets.open_target`.
    """
    name = name_in(url)
    if name is not None:
        given = {key: value for key, value in options.items() if value}
        if given:
            source.give_options(name, given)
        yield source.replica(name)
        return
    if PLACE in options:
        msg = f"the place of a store is {url}, and {PLACE} among its options is another word for it"
        raise InvalidInputError(msg, hint=f"{PLACE} goes with replica:NAME alone")
    with open_target(source.repo, url, dry_run=dry_run, **options) as repo, Store(repo) as target:
        yield target
