"""A proxy before an S3 server that spoils chosen requests and remembers all: `proxy.set(Fault("status", times=3))`.

Signatures stay valid, since the Host header goes through unchanged. The proxy is a process of its own:
`python -m services.fault_proxy PORT SERVER_PORT`. Rules go in by PUT /_faults, requests seen come out by GET.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from services.process import HttpService, Process, free_port

CONTROL = "/_faults"  # no bucket can be called that
OF_A_TEST = "bucket-"  # begins the name of a test's bucket
FOREVER = 3600.0
OVERTAKES_S = 0.05  # a reset overtakes what is still on its way
OWN_HEADERS = ("connection", "content-length", "expect", "transfer-encoding")  # of one connection


@dataclass
class Fault:
    """What happens to the requests that fit. The first rule that acts on a request keeps it from those after it."""

    do: str  # status | reset | stall | flip | damage (the request) | delay | lose (done, and the answer is lost)
    match: str = ""  # regular expression, searched in "GET /bucket/key?query bytes=0-99"
    skip: int = 0  # fitting requests that pass first
    times: int | None = None  # how many are spoilt then; None: all
    share: float = 1.0  # of those, the share that is spoilt, drawn with `seed`
    seed: int = 0
    code: int = 503  # status: answered instead of the server,
    error: str = "SlowDown"  # with this code of S3 in the body,
    # and these; otherwise added to the server's
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0  # reset, stall, flip: bytes of the answer's body that pass untouched
    seconds: float = FOREVER  # stall, delay


@dataclass
class Request:
    """One request that reached the proxy."""

    method: str
    path: str
    query: str
    range: str  # as asked: "bytes=0-99"
    status: int | None = None  # answered; None: not (yet)
    fault: str | None = None  # Fault.do


# ---- the handle, in the tests' process ------------------------------------------------------------------------------


class FaultProxy:
    """The proxy before a server at a port of this machine, at a free port."""

    def __init__(self, upstream_port: int, *, log: Path) -> None:
        self.port = free_port()
        self.bucket = ""
        self.endpoint = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            "-m",
            "services.fault_proxy",
            str(self.port),
            str(upstream_port),
        ]
        self.process = Process(command, log=log, cwd=Path(__file__).resolve().parent.parent)
        self.process.wait_for_port(self.port)

    def set(self, *faults: Fault) -> None:
        """These rules instead of the earlier ones; without any, all requests pass. Forgets the requests seen. With
        `bucket`, those of other tests' buckets pass unseen: what an earlier test has left behind may ask for a minute.
        """
        self.control(
            "PUT",
            json.dumps({"faults": [asdict(fault) for fault in faults], "bucket": self.bucket}),
        )

    def requests(self, match: str = "") -> list[Request]:
        """Requests since `set` that a rule with this `match` would fit."""
        seen = [Request(**request) for request in json.loads(self.control("GET"))]
        return [request for request in seen if re.search(match, line_of(request))]

    def control(self, method: str, body: str | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, CONTROL, body)
            return connection.getresponse().read()
        finally:
            connection.close()

    def stop(self) -> None:
        self.process.kill()


def line_of(request: Request) -> str:
    """What a rule's `match` is searched in."""
    query = f"?{request.query}" if request.query else ""
    return f"{request.method} {request.path}{query} {request.range}".rstrip()


# ---- the proxy ------------------------------------------------------------------------------------------------------


class Rule:
    """A fault with its counter and its random numbers."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.fitted = 0
        self.random = random.Random(fault.seed)

    def acts(self, request: Request) -> bool:
        if not re.search(self.fault.match, line_of(request)):
            return False
        turn = self.fitted - self.fault.skip
        self.fitted += 1
        in_turn = turn >= 0 and (self.fault.times is None or turn < self.fault.times)
        return in_turn and self.random.random() < self.fault.share


class Proxy(HttpService):
    def __init__(self, port: int, upstream_port: int) -> None:
        super().__init__(Connection, ("127.0.0.1", port))
        self.upstream_port = upstream_port
        self.lock = threading.Lock()
        self.rules: list[Rule] = []
        self.seen: list[Request] = []
        self.bucket = ""

    def add(self, request: Request) -> Fault | None:
        """What is to happen to a request."""
        if request.path.startswith(f"/{OF_A_TEST}") and not request.path.startswith(
            f"/{self.bucket}"
        ):
            return None
        with self.lock:
            self.seen.append(request)
            fault = next((rule.fault for rule in self.rules if rule.acts(request)), None)
            request.fault = fault.do if fault else None
        return fault

    def command(self, method: str, body: bytes) -> bytes:
        with self.lock:
            if method == "PUT":
                given = json.loads(body)
                self.rules = [Rule(Fault(**fault)) for fault in given["faults"]]
                self.seen = []
                self.bucket = given["bucket"]
            return json.dumps([asdict(request) for request in self.seen]).encode()


class Connection(BaseHTTPRequestHandler):
    """A client's connection, and the one to the server that belongs to it."""

    service: Proxy
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.upstream = http.client.HTTPConnection("127.0.0.1", self.service.upstream_port)

    def finish(self) -> None:
        super().finish()
        self.upstream.close()

    def act(self) -> None:
        try:
            self.serve()
        except (http.client.HTTPException, OSError):  # either side went away: so does the other
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = act

    def serve(self) -> None:
        if self.path == CONTROL:
            self.answer(200, self.service.command(self.command, self.body()), {})
            return
        # of one that uses this as its HTTP proxy
        self.path = re.sub("^http://[^/]*", "", self.path)
        path, _, query = self.path.partition("?")
        request = Request(self.command, path, query, self.headers.get("range", ""))
        fault = self.service.add(request)
        if fault and fault.do == "status":
            if "expect" not in self.headers:
                self.body()
            request.status = fault.code
            xml = f"<Error><Code>{fault.error}</Code><Message>by the fault proxy</Message></Error>"
            more = {"Connection": "close", "x-amz-request-id": "proxy", **fault.headers}
            self.answer(fault.code, b"" if self.command == "HEAD" else xml.encode(), more)
            return
        if fault and fault.do == "delay":
            time.sleep(fault.seconds)
        self.pass_on(request, fault)

    def handle_expect_100(self) -> bool:
        return True  # `body` says that it may come

    def body(self) -> bytes:
        if "expect" in self.headers:
            self.send_response_only(100)
            self.end_headers()
        length = int(self.headers.get("content-length", 0))
        content = self.rfile.read(length)
        if len(content) < length or "transfer-encoding" in self.headers:
            raise ConnectionResetError
        return content

    def answer(
        self, code: int, content: bytes, headers: dict[str, str], fault: Fault | None = None
    ) -> None:
        self.send_response_only(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        at = fault.after if fault else len(content)
        self.wfile.write(content[:at])
        if fault and fault.do == "reset" and at < len(content):
            time.sleep(OVERTAKES_S)
            self.reset()
        if fault and fault.do == "stall" and at < len(content):
            time.sleep(fault.seconds)
        if fault and fault.do == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
        self.wfile.write(content[at:])

    def pass_on(self, request: Request, fault: Fault | None) -> None:
        sent = self.body()
        if fault and fault.do == "damage":
            sent = sent[:-1] + bytes([sent[-1] ^ 0xFF])
        self.upstream.putrequest(
            self.command, self.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in self.headers.items():
            if name.lower() != "expect":
                self.upstream.putheader(name, value)
        with suppress(OSError):  # the server may answer before all has come
            self.upstream.endheaders(sent)
        answer = self.upstream.getresponse()
        content = answer.read()
        request.status = answer.status
        if fault and fault.do == "lose":
            self.reset()
        headers = {
            name: value for name, value in answer.getheaders() if name.lower() not in OWN_HEADERS
        }
        if self.command == "HEAD":
            headers["Content-Length"] = answer.getheader("content-length", "0")
        self.answer(answer.status, content, {**headers, **(fault.headers if fault else {})}, fault)

    def reset(self) -> None:
        """End the connection as a machine does that crashed."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionResetError

    def log_message(self, *_: object) -> None:
        """Tests look at `requests`."""


if __name__ == "__main__":
    Proxy(int(sys.argv[1]), int(sys.argv[2])).server.serve_forever()
