"""Who may read: bearer and basic credentials, and the signatures of S3, all of one token."""

from __future__ import annotations

import base64
import calendar
import hashlib
import hmac
import re
import time
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from starlette.requests import Request

from ckptstore.serving.serving_limits import SIGNATURE_AGE_S

_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/,]+)/(\d{8})/([\w-]+)/s3/aws4_request, ?"
    r"SignedHeaders=([\w;-]+), ?Signature=([0-9a-f]{64})\Z"
)
_SAFE = "-_.~"


def has_token(request: Request, token: str) -> bool:
    """Return True if a request carries the token, as bearer or as password."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())


def is_signed(request: Request, token: str, now_s: float) -> bool:
    """Return True if a request of S3 is signed (version 4) with the token as the secret key.

    Parameters
    ----------
    now_s
        Seconds since 1970; signatures of another time are refused.
    """
    match = _SIGNED.match(request.headers.get("authorization", ""))
    stamp = request.headers.get("x-amz-date", "")
    if match is None or not re.fullmatch(r"\d{8}T\d{6}Z", stamp):
        return False
    _key, day, region, names, signature = match.groups()
    try:
        made_s = calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        return False
    headers = [(name, request.headers.get(name, "")) for name in names.split(";")]
    if abs(now_s - made_s) > SIGNATURE_AGE_S or "host" not in names.split(";"):
        return False
    query = parse_qsl(request.url.query, keep_blank_values=True)
    pairs = sorted((quote(name, _SAFE), quote(value, _SAFE)) for name, value in query)
    canonical = (
        request.method,
        quote(unquote_to_bytes(request.scope["raw_path"]), "/" + _SAFE),
        "&".join(f"{name}={value}" for name, value in pairs),
        *(f"{name}:{' '.join(value.split())}" for name, value in headers),
        "",
        names,
        request.headers.get("x-amz-content-sha256", ""),
    )
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    scope = f"{day}/{region}/s3/aws4_request"
    key = f"AWS4{token}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.compare_digest(key.hex(), signature)
