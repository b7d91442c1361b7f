"""A storage that is really full: a typed error, nothing left behind, earlier versions untouched."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faultkit.states import differences, state_of
from faultkit.stores import load_id, trusting
from threadwatch import threads_left

from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.errors import StorageFullError
from ckptstore.repo import create_on
from ckptstore.store import Store

SMALL = 1_000
LARGE = 2_000_000


def open_folder(folder: Path) -> Store:
    """Open or create the store in a folder."""
    options = Options(workers=2)
    repo = create_on(open_backend(folder), prober=trusting, exist_ok=True, options=options)
    return Store(repo)


def check_full(folder: Path) -> None:
    """Save until the storage is full, and hold what must hold then."""
    with open_folder(folder) as store:
        run = store.run("gpt")
        first = run.save(state_of(1, elements=SMALL), step=1)
        before = sorted(path for path in folder.rglob("*") if path.is_file())

        with pytest.raises(StorageFullError):
            run.save(state_of(2, elements=LARGE), step=2)

        assert not threads_left()
        assert [version.id for version in store.versions()] == [first.id]
        assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
        assert differences(load_id(store, first), state_of(1, elements=SMALL)) == []
        again = run.save(state_of(3, elements=SMALL), step=3)
        assert differences(load_id(store, again), state_of(3, elements=SMALL)) == []
        assert store.verify().ok


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Let no file of this process grow beyond 1 MiB: the kernel answers EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("file_size_limit")
def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """A quota on the size of a file fails the save and nothing else."""
    check_full(tmp_path / "store")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_file_system_without_room(tmp_path: Path) -> None:
    """ENOSPC from a real file system of 4 MiB fails the save and nothing else.

    In a mount namespace of its own, which needs the right to make one.
    """
    script = (
        "import sys; sys.path[:0] = json.loads(sys.argv[1]); "
        "from pathlib import Path; import test_no_space; "
        "test_no_space.check_full(Path(sys.argv[2]) / 'store'); print('all held')"
    )
    mount = f'mount -t tmpfs -o size=4m none {tmp_path} && exec "$@"'
    paths = json.dumps([str(Path(__file__).parent), *filter(None, sys.path)])
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]
    if os.geteuid() == 0:
        command.remove("--map-root-user")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")  # in a container, or refused by AppArmor
    done = subprocess.run(
        [*command, sys.executable, "-c", "import json; " + script, paths, str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == b"all held\n", done.stderr.decode()[-3000:]
