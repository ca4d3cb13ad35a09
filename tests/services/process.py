"""Programs that a test starts and that never outlive it, and ports for them."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from pathlib import Path

START_S = 240
# The program replaces the shell, so its process id is ours to wait for. A watcher beside it ends it when the pipe
# to us brings a line or closes, which it also does when the test run itself is killed.
WATCHED = 'exec 3<&0; (read -r _ <&3; kill -KILL $$) 2>/dev/null & exec "$@" 3<&- </dev/null'


class Process:
    """A program that ends with `kill`, or with this interpreter in whatever way that ends."""

    def __init__(self, command: list[str], *, log: Path, cwd: Path | None = None) -> None:
        self.name, self.log = command[0], log
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
            pipe.write(b"\n")  # closing is not enough while a forked child of ours holds the pipe too
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


def is_alive(pid: int) -> bool:
    """Also False for a zombie, which waits for its parent only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
