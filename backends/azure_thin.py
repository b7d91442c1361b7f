"""Requests for the bytes of blobs with few steps: Azure's library signs, ``wire`` sends.

The library takes 3 ms of the interpreter for a request. It sends the first request of a client;
later ones are made here, signed by its policy, and sent over its connections. It sends them itself
if it goes by a proxy, if its policy is not known here, and if an answer leads elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from email.utils import formatdate
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, urlsplit

from azure.core.pipeline import PipelineContext, PipelineRequest
from azure.core.pipeline.policies import AzureSasCredentialPolicy, BearerTokenCredentialPolicy
from azure.core.pipeline.transport import HttpRequest

from ckptstore.backends import wire
from ckptstore.backends.base import Buffers
from ckptstore.backends.bucket import Foreign
from ckptstore.backends.httperrors import error_for_answer
from ckptstore.backends.width import served_thin
from ckptstore.config import SYSTEM

_POLICIES: Final = (
    ("azure.storage.blob._shared.authentication", "SharedKeyCredentialPolicy"),
    ("azure.storage.blob._shared.policies", "StorageBearerTokenCredentialPolicy"),
    (AzureSasCredentialPolicy.__module__, AzureSasCredentialPolicy.__name__),
)
"""Modules and classes that sign a request by its URL and headers alone."""


def send(
    container: Foreign,
    what: str,
    name: str,
    headers: Mapping[str, str],
    *,
    body: Buffers = (),
    query: str = "",
    limit_s: float = 0.0,
) -> wire.HttpAnswer | None:
    """Send a PUT of a body, or a GET; return the answer, or None if the library has to send it.

    Parameters
    ----------
    container
        Azure's client of the container.
    name
        Of the blob.
    limit_s
        Seconds until the answer must begin; 0 for the usual ones.

    Raises
    ------
    CkptStoreError
        The answer is an error.
    """
    policy, config = container._credential_policy, container._config
    session = getattr(getattr(config, "transport", None), "session", None)
    pool = session and getattr(session.get_adapter(container.url), "direct", None)
    kind = type(policy)
    if not pool or not (policy is None or (kind.__module__, kind.__name__) in _POLICIES):
        return None
    verb = "PUT" if body else "GET"
    place, _, token = container.url.partition("?")
    query = "&".join(filter(None, (query, token)))
    url = f"{place}/{quote(name, safe='/~')}{query and '?'}{query}"
    date = formatdate(SYSTEM.now_ms() / 1000, usegmt=True)
    given = {"x-ms-version": container.api_version, "x-ms-date": date, **headers}
    if body:
        given |= {
            "Content-Length": str(sum(map(len, body))),
            "Content-MD5": _md5(body),
            "Content-Type": "application/octet-stream",
        }
    request = HttpRequest(verb, url, given)
    if policy is not None:
        policy.on_request(PipelineRequest(request, PipelineContext(config.transport)))
    at = urlsplit(request.url)
    request.headers.pop("Content-Length", None)  # it is added again
    head = {"Host": at.netloc, "User-Agent": config.user_agent_policy.user_agent, **request.headers}
    answer = wire.send(
        pool, verb, request.url[len(at.scheme) + 3 + len(at.netloc) :], head, body, limit_s
    )
    if 200 <= answer.status < 300:
        return answer
    answer.content()
    challenged = answer.status == 401 and isinstance(policy, BearerTokenCredentialPolicy)
    if answer.status < 400 or challenged:  # the library finds a way on
        served_thin(thin=False)
        return None
    code = answer.headers.get("x-ms-error-code", "")
    raise error_for_answer(answer.status, code, what, conditional=False)


def put(
    container: Foreign,
    what: str,
    name: str,
    body: Buffers,
    headers: Mapping[str, str] = MappingProxyType({}),
    query: str = "",
) -> bool:
    """Send a body; return False if the library has to send it."""
    answer = send(container, what, name, headers, body=body, query=query)
    if answer is not None:
        answer.content()
    return answer is not None


def _md5(body: Buffers) -> str:
    """Return the digest that the server compares, for errors in transit."""
    digest = hashlib.md5(usedforsecurity=False)
    for view in body:
        digest.update(view)
    return base64.b64encode(digest.digest()).decode()
