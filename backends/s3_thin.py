"""The two byte calls of S3 with few steps: a PUT of a large body, and a GET of a range.

botocore takes 1 to 2 ms of the interpreter for each call: checks of parameters, rules of endpoints,
events, a parser. Its client goes first; from the request that it signs this module learns where
the objects are, and how requests are signed. Further requests are built here, signed by botocore's
signer with its credentials, and sent over its connections. A request with parameters that are not
known here, and an answer that leads elsewhere, are left to the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from botocore import UNSIGNED
from botocore.awsrequest import AWSRequest
from botocore.exceptions import IncompleteReadError
from botocore.parsers import create_parser
from botocore.utils import percent_encode, percent_encode_sequence

from ckptstore.backends.bucket import Foreign
from ckptstore.backends.s3_calls import Request

_OPERATIONS: Final = {
    "get_object": "GetObject",
    "put_object": "PutObject",
    "upload_part": "UploadPart",
}
_OBJECT: Final = "ckptstore_object"
"""Entry of a request's context: its bucket and the name of its object."""
_HEADERS: Final = {
    "ContentType": "Content-Type",
    "Range": "Range",
    "RequestPayer": "x-amz-request-payer",
    "StorageClass": "x-amz-storage-class",
}
_QUERY: Final = {"PartNumber": "partNumber", "UploadId": "uploadId"}
_KNOWN: Final = {"Bucket", "Key", *_HEADERS, *_QUERY}
_ELSEWHERE: Final = {"AuthorizationHeaderMalformed", "PermanentRedirect"}
"""Codes of answers by which botocore finds the region of a bucket. Source: its redirector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """Place of a bucket's objects, and the way to sign requests to it."""

    bucket: str
    url: str
    """Ends before the name of the object."""
    signer: Foreign
    """None for requests without a signature."""
    signing: Mapping[str, str]
    agent: str


Seal = Callable[[Foreign, str, dict[str, str], dict[str, Any], str], None]
"""Takes body, URL, headers and context of a request, and the name of its operation; chooses the
protection of the body in transit, as headers and in the context."""


class ThinCalls:
    """Requests built here and sent over the connections of a botocore client. Safe from any thread.

    Parameters
    ----------
    client
        Of botocore, for S3.
    seal
        Called for every body; None if the client's settings decide.
    """

    def __init__(self, client: Foreign, seal: Seal | None) -> None:
        self._client = client
        self._seal = seal
        self._endpoint: _Endpoint | None = None
        self._session: Foreign = getattr(getattr(client, "_endpoint", None), "http_session", None)
        config = client.meta.config
        checksums = ("request_checksum_calculation", "response_checksum_validation")
        plain = all(getattr(config, name, None) in {None, "when_required"} for name in checksums)
        if hasattr(self._session, "send") and plain:
            for name in _OPERATIONS.values():
                client.meta.events.register(f"before-parameter-build.s3.{name}", _note_object)
                client.meta.events.register(f"before-sign.s3.{name}", self._learn)

    def send(self, method: str, request: Request, body: Foreign = None) -> Foreign | None:
        """Send one request; return the answer if it is a success, with the body of a GET unread.

        Returns
        -------
        Foreign or None
            None if the client has to send it: the request or its answer is not known here.

        Raises
        ------
        ClientError
            The answer is an error. Other errors are those of botocore's connections.
        """
        at, operation = self._endpoint, _OPERATIONS[method]
        if at is None or at.bucket != request["Bucket"] or not _KNOWN.issuperset(request):
            return None
        named = {name: str(request[key]) for key, name in _QUERY.items() if key in request}
        query = percent_encode_sequence(named)
        url = at.url + percent_encode(request["Key"], safe="/~") + (query and f"?{query}")
        headers = {name: request[key] for key, name in _HEADERS.items() if key in request}
        headers["User-Agent"] = at.agent
        context: dict[str, Any] = {"client_config": self._client.meta.config}
        is_get = operation == "GetObject"
        if self._seal is not None and not is_get:
            self._seal(body, url, headers, context, operation)
        verb = "GET" if is_get else "PUT"
        made = AWSRequest(verb, url, headers, body, stream_output=is_get)
        made.context = context
        if at.signer is not None:
            at.signer.get_auth_instance(**at.signing).add_auth(made)
        answer = self._session.send(made.prepare())
        if answer.status_code in {200, 206}:
            return answer
        self._refuse(answer, operation)
        return None

    def _refuse(self, answer: Foreign, operation: str) -> None:
        """Raise the client's error for an answer, or return if the client finds a way on."""
        content, said = answer.content, answer.headers.get("content-length", "")
        if said.isdigit() and len(content) < int(said):
            raise IncompleteReadError(actual_bytes=len(content), expected_bytes=int(said))
        found = {"status_code": answer.status_code, "headers": answer.headers, "body": content}
        parsed: dict[str, Any] = create_parser("rest-xml").parse(found, None)
        code = parsed.get("Error", {}).get("Code", "")
        if answer.status_code < 400 or code in _ELSEWHERE:
            return
        raise self._client.exceptions.from_code(code)(parsed, operation)

    def _learn(
        self, request: Foreign, signature_version: Foreign, request_signer: Foreign, **_: object
    ) -> None:
        """Note, before botocore signs a request, where it goes and how it is signed."""
        self._endpoint = None
        bucket, key = request.context[_OBJECT]
        url, signing = request.url.partition("?")[0], request.context.get("signing", {})
        name = percent_encode(key, safe="/~")
        if signature_version not in {"s3v4", UNSIGNED} or not url.endswith(f"/{name}"):
            return
        self._endpoint = _Endpoint(
            bucket=bucket,
            url=url.removesuffix(name),
            signer=None if signature_version == UNSIGNED else request_signer,
            signing={
                "signing_name": signing.get("signing_name", request_signer.signing_name),
                "region_name": signing.get("region", request_signer.region_name),
                "signature_version": signature_version,
            },
            agent=request.headers.get("User-Agent", ""),
        )


def _note_object(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
    """Note the object of a request where :meth:`ThinCalls._learn` finds it."""
    context[_OBJECT] = params["Bucket"], params["Key"]
