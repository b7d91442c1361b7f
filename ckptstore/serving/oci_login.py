"""Logs in to an OCI registry with what ``docker login`` has kept."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Final

from urllib3 import PoolManager

from ckptstore.errors import StoragePermissionError

_HELPER_S: Final = 30.0
_PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')


class Login:
    """Answers the challenges of one registry: Basic, or a token of its token server.

    Parameters
    ----------
    base
        ``https://HOST``, or ``http`` for a registry on this machine.
    scope
        What the token is for, as ``repository:NAME:pull,push``.
    """

    def __init__(self, pool: PoolManager, base: str, scope: str) -> None:
        self._pool = pool
        self._scheme, _, self._host = base.partition("://")
        self._scope = scope
        self.header: dict[str, str] = {}
        """For all requests; empty before a challenge."""

    def answer(self, challenge: str) -> bool:
        """Set the header that a ``WWW-Authenticate`` asks for; return whether there is one.

        Raises
        ------
        StoragePermissionError
            The configuration of Docker cannot be read, or its helper fails.
        """
        scheme, _, rest = challenge.partition(" ")
        basic = self._basic()
        if scheme.lower() == "basic" and basic:
            self.header = basic
        elif scheme.lower() == "bearer":
            self.header = self._token(dict(_PARAMETER.findall(rest)), basic)
        else:
            return False
        return bool(self.header)

    def _token(self, asked: dict[str, str], basic: dict[str, str]) -> dict[str, str]:
        realm = asked.get("realm", "")
        if not realm.startswith(f"{self._scheme}://"):  # the password would go out in the clear
            return {}
        fields = {"service": asked.get("service", ""), "scope": self._scope}
        answer = self._pool.request("GET", realm, fields=fields, headers=basic)
        if answer.status != 200:
            return {}
        found: dict[str, Any] = json.loads(answer.data)
        return {"Authorization": f"Bearer {found.get('token') or found.get('access_token')}"}

    def _basic(self) -> dict[str, str]:
        """Return the header of name and password; empty if none are kept."""
        folder = os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker"
        file = Path(folder, "config.json")
        try:
            kept = json.loads(file.read_text()) if file.exists() else {}
            helper = kept.get("credHelpers", {}).get(self._host) or kept.get("credsStore")
            word = kept.get("auths", {}).get(self._host, {}).get("auth")
            if not word and helper:
                word = self._ask(helper)
        except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
            msg = f"the login to {self._host} cannot be read from {file}: {error!s:.200}"
            raise StoragePermissionError(msg, hint=f"docker login {self._host}") from error
        return {"Authorization": f"Basic {word}"} if word else {}

    def _ask(self, helper: str) -> str:
        """Return what a credential helper of Docker keeps; empty if that is nothing."""
        command = [f"docker-credential-{helper}", "get"]
        done = subprocess.run(  # noqa: S603 - as Docker does
            command, input=self._host.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
        if done.returncode:
            return ""
        found = json.loads(done.stdout)
        return base64.b64encode(f"{found['Username']}:{found['Secret']}".encode()).decode()
