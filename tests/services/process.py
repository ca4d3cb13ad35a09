"""Programs that a test starts and that never outlive it, services of its own process, and what both need."""

from __future__ import annotations

import os
import random
import socket
import socketserver
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bound="HttpService")
START_S = 240
# The program replaces the shell, so its process id is ours to wait for. A watcher beside it ends it when the pipe
# to us brings a line or closes, which it also does when the test run itself is killed.
WATCHED = 'exec 3<&0; (read -r _ <&3; kill -KILL $$) 2>/dev/null & exec "$@" 3<&- </dev/null'


class Process:
    """A program that ends with `kill`, or with this interpreter in whatever way that ends."""

    def __init__(self, command: list[str], *, log: Path, cwd: Path | None = None) -> None:
        self.name = command[0]
        self.log = log
        with log.open("ab") as output:
            self.shell = subprocess.Popen(
                ["sh", "-c", WATCHED, "sh", *command],
                stdin=subprocess.PIPE,
                bufsize=0,
                cwd=cwd,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the tests, which then end this in order
            )

    def running(self) -> bool:
        """Leaves a program that has ended to `kill`: until then nobody else gets its process id."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.shell.returncode is None and os.waitid(os.P_PID, self.shell.pid, ended) is None

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        pipe = self.shell.stdin
        assert pipe is not None
        if not pipe.closed:
            # closing is not enough while a forked child of ours holds the pipe too
            pipe.write(b"\n")
            pipe.close()
        self.shell.wait()

    def wait_for_port(self, port: int) -> None:
        """Until the program answers there. RuntimeError with the end of its log if it does not."""
        deadline = time.monotonic() + START_S
        while self.running() and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        self.kill()
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{self.name} does not listen on port {port}:\n{end}")


def set_aws(monkeypatch: Any, key: str, secret: str, **more: str) -> None:
    """These credentials, and nothing else that AWS's libraries would find here; of child processes too."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    nowhere = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    keys = {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    no_proxy = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    for name, value in {**nowhere, **keys, **no_proxy, **more}.items():
        monkeypatch.setenv(name, value)


def free_port() -> int:
    """Below the ports that outgoing connections take, so that it stays free while a server is down."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Threads(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        self.close_request(request)  # at once, as a handler may have asked for that


class HttpService:
    """A service at a free port of this machine, or at an address of its own. Its handlers know it as `service`."""

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self.server = Threads(
            address, type("Bound", (handler,), {"service": self, "disable_nagle_algorithm": True})
        )
        self.endpoint = f"http://{address[0]}:{self.server.server_address[1]}"
        self.ends = threading.Event()

    def __enter__(self: T) -> T:
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        self.server.shutdown()
        self.server.server_close()
