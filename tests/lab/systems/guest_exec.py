"""Outside: run a command in a guest through its agent, as if it ran here.

``guest_exec.py HOST PORT WAIT_S plain|attach ARGV...``: prints what the command prints, exits with
its status. ``attach`` also passes this program's standard input on. WAIT_S is how long to wait for
the agent to answer at all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

TRAILER_BYTES_MAX = 16  # a zero byte, rc=, three digits, a line's end, and some room


def ask(host: str, port: int, wait_s: float, request: bytes) -> socket.socket:
    """Connect and send the request, waiting for a guest that still boots.

    What a dead guest left in this host's tables can fail the sending after the connecting. Nothing
    of the request is on its way then, as one that is as short as this is sent whole or not at all.
    """
    give_up = time.monotonic() + wait_s
    while True:
        connection = None
        try:
            connection = socket.create_connection((host, port), timeout=1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request)
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() > give_up:
                sys.exit(f"no agent at {host}: {error}")
            time.sleep(0.05)
        else:
            connection.settimeout(None)
            return connection


def pass_input(connection: socket.socket) -> None:
    """Copy standard input to the command until it ends."""
    while data := os.read(0, 65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def copy_output(connection: socket.socket) -> bytes:
    """Copy what the command prints at once, holding back only what may be the trailer."""
    held = b""
    while data := connection.recv(65536):
        held += data
        at = held.rfind(b"\0")
        keep = len(held) - at if at >= 0 and len(held) - at <= TRAILER_BYTES_MAX else 0
        printed, held = held[: len(held) - keep], held[len(held) - keep :]
        sys.stdout.buffer.write(printed)
        sys.stdout.buffer.flush()
    return held


def main() -> None:
    """Run the command; the exit status is the command's, or 124 if the guest died under it."""
    host, port, wait_s, mode, *argv = sys.argv[1:]
    request = json.dumps({"argv": argv, "stdin": mode == "attach"}).encode() + b"\n"
    connection = ask(host, int(port), float(wait_s), request)
    if mode == "attach":
        threading.Thread(target=pass_input, args=(connection,), daemon=True).start()
    try:
        held = copy_output(connection)
    except ConnectionError:
        held = b""
    status = held.partition(b"\0rc=")[2].strip()
    sys.stdout.flush()
    os._exit(int(status) if status else 124)  # the thread may still wait for input


main()
