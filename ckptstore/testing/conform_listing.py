"""Conformance of listings: order, prefix, ``after``, freshness."""

from __future__ import annotations

import pytest

from ckptstore.backends.base import Backend
from ckptstore.errors import InvalidKeyError
from ckptstore.testing.side_door import SideDoor

# Names whose order as folders differs from their order as text: "-" and "." sort before "/".
KEYS = [
    "a-b/x",
    "a.b",
    "a/x",
    "a/y.json",
    "a/z/1",
    "a0",
    "commits/000000/000000000001.json",
    "commits/000000/000000000002.json",
    "commits/000001/000000001000.json",
    "packs/aa/1.pack",
    "packs/ab/2.pack",
    "store.json",
]


class ListingConformance(SideDoor):
    """Compares listings with the objects that the side door stored."""

    def test_all_in_order(self, backend: Backend) -> None:
        """Everything is listed once, in the order of the whole keys, with its size."""
        for index, key in enumerate(reversed(KEYS)):
            self.raw_write(key, bytes(index))
        infos = list(backend.list(""))
        assert [info.key for info in infos] == sorted(KEYS)
        assert [info.size_bytes for info in infos] == list(range(len(KEYS)))[::-1]

    @pytest.mark.parametrize(
        "prefix", ["", "a", "a/", "a/z", "a/z/", "c", "commits/00000", "packs/a", "store.json", "z"]
    )
    def test_prefix_and_after(self, backend: Backend, prefix: str) -> None:
        """For each position to continue from, exactly the later keys of the prefix are listed."""
        for key in KEYS:
            self.raw_write(key, b"x")
        cuts = ["", *KEYS, "a/", "a/y", "b", "commits/0", "commits/000000/9", "packs/aa/0", "zz"]
        for after in cuts:
            found = [info.key for info in backend.list(prefix, after=after)]
            assert found == [key for key in KEYS if key.startswith(prefix) and key > after], after

    def test_nothing_there(self, backend: Backend) -> None:
        """A missing folder and an empty store are empty listings."""
        assert list(backend.list("")) == []
        assert list(backend.list("no/such/")) == []
        self.raw_write("a/b", b"x")
        assert list(backend.list("a/b/c")) == []

    def test_write_shows_at_once(self, backend: Backend) -> None:
        """A listing shows every object written, created or deleted before it, by any client."""
        for index in range(5):
            assert len(list(backend.list("a/"))) == 2 * index
            backend.put(f"a/{index}", b"x")
            assert len(list(backend.list("a/"))) == 2 * index + 1
            self.raw_write(f"a/{index}.other", b"x")
        backend.delete("a/0")
        assert [info.key for info in backend.list("a/", after="a/3")] == [
            "a/3.other",
            "a/4",
            "a/4.other",
        ]
        assert "a/0" not in {info.key for info in backend.list("a/")}

    def test_foreign_names_are_left_out(self, backend: Backend) -> None:
        """Temporary files and names that break the key rules are not listed."""
        for name in (".tmp-123", "a/.tmp-456", "a/B", "a/with space", ".hidden/x", "a/good"):
            self.raw_write(name, b"x")
        assert [info.key for info in backend.list("")] == ["a/good"]
        assert [info.key for info in backend.list("a/")] == ["a/good"]

    def test_listing_agrees_with_stat(self, backend: Backend) -> None:
        """Size and time in a listing are those of ``stat``."""
        backend.put("a/b", b"12345")
        (listed,) = backend.list("a/")
        looked = backend.stat("a/b")
        assert (listed.key, listed.size_bytes) == (looked.key, looked.size_bytes)
        assert abs(listed.modified_at - looked.modified_at) < 2

    @pytest.mark.parametrize("prefix", ["/", "a//", "..", ".tmp", "A", "a/../b", "a b"])
    def test_bad_prefixes_are_refused(self, backend: Backend, prefix: str) -> None:
        """A prefix that no key can begin with is refused."""
        with pytest.raises(InvalidKeyError):
            list(backend.list(prefix))

    def test_listing_while_deleting(self, backend: Backend) -> None:
        """Objects may be deleted while they are listed."""
        for key in KEYS:
            backend.put(key, b"x")
        for info in backend.list(""):
            backend.delete(info.key)
        assert list(backend.list("")) == []
