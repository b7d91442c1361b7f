"""The demo holds what it claims, in small: `make demo` runs the same program for longer."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from buckets import S3Bucket
from docpages import ROOT

pytestmark = pytest.mark.timeout(600)

DEMO = [sys.executable, str(ROOT / "docs" / "demo" / "demo.py")]
SMALL = ["--steps", "10", "--width", "32", "--batch", "2"]


def _run(store: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [*DEMO, store, *SMALL], cwd=folder, env={**os.environ, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_demo_on_a_folder(tmp_path: Path) -> None:
    """Killed in the middle of a save, the training resumes bit for bit."""
    told = _run("ckpts", tmp_path)

    assert "the process was ended by SIGKILL" in told
    assert "all 10 losses are equal bit for bit" in told
    assert "Everything that was claimed held" in told


@pytest.mark.slow
def test_demo_on_a_bucket(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    """The same on object storage, with nothing but the URL changed."""
    options = s3_bucket.options()

    told = _run(
        s3_bucket.url, tmp_path, AWS_ENDPOINT_URL=s3_bucket.endpoint_url,
        AWS_ACCESS_KEY_ID=str(options["key"]), AWS_SECRET_ACCESS_KEY=str(options["secret"]),
        AWS_DEFAULT_REGION="us-east-1",
    )  # fmt: skip

    assert "Everything that was claimed held" in told


def test_demo_fails_where_a_claim_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no theatre: a claim that is false ends it with exit code 1."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "demo"))
    demo = importlib.import_module("demo")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(demo.DemoError, match="pigs fly"):
        demo.claim("pigs fly", holds=False)
    monkeypatch.setattr(demo, "tell", lambda *_: demo.claim("pigs fly", holds=False))
    monkeypatch.setattr(sys, "argv", ["demo.py"])

    assert demo.main() == 1
