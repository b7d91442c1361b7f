"""torchtitan: its own Trainer and model, on gloo ranks, with a run in place of its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from buckets import AzureBucket, GcsBucket, S3Bucket
from docpages import ROOT, read_page
from rankkit import titan
from rankkit.groups import Group, run_ranks

import ckptstore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_killed_rank_and_a_resume_at_any_size(tmp_path: Path) -> None:
    """After a kill -9 in a save all sizes resume with the same bits; the same size, all losses."""
    url, folder = str(tmp_path / "ckpts"), str(tmp_path / "outputs")
    ckptstore.open(url, create=True).close()
    with Group(titan.whole_and_killed, 2, url, folder) as group:
        group.finish()
        assert ("gone", None) in group.ended
        whole = [told[0] for told in group.told]
    assert len(whole[0][0]) == 20
    with ckptstore.open(url) as store:
        assert [version.step for version in store.versions("llama")] == [5, 10]
    assert not list(Path(folder).rglob("step-*"))

    for ranks in (1, 2, 4):
        results = run_ranks(titan.resumed, ranks, url, folder, 20 if ranks == 2 else 0)
        losses, states = results[0]
        assert states[0] == whole[0][1][10]
        if ranks == 2:
            assert losses == whole[0][0][10:]
            assert states[-1] == whole[0][1][20]


def test_saves_in_the_background_to_any_storage(
    tmp_path: Path, s3_bucket: S3Bucket, gcs_bucket: GcsBucket, azure_bucket: AzureBucket
) -> None:
    """``async_mode`` saves the state of the call; a step is loaded from the store's URL."""
    stores: list[tuple[str, dict[str, Any]]] = [(str(tmp_path / "ckpts"), {})] + [
        (bucket.url, bucket.options()) for bucket in (s3_bucket, gcs_bucket, azure_bucket)
    ]
    for url, options in stores:
        ckptstore.open(url, create=True, **options).close()
    assert run_ranks(titan.places, 2, str(tmp_path), stores) == [[[0, 1]] * 4] * 2


def test_the_program_of_the_page(tmp_path: Path) -> None:
    """A loop of one's own, as a reader copies it; it resumes."""
    blocks = read_page(ROOT / "docs" / "howto" / "torchtitan.md").blocks
    programs = [block.text for block in blocks if "Triton" in block.reason]
    assert len(programs) == 2
    run_ranks(titan.page, 1, str(tmp_path), programs)


def test_settings_of_torchtitan(tmp_path: Path) -> None:
    """``keep_latest_k``, ``load_step``, initial loads, last saves; the rest is refused."""
    run_ranks(titan.settings, 1, str(tmp_path / "ckpts"), str(tmp_path / "outputs"))
