"""Inside a guest: run the commands that arrive on a port, one a connection.

A connection sends one line of JSON, ``{"argv": [...], "stdin": bool}``. The command's standard
input and outputs are the connection itself; after its end a zero byte and ``rc=STATUS`` follow.
Only the lab's own network, which has no way out, can reach the port.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading


def read_line(connection: socket.socket) -> bytes:
    """Read up to the line's end and not a byte more: what follows is the command's input."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def serve(connection: socket.socket) -> None:
    """Run one command and report how it ended."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        try:
            request = json.loads(read_line(connection))
            stdin = connection.fileno() if request["stdin"] else subprocess.DEVNULL
            output = connection.fileno()
            command = subprocess.Popen(request["argv"], stdin=stdin, stdout=output, stderr=output)
            connection.sendall(b"\0rc=%d\n" % command.wait())
        except (OSError, ValueError) as error:
            connection.sendall(b"%r\n\0rc=125\n" % error)


def main() -> None:
    """Listen for ever on the port given."""
    listener = socket.create_server(("", int(sys.argv[1])), backlog=64)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


main()
