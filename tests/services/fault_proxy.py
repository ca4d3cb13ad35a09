"""A proxy before an S3 server that spoils chosen requests and remembers all: `proxy.set(Fault("status", times=3))`.

Signatures stay valid, since the Host header goes through unchanged. The proxy is a process of its own:
`python -m services.fault_proxy PORT SERVER_PORT`. Rules go in by PUT /_faults, requests seen come out by GET.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import random
import re
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.process import Process, free_port

CONTROL = "/_faults"  # no bucket can be called that
FOREVER = 3600.0
READ_BYTES = 256 * 2**10
DROP_S = 0.05  # between what a slowed answer sends


@dataclass
class Fault:
    """What happens to the requests that fit. The first rule that acts on a request keeps it from those after it."""

    do: str  # status | reset | stall | flip | damage (the request) | rate | delay | lose (done, and the answer is lost)
    match: str = ""  # regular expression, searched in "GET /bucket/key?query bytes=0-99"
    skip: int = 0  # fitting requests that pass first
    times: int | None = None  # how many are spoilt then; None: all
    share: float = 1.0  # of those, the share that is spoilt, drawn with `seed`
    seed: int = 0
    code: int = 503  # status: answered instead of the server,
    error: str = "SlowDown"  # with this code of S3 in the body,
    message: str = "by the fault proxy"  # this text
    headers: dict[str, str] = field(default_factory=dict)  # and these; otherwise added to the server's
    after: int = 0  # reset, stall, flip: bytes of the answer's body that pass untouched
    seconds: float = FOREVER  # stall, delay
    bytes_per_s: float = 2**20  # rate


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
        self.endpoint = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "services.fault_proxy", str(self.port), str(upstream_port)]
        self.process = Process(command, log=log, cwd=Path(__file__).resolve().parent.parent)
        self.process.wait_for_port(self.port)

    def set(self, *faults: Fault) -> None:
        """These rules instead of the earlier ones; without any, all requests pass. Forgets the requests seen."""
        self.control("PUT", json.dumps([asdict(fault) for fault in faults]))

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
        self.fault, self.fitted, self.random = fault, 0, random.Random(fault.seed)

    def acts(self, request: Request) -> bool:
        if not re.search(self.fault.match, line_of(request)):
            return False
        turn = self.fitted - self.fault.skip
        self.fitted += 1
        in_turn = turn >= 0 and (self.fault.times is None or turn < self.fault.times)
        return in_turn and self.random.random() < self.fault.share


@dataclass
class Head:
    """First line and headers of a request or an answer, as they came and taken apart."""

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    async def body(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """Pieces of the body as they are on the wire, frames of a chunked one included."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            size = -1
            while size != 0:
                line = await reader.readuntil(b"\r\n")
                size = int(line.partition(b";")[0], 16)
                yield line + await reader.readexactly(size + 2)
            return
        left = int(self.headers.get("content-length", 0))
        while left:
            piece = await reader.read(min(left, READ_BYTES))
            if not piece:
                raise ConnectionResetError
            left -= len(piece)
            yield piece


async def read_head(reader: asyncio.StreamReader) -> Head:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(raw, first.split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in pairs})


class Proxy:
    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.rules: list[Rule] = []
        self.seen: list[Request] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self, reader, writer)
        try:
            while await connection.serve_one():
                pass
        except (asyncio.IncompleteReadError, OSError):  # either side went away: so does the other
            pass
        finally:
            connection.close()

    def command(self, method: str, body: bytes) -> bytes:
        if method == "PUT":
            self.rules = [Rule(Fault(**fault)) for fault in json.loads(body)]
            self.seen = []
        return json.dumps([asdict(request) for request in self.seen]).encode()


class Connection:
    """A client's connection, and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy, self.reader, self.writer = proxy, reader, writer
        self.upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        self.writer.close()
        if self.upstream:
            self.upstream[1].close()

    async def serve_one(self) -> bool:
        """Serves one request; True if there may be another."""
        head = await read_head(self.reader)
        method, target, _ = head.first
        if target == CONTROL:
            body = b"".join([piece async for piece in head.body(self.reader)])
            await self.answer(200, self.proxy.command(method, body))
            return False
        path, _, query = target.partition("?")
        request = Request(method, path, query, head.headers.get("range", ""))
        self.proxy.seen.append(request)
        fault = next((rule.fault for rule in self.proxy.rules if rule.acts(request)), None)
        request.fault = fault.do if fault else None
        if fault and fault.do == "status":
            if "expect" not in head.headers:
                async for _ in head.body(self.reader):
                    pass
            request.status = fault.code
            xml = f"<Error><Code>{fault.error}</Code><Message>{fault.message}</Message></Error>"
            await self.answer(fault.code, b"" if method == "HEAD" else xml.encode(), fault.headers)
            return False
        if fault and fault.do == "delay":
            await asyncio.sleep(fault.seconds)
        return await self.pass_on(head, request, fault)

    async def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        lines = {"Content-Length": len(body), "Connection": "close", "x-amz-request-id": "proxy", **(headers or {})}
        head = f"HTTP/1.1 {code} -\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{head}\r\n".encode() + body)
        await self.writer.drain()

    async def pass_on(self, head: Head, request: Request, fault: Fault | None) -> bool:
        if self.upstream is None:
            self.upstream = await asyncio.open_connection("127.0.0.1", self.proxy.upstream_port, limit=2**20)
        reader, writer = self.upstream
        sent: list[bytes] | None = [] if request.method == "POST" and "uploadId=" in request.query else None
        damages = fault is not None and fault.do == "damage"
        sending, closes = asyncio.create_task(self.send(head, writer, sent, damages=damages)), False
        try:
            answer = await read_head(reader)
            while answer.first[1] == "100":  # the server wants the body
                self.writer.write(answer.raw)
                answer = await read_head(reader)
            request.status = int(answer.first[1])
            if fault and fault.do == "lose":
                self.reset()
            if sent is not None and request.status == 200:
                body = b"".join([piece async for piece in answer.body(reader)])
                await sending
                self.writer.write(with_etag(answer, body, b"".join(sent)))
            else:
                closes = not sending.done()  # it did not want the body; a client that is not told would ask again here
                raw = closing(answer.raw) if closes else answer.raw
                self.writer.write(with_headers(raw, fault.headers if fault else {}))
                if request.method != "HEAD" and request.status not in (204, 304):
                    await self.send_back(answer, reader, fault)
            await self.writer.drain()
            return not closes and not head.closes and not answer.closes
        finally:
            sending.cancel()

    async def send(self, head: Head, writer: asyncio.StreamWriter, copy: list[bytes] | None, *, damages: bool) -> None:
        writer.write(head.raw)
        async for piece in head.body(self.reader):
            if damages:
                piece, damages = piece[:-1] + bytes([piece[-1] ^ 0xFF]), False
            if copy is not None:
                copy.append(piece)
            writer.write(piece)
            await writer.drain()
        await writer.drain()

    async def send_back(self, answer: Head, reader: asyncio.StreamReader, fault: Fault | None) -> None:
        """The answer's body, spoilt."""
        passed = 0
        async for piece in answer.body(reader):
            if fault and fault.do == "rate":
                await self.drip(piece, fault.bytes_per_s)
                continue
            at = fault.after - passed if fault else 0  # where in this piece the fault is
            passed += len(piece)
            if fault and 0 <= at < len(piece):
                if fault.do in ("reset", "stall"):
                    self.writer.write(piece[:at])
                    await self.writer.drain()
                    if fault.do == "reset":
                        await asyncio.sleep(0.05)  # a reset overtakes what is still on its way
                        self.reset()
                    await asyncio.sleep(fault.seconds)
                    piece = piece[at:]
                elif fault.do == "flip":
                    piece = piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :]
            self.writer.write(piece)
            await self.writer.drain()

    async def drip(self, piece: bytes, bytes_per_s: float) -> None:
        began, drop = time.monotonic(), max(1, int(bytes_per_s * DROP_S))
        for start in range(0, len(piece), drop):
            due = began + min(start + drop, len(piece)) / bytes_per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.writer.write(piece[start : start + drop])
            await self.writer.drain()

    def reset(self) -> None:
        """End the connection as a machine does that crashed."""
        client: socket.socket = self.writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        raise ConnectionResetError


def with_headers(head: bytes, headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return head[:-2] + lines.encode() + b"\r\n"


def closing(head: bytes) -> bytes:
    """An answer's head that says that its connection ends with it."""
    return with_headers(re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head), {"Connection": "close"})


def with_etag(answer: Head, body: bytes, asked: bytes) -> bytes:
    """An answer to CompleteMultipartUpload with the ETag that S3 returns and Ceph 16 leaves empty.

    That of a multipart object is the MD5 of its parts' MD5s, and their number. The AWS CRT client insists on it.
    """
    parts = re.findall(rb"[0-9a-f]{32}", asked)
    digest = hashlib.md5(bytes.fromhex(b"".join(parts).decode())).hexdigest()
    tag = f"<ETag>&quot;{digest}-{len(parts)}&quot;</ETag>".encode()
    fixed = body.replace(b"<ETag></ETag>", tag)
    return re.sub(rb"(?i)(content-length: *)\d+", rb"\g<1>%d" % len(fixed), answer.raw) + fixed


async def main(port: int, upstream_port: int) -> None:
    server = await asyncio.start_server(Proxy(upstream_port).serve, "127.0.0.1", port, limit=2**20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
