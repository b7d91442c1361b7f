"""``scheme://bucket/prefix`` locations of object stores."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.backends.base import check_key
from ckptstore.errors import InvalidKeyError, InvalidUrlError


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLocation:
    """Bucket and prefix below which the keys of one store lie."""

    url: str
    """As the user would write it."""
    bucket: str
    prefix: str
    """Prefix of the object name of every key: empty, or ending in ``/``."""

    def object_name(self, key: str) -> str:
        """Return the object name of `key` within the bucket."""
        return self.prefix + check_key(key)

    def key_of(self, object_name: str) -> str | None:
        """Return the key of a listed object, or None if its name breaks the key rules."""
        try:
            return check_key(object_name[len(self.prefix) :])
        except InvalidKeyError:
            return None


def parse_bucket_url(url: str) -> BucketLocation:
    """Return the bucket and prefix of a URL.

    Raises
    ------
    InvalidUrlError
        It has no bucket, or parts that such a URL must not have. A URL with credentials is
        refused without being repeated.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        msg = f"a {scheme}:// URL with credentials or a port"
        raise InvalidUrlError(msg, hint="give them as storage options (key=, endpoint_url=)")
    if "?" in rest or "#" in rest:
        msg = f"a {scheme}:// URL with a query or fragment"
        raise InvalidUrlError(msg, hint="give settings as storage options")
    path = path.rstrip("/")
    if not bucket or "//" in f"/{path}" or ".." in path.split("/"):
        msg = f"not a bucket and a path: {url!r}"
        raise InvalidUrlError(msg, hint=f"write {scheme}://bucket/path")
    return BucketLocation(url=url.rstrip("/"), bucket=bucket, prefix=f"{path}/" if path else "")
