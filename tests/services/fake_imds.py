"""EC2's instance metadata service, version 2 only, as far as its user guide describes it: tokens and categories.

with FakeIMDS() as imds:
    imds.say(SPOT, {"action": "terminate", "time": "2026-11-20T08:22:00Z"})
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from services.process import HttpService

TOKEN = "/latest/api/token"
SPOT = "/latest/meta-data/spot/instance-action"
LONGEST_S = 21600  # that a token may live


@dataclass
class Request:
    method: str
    path: str
    token: str | None
    status: int | None = None  # answered; None: it hangs


class FakeIMDS(HttpService):
    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(Handler, address)
        self.requests: list[Request] = []  # in the order they came
        self.said: dict[str, str] = {}  # body of each path that is no 404
        self.status: int | None = None  # answered instead of everything else
        self.speaks_http = True
        self.tokens: dict[str, float] = {}  # until when each is good, of time.monotonic()
        self.answering = threading.Event()  # requests are answered once it is set
        self.answering.set()

    def say(self, path: str, content: Any) -> None:
        self.said[path] = content if isinstance(content, str) else json.dumps(content)

    def expire_tokens(self) -> None:
        self.tokens.clear()

    def seen(self, path: str = "", method: str = "GET") -> list[Request]:
        return [
            request
            for request in list(self.requests)
            if request.method == method and path in request.path
        ]


class Handler(BaseHTTPRequestHandler):
    service: FakeIMDS

    def do_PUT(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != TOKEN:
            self.answer(404)
        elif not ttl.isdecimal() or not 1 <= int(ttl) <= LONGEST_S:
            self.answer(400)
        elif "X-Forwarded-For" in self.headers:  # through a proxy
            self.answer(403)
        else:
            token = uuid.uuid4().hex
            self.service.tokens[token] = time.monotonic() + int(ttl)
            self.answer(200, token)

    def do_GET(self) -> None:
        token = self.headers.get("X-aws-ec2-metadata-token")
        if token is None or time.monotonic() >= self.service.tokens.get(token, 0.0):
            self.answer(401)
        elif self.path in self.service.said:
            self.answer(200, self.service.said[self.path])
        else:
            self.answer(404)

    def answer(self, status: int, body: str = "") -> None:
        request = Request(self.command, self.path, self.headers.get("X-aws-ec2-metadata-token"))
        self.service.requests.append(request)
        self.service.answering.wait()
        request.status = self.service.status or status
        if not self.service.speaks_http:
            self.wfile.write(b"SSH-2.0-OpenSSH\r\n")
            return
        content = (body if request.status == status else "").encode()
        try:
            self.send_response(request.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:  # the client has given up by now
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Tests ask `seen`."""
