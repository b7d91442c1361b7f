"""A WebDAV server (wsgidav) or an FTP server (pyftpdlib): KIND PORT ROOT USER PASSWORD.

Below ROOT lies the folder ``data``. USER may write to it, the user ``reader`` (same password) not.
"""

from __future__ import annotations

import sys


def serve_webdav(port: int, root: str, user: str, password: str) -> None:
    """Serve ``/data``, and the same folder as ``/reading`` without the right to write."""
    from cheroot.wsgi import Server
    from wsgidav.fs_dav_provider import FilesystemProvider
    from wsgidav.wsgidav_app import WsgiDAVApp

    app = WsgiDAVApp(
        {
            "provider_mapping": {
                "/data": FilesystemProvider(f"{root}/data"),
                "/reading": FilesystemProvider(f"{root}/data", readonly=True),
            },
            "simple_dc": {"user_mapping": {"*": {user: {"password": password}}}},
            "http_authenticator": {"accept_basic": True, "default_to_digest": False},
            "verbose": 1,
            "logging": {"enable": False},
        }
    )
    Server(("127.0.0.1", port), app, numthreads=16).start()


def serve_ftp(port: int, root: str, user: str, password: str) -> None:
    """Serve the root."""
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import ThreadedFTPServer

    class Handler(FTPHandler):  # type: ignore[misc]  # ships no types
        """Serves users of this server alone."""

        authorizer = DummyAuthorizer()
        auth_failed_timeout = 0

    Handler.authorizer.add_user(user, password, root, perm="elradfmwMT")
    Handler.authorizer.add_user("reader", password, root, perm="elr")
    ThreadedFTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    """Serve until killed."""
    kind, port, root, user, password = sys.argv[1:]
    serve = {"webdav": serve_webdav, "ftp": serve_ftp}[kind]
    serve(int(port), root, user, password)


main()
