"""Names of replicas in a log that anybody may have written."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import InvalidUrlError
from ckptstore.format.tiers import NameReplica


@pytest.mark.parametrize("head", ["reference::file", "simplecache::file", "zip://x.zip::file"])
def test_a_log_starts_no_chain_of_file_systems(tmp_path: Path, head: str) -> None:
    """What the log calls a replica makes fsspec fetch and interpret nothing."""
    there = tmp_path / "there"
    there.write_text("{}")
    named = NameReplica(name="cold", url=f"{head}://{there}", store="0" * 32)
    with ckptstore.open(tmp_path / "s", create=True) as store:
        store.repo.log.append_any(lambda _: [named])
        with pytest.raises(InvalidUrlError, match="chain"):
            store.replica("cold")


def test_who_gives_options_for_a_chain_means_it(tmp_path: Path) -> None:
    """The user, unlike the log, may name any file system that there is."""
    with ckptstore.open(tmp_path / "there", create=True) as there:
        store_id = there.info.store_id
    url = f"simplecache::file://{tmp_path / 'there'}"
    with ckptstore.open(tmp_path / "s", create=True) as store:
        named = NameReplica(name="cold", url=url, store=store_id)
        store.repo.log.append_any(lambda _: [named])
    with ckptstore.open(tmp_path / "s", replicas={"cold": {}}, read_only=True) as store:
        assert store.replica("cold").info.store_id == store_id
