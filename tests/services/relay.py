"""A relay: what listens at 127.0.0.1 becomes reachable at an address that other machines of a test have a way to."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Relay(socketserver.ThreadingTCPServer):
    target: tuple[str, int]
    daemon_threads = True


class Forward(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Relay)
        with socket.create_connection(self.server.target) as server:
            back = threading.Thread(target=pass_on, args=(server, self.request), daemon=True)
            back.start()
            pass_on(self.request, server)
            back.join()


@contextmanager
def relaying(listener: socket.socket, port: int) -> Iterator[str]:
    """Pass on what comes to `listener` to 127.0.0.1:`port`. Returns the address of `listener` as host:port."""
    host, own_port = listener.getsockname()
    relay = Relay((host, 0), Forward, bind_and_activate=False)
    relay.socket.close()
    relay.socket = listener
    relay.target = ("127.0.0.1", port)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    try:
        yield f"{host}:{own_port}"
    finally:
        relay.shutdown()
        relay.server_close()


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # one side was killed
        while piece := source.recv(2**16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
