"""Every mistake with a storage is answered as docs/howto/storage-errors.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import mistakes
import pytest
from local_servers import start_azurite, start_gcs, start_moto
from mistakes import CASES, Place
from webserver import WebServer

from ckptstore.config import SystemEnvironment
from ckptstore.errors import CkptStoreError

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "storage-errors.md"


def rows() -> dict[tuple[str, str], tuple[str, str, str]]:
    """Return the page's table: storage and mistake -> error, message and hint."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[0] in CASES:
            found[cells[0], cells[1]] = (cells[2], cells[3], cells[4])
    return found


ROWS = rows()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    """Return each storage with a store in it; servers of their own, since rights are checked."""
    folder = tmp_path_factory.mktemp("servers")
    servers = {"s3": start_moto(folder), "gs": start_gcs(folder), "az": start_azurite(folder)}
    with TemporaryDirectory() as shared:  # pytest's own folders are closed to other users
        Path(shared).chmod(0o755)
        with WebServer(tmp_path_factory.mktemp("web")) as web:
            found = {**servers, "http": web, "a folder": Path(shared)}
            yield {name: make(found[name]) for name, make in mistakes.PLACES.items()}
    for server in servers.values():
        server.stop()


@pytest.mark.parametrize(
    ("storage", "mistake"),
    [(storage, mistake) for storage, cases in CASES.items() for mistake in cases],
)
def test_a_mistake_is_answered_as_the_page_says(
    places: dict[str, Place], storage: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error, message and hint are those of the page, on which ``...`` stands for anything."""
    monkeypatch.setattr(SystemEnvironment, "sleep", lambda self, seconds: None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    kind, message, hint = ROWS[storage, mistake]
    with pytest.raises(CkptStoreError) as caught:
        CASES[storage][mistake](places[storage])
    assert type(caught.value).__name__ == kind
    for said, meant in ((caught.value.message, message), (caught.value.hint, hint)):
        assert re.fullmatch(re.escape(meant).replace(r"\.\.\.", ".*"), said), said


def test_the_page_has_no_other_rows() -> None:
    """Each row is tried, and each says what to do."""
    assert set(ROWS) == {(storage, mistake) for storage in CASES for mistake in CASES[storage]}
    assert all(hint for _, _, hint in ROWS.values())
