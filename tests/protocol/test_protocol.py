"""The protocol of collection, explored exhaustively: every order of every client's calls.

A rule that is left out must be missed: for each there is an exploration that finds what is lost.
How many states there are is asserted too, so that a client that silently stops early is noticed.
"""

from __future__ import annotations

import pytest
from protocol_clients import Collector, Deleter, Relocator, Undeleter, Writer
from protocol_explorer import Client, Commit, Found, World, count, explore

START = (Commit("save", "v", "m-v", frozenset({"p"})),)
STORE = frozenset({"p", "m-v", "orphan"})


def world(*clients: Client) -> World:
    """Return a store of one version and an orphan, and clients that have not begun."""
    return World(START, STORE, clients)


def explored(*clients: Client) -> Found:
    """Visit every state; from each, one last collection must leave what is needed and no more."""
    return explore(world(*clients), Collector())


@pytest.mark.parametrize(
    ("clients", "states"),
    [
        pytest.param(
            [Writer("a", at_once=True), Writer("b", at_once=True), Deleter("v"), Collector()],
            110_569,
            id="two writers, a deleter, a collector",
        ),
        pytest.param(
            [Writer("a"), Deleter("v"), Undeleter("v"), Collector(split=True)],
            47_751,
            id="an undelete, condemned in parts",
        ),
        pytest.param(
            [Writer("a"), Deleter("a"), Undeleter("a"), Collector(ages=True)],
            11_729,
            id="a new version deleted and undeleted, some objects too young",
        ),
        pytest.param(
            [Relocator("v"), Deleter("v"), Undeleter("v"), Collector(split=True, ages=True)],
            59_506,
            id="a relocation of what is deleted and undeleted",
        ),
        pytest.param(
            [Deleter("v"), Undeleter("v"), Collector(split=True), Collector(split=True)],
            45_924,
            id="two collectors in parts",
        ),
        pytest.param(
            [
                Deleter("v"),
                Undeleter("v"),
                Collector(records=True, split=True),
                Collector(records=True, split=True),
            ],
            69_763,
            id="two collectors that records may mislead",
        ),
    ],
)
@pytest.mark.short(sample=2)
def test_no_live_version_ever_names_what_was_deleted(clients: list[Client], states: int) -> None:
    """Nor does anything stay that none needs, wherever all clients die."""
    found = explored(*clients)

    assert found.violation is None
    assert found.states == states


@pytest.mark.parametrize(
    "clients",
    [
        pytest.param(
            [Writer("a", checks=False), Writer("b"), Deleter("v"), Collector()],
            id="a writer commits without looking what was condemned",
        ),
        pytest.param(
            [Writer("a"), Deleter("v"), Collector(looks_again=False)],
            id="a collector condemns by what was live when it listed",
        ),
        pytest.param(
            [Writer("a"), Deleter("v"), Collector(commits_first=False)],
            id="a collector deletes before it commits",
        ),
        pytest.param(
            [Deleter("v"), Undeleter("v", checks=False), Collector()],
            id="an undelete does not look what was condemned",
        ),
        pytest.param(
            [Deleter("v"), Undeleter("v"), Collector(ages=True, manifests_first=False)],
            id="a pack is condemned before the manifest of the deleted version that names it",
        ),
        pytest.param(
            [Writer("a"), Deleter("v"), Relocator("v", checks=False), Collector()],
            id="a relocation does not look what became of the version",
        ),
        pytest.param(
            [Writer("a"), Deleter("v"), Collector(reads_afresh=False)],
            id="a collector condemns by a record in place of the manifests",
        ),
    ],
)
@pytest.mark.short(sample=2)
def test_each_rule_is_needed(clients: list[Client]) -> None:
    """Left out, some order of calls loses a version; the trace leads there from the start."""
    found = explored(*clients)

    assert found.violation is not None
    assert found.trace[0] == world(*clients)
    assert found.trace[-1] == found.violation


def test_an_undelete_that_looks_for_packs_needs_no_order_of_condemning() -> None:
    """Either rule alone suffices; the store keeps both."""
    clients: list[Client] = [
        Deleter("v"),
        Undeleter("v", looks=True),
        Collector(ages=True, manifests_first=False),
    ]

    assert explored(*clients).violation is None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("clients", "states"),
    [
        pytest.param(
            [Writer("a"), Writer("b"), Deleter("v"), Collector()],
            322_708,
            id="two writers, a deleter, a collector, every call by itself",
        ),
        pytest.param(
            [Writer("a"), Deleter("v"), Relocator("v"), Collector()],
            141_313,
            id="a writer beside a relocation",
        ),
        pytest.param(
            [Writer("a"), Deleter("v"), Collector(records=True), Collector(records=True)],
            2_352_765,
            id="a writer beside two collectors that records may mislead",
        ),
    ],
)
def test_further_clients(clients: list[Client], states: int) -> None:
    """As above, with more clients or finer steps."""
    found = explored(*clients)

    assert found.violation is None
    assert found.states == states


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("clients", "states"),
    [
        pytest.param(
            [Writer("a", at_once=True), Deleter("v"), Undeleter("v"), Collector(), Collector()],
            7_696_943,
            id="a writer, a deleter, an undelete, two collectors",
        )
    ],
)
def test_two_collectors_at_once(clients: list[Client], states: int) -> None:
    """Millions of states: what a live version names is stored in each of them."""
    found = count(world(*clients))

    assert found.violation is None
    assert found.states == states
