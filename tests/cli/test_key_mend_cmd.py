"""``ckptstore key mend``: what somebody without the key has put below ``keys/`` goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.errors import CorruptObjectError
from tests.cli.conftest import Cli


def test_the_command(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what would go, and takes it away; refused elsewhere."""
    monkeypatch.setenv("CKPTSTORE_KEY", "env:MY_KEY")
    monkeypatch.setenv("MY_KEY", bytes(range(1, 33)).hex())
    monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / "store"))
    assert cli("init", str(tmp_path / "store")).code == 0
    assert "nothing to mend" in cli("key", "mend").out
    planted = tmp_path / "store" / "keys" / "000999999999.json"
    planted.write_text("{}")
    failed = cli("ls")
    assert failed.code == CorruptObjectError.exit_code
    assert "ckptstore key mend" in failed.err
    dry = cli("key", "mend", "-n")
    assert "keys/000999999999.json would be deleted" in dry.out
    assert planted.exists()
    done = cli("key", "mend", "--json")
    assert done.document["deleted"] == ["keys/000999999999.json"]
    assert done.document["kept"] is True
    assert not planted.exists()
    assert cli("ls").code == 0
    assert cli("key", "id", "-n").code != 0
