"""Requirements on two clients of one storage, each with caches of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from labkit.peers import Peer, PeerError, local_peer
from labkit.systems import TwoMounts

__all__ = ["Clients", "TwoClientTests", "clients_of_mounts"]

Clients = tuple[Peer, Peer]
"""Two peers running backend_peer.py, with the same place open in both."""

# GlusterFS serves a deleted file from its cache for 1 s (measured); no harm, names are used once.
STALE_READ_S = 10.0


@contextmanager
def clients_of_mounts(system: TwoMounts) -> Iterator[Clients]:
    """Open one folder of a shared file system through both of its mounts."""
    with local_peer("backend_peer.py") as one, local_peer("backend_peer.py") as two:
        for peer, mount in zip((one, two), system.mounts, strict=True):
            found = peer.ask("open", url=str(mount / "pair"), options={})
            assert found == {"name": "parallel"}, "the mount table tells what this is"
        yield one, two


class TwoClientTests:
    """Subclass in a module that has a fixture ``clients``, which returns `Clients`."""

    race_rounds = 60
    """Number of simultaneous starts of both clients."""
    race_keys = 5
    """Number of names that they race for each time."""

    @pytest.fixture
    def folder(self) -> str:
        """Return the beginning of keys that no other test uses."""
        return f"pair/{secrets.token_hex(8)}/"

    def test_new_object_is_read_at_once(self, clients: Clients, folder: str) -> None:
        """An object that one client has created, the other reads and lists at once."""
        one, two = clients
        keys: list[str] = []
        for n in range(30):
            keys.append(f"{folder}{n:02d}")
            one.ask("put_if_absent", key=keys[-1], text=f"content {n}")
            assert two.ask("get", key=keys[-1]) == f"content {n}"
            assert two.ask("list", prefix=folder) == keys

    def test_name_that_was_looked_up_too_early(self, clients: Clients, folder: str) -> None:
        """A name that was absent when one client looked is visible as soon as it is created.

        File systems cache the failed lookup (for 30 s on NFS): the listing, put-if-absent and,
        through the listing, the read must bypass that.
        """
        one, two = clients
        for n in range(5):
            key = f"{folder}{n}"
            with pytest.raises(PeerError) as absent:
                two.ask("get", key=key)
            assert absent.value.kind == "object_not_found"
            assert two.ask("list", prefix=folder) == [f"{folder}{m}" for m in range(n)]
            one.ask("put_if_absent", key=key, text="there")
            with pytest.raises(PeerError) as exists:
                two.ask("put_if_absent", key=key, text="not there")
            assert exists.value.kind == "object_exists"
            assert key in two.ask("list", prefix=folder)
            assert two.ask("get", key=key) == "there"

    def test_early_look_up_then_read_only(self, clients: Clients, folder: str) -> None:
        """A reader that looked too early finds the object without writing anything itself."""
        one, two = clients
        key = f"{folder}late"
        with pytest.raises(PeerError):
            two.ask("get", key=key)
        one.ask("put_if_absent", key=key, text="there")
        assert two.ask("list", prefix=folder) == [key]
        assert two.ask("get", key=key) == "there"

    def test_races_have_one_winner(self, clients: Clients, folder: str) -> None:
        """Of two creators of a name exactly one wins, several hundred times; all read its bytes."""
        one, two = clients
        wins = {"one": 0, "two": 0}
        for n in range(self.race_rounds):
            keys = [f"{folder}{n:04d}-{m}" for m in range(self.race_keys)]
            calls = {
                name: peer.send("race", keys=keys, mine=name)
                for name, peer in (("one", one), ("two", two))
            }
            results = {name: call.result() for name, call in calls.items()}
            for key in keys:
                winners = [name for name in calls if key in results[name]["won"]]
                assert len(winners) == 1, f"{key}: won by {winners}"
                wins[winners[0]] += 1
                for peer in (one, two) if key == keys[0] else (one,):
                    assert peer.ask("get", key=key) == winners[0]
        assert min(wins.values()) > 0, f"not much of a race: {wins}"
        everything = self.race_rounds * self.race_keys
        assert len(one.ask("list", prefix=folder)) == everything
        assert len(two.ask("list", prefix=folder)) == everything

    def test_large_object_arrives_whole(self, clients: Clients, folder: str) -> None:
        """An object that one client streams is bit-identical for the other, once committed."""
        one, two = clients
        for n, size_bytes in enumerate((0, 1, 4097, 9 << 20)):
            key = f"{folder}large-{n}"
            digest = one.ask("write", key=key, seed=n, size_bytes=size_bytes)
            assert two.ask("digest", key=key) == digest

    def test_deleted_object_is_gone(self, clients: Clients, folder: str) -> None:
        """An object that one client deleted leaves the other's listing, and soon its reads."""
        one, two = clients
        for n in range(5):
            one.ask("put_if_absent", key=f"{folder}{n}", text="x")
        assert len(two.ask("list", prefix=folder)) == 5
        two.ask("get", key=f"{folder}2")
        one.ask("delete", key=f"{folder}2")
        assert two.ask("list", prefix=folder) == [f"{folder}{n}" for n in (0, 1, 3, 4)]
        give_up = time.monotonic() + STALE_READ_S
        while self._reads(two, f"{folder}2"):
            assert time.monotonic() < give_up, "a deleted object can still be read"
            time.sleep(0.1)

    @staticmethod
    def _reads(peer: Peer, key: str) -> bool:
        try:
            peer.ask("get", key=key)
        except PeerError as error:
            if error.kind != "object_not_found":
                raise
            return False
        return True
