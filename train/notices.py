"""What asks a run to stop, beside signals: EC2's notices, a file in the run folder, a time limit, the end of a block.

EC2's words are in its instance metadata, each a 404 until there is something to say (EC2 user guide):

- spot/instance-action: this spot instance is taken back, two minutes ahead at best.
- events/recommendations/rebalance: it may be soon; sometimes long before, sometimes with the notice itself.
- events/maintenance/scheduled: a stop or retirement for good, announced days ahead: it counts when it is near.
  Reboots are left to the SIGTERM that they begin with: the machine comes back, and a run that is started again on it
  before that would leave again and again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from train.config import InputError, PreemptConfig, Unreachable, check
from train.preempt import StopRequest

ENDPOINTS = {"ipv4": "http://169.254.169.254", "ipv6": "http://[fd00:ec2::254]"}
TIMEOUT_S = 1.0  # of a request: the service is on the machine's own host
TOKEN_S, RENEWS_S = 21600, 300  # lifetime asked for, the longest there is; renewed so long before it is over
BLOCK_LEAD_S = 1800  # instances of a capacity block end so long before it does (EC2 user guide, "Capacity Blocks")
BLOCK_MARGIN_S = 60  # beside the save: for the steps that nodes agree in, and clocks that differ
EVENT_LEAD_S = 120  # before a scheduled stop; what a spot notice gives
FOR_GOOD = ("instance-stop", "instance-retirement")
CLOSE_S = 5.0  # for what is being asked at the end; a thread that S3 holds longer ends with the process

logger = logging.getLogger("train")


class Metadata:
    """EC2's instance metadata service, version 2 only: no request without a token. No proxies, no redirects."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.url = endpoint, urlsplit(endpoint)
        check(
            self.url.scheme == "http" and self.url.hostname is not None,
            f"AWS_EC2_METADATA_SERVICE_ENDPOINT={endpoint} must be a URL as {ENDPOINTS['ipv4']}",
        )
        self.token, self.renew_at_s = "", 0.0

    def get(self, path: str) -> Any:
        """The JSON of a category below /latest/meta-data/; None if there is none. OSError, HTTPException or
        ValueError where the service does not answer as it should.
        """
        if time.monotonic() >= self.renew_at_s:
            self.renew()
        status, body = self.ask_for(path)
        if status == 401:  # the service forgot its tokens
            self.renew()
            status, body = self.ask_for(path)
        if status == 404:
            return None
        if status != 200:
            raise OSError(f"{path} is answered with status {status}")
        return json.loads(body)

    def ask_for(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self.token})

    def renew(self) -> None:
        asked_s = time.monotonic()
        header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        try:
            status, body = self.request("PUT", "/latest/api/token", header)
        except TimeoutError as error:
            hint = "for containers the instance needs HttpPutResponseHopLimit=2"
            raise TimeoutError(f"no token within {TIMEOUT_S:g} s ({hint})") from error
        if status != 200:
            raise OSError(f"a token is refused with status {status}")
        self.token, self.renew_at_s = body.decode("ascii"), asked_s + TOKEN_S - RENEWS_S

    def request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = HTTPConnection(self.url.hostname or "", self.url.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self.url.path.rstrip("/") + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class Notices:
    """Asks `stop` to leave or to save while it is open; local rank 0 of each node has one.

    Each source is asked by a thread of its own, at once and then every `cfg.poll_s`: S3 may take minutes to say whether
    a file is there, a spot notice leaves two. A source that fails is told once and asked again. `save_s`, the seconds
    that the last save for good took, is kept free before an end that is known beforehand. InputError at the beginning
    for a block that has no time left, or an address that is none.
    """

    def __init__(
        self,
        cfg: PreemptConfig,
        stop: StopRequest,
        *,
        stop_file: Callable[[], bool],
        max_run_s: float | None,
        began_s: float,  # of time.monotonic()
    ) -> None:
        self.cfg, self.stop = cfg, stop
        self.stop_file, self.max_run_s, self.began_s = stop_file, max_run_s, began_s
        self.save_s = 0.0
        self.block_end = None if cfg.block_end is None else datetime.fromisoformat(cfg.block_end.replace("Z", "+00:00"))
        check(
            self.block_end is None or now() < self.block_leave_at(self.block_end),
            f"preempt.block_end={cfg.block_end} leaves no time: EC2 ends the instances of a block 30 minutes before, "
            f"and it is {as_text(now())}; give the end of a later block, or null",
        )
        self.sources: dict[str, Callable[[], None]] = {"clock": self.look_at_clock, "stop file": self.look_for_file}
        if watches_metadata(cfg.notices, os.environ):
            self.metadata = Metadata(metadata_endpoint(os.environ))
            self.sources[f"EC2 notices, {self.metadata.endpoint}"] = self.look_at_metadata
        self.rebalance: object = None  # the last one that was told
        self.closed = threading.Event()
        self.threads = [
            threading.Thread(target=self.watch, args=(name, look), name=f"notices: {name}", daemon=True)
            for name, look in self.sources.items()
        ]

    def __enter__(self) -> Notices:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        for thread in self.threads:
            thread.join(CLOSE_S)

    def watch(self, name: str, look: Callable[[], None]) -> None:
        fails = False
        while self.stop.reason is None:
            try:
                look()
                fails = False
            except (OSError, HTTPException, ValueError, InputError, Unreachable) as error:
                if not fails:
                    logger.warning("%s: %s; asked again every %g s", name, error, self.cfg.poll_s)
                fails = True
            if self.closed.wait(self.cfg.poll_s):
                return

    def look_at_clock(self) -> None:
        if self.max_run_s is not None and time.monotonic() - self.began_s >= self.max_run_s - self.save_s:
            self.stop.ask(f"max_run_s={self.max_run_s:g} is over")
        if self.block_end is not None and now() >= self.block_leave_at(self.block_end):
            self.stop.ask(f"the capacity block ends at {as_text(self.block_end)}, its instances 30 minutes before")

    def block_leave_at(self, end: datetime) -> datetime:
        return end - timedelta(seconds=BLOCK_LEAD_S + BLOCK_MARGIN_S + self.save_s)

    def look_for_file(self) -> None:
        if self.stop_file():
            self.stop.ask("the file STOP in the run folder")

    def look_at_metadata(self) -> None:
        if notice := self.metadata.get("spot/instance-action"):
            self.stop.ask(f"EC2 spot notice: {field(notice, 'action')} at {field(notice, 'time')}")
        if self.cfg.rebalance != "ignore":
            self.look_at_rebalance(self.metadata.get("events/recommendations/rebalance"))
        events = self.metadata.get("events/maintenance/scheduled")
        for event in events if isinstance(events, list) else ():
            self.look_at_event(event)

    def look_at_rebalance(self, notice: Any) -> None:
        if notice is None or notice == self.rebalance:
            return
        asked = f"EC2 rebalance recommendation of {field(notice, 'noticeTime')}"
        self.rebalance = notice
        if self.cfg.rebalance == "leave":
            self.stop.ask(asked)
        else:
            self.stop.ask_save(asked)

    def look_at_event(self, event: Any) -> None:
        """Dates are as "21 Jan 2019 09:00:43 GMT"."""
        if field(event, "Code") not in FOR_GOOD or field(event, "State") != "active":
            return
        begins = parsedate_to_datetime(field(event, "NotBefore"))
        if now() >= begins - timedelta(seconds=EVENT_LEAD_S + self.save_s):
            self.stop.ask(f"EC2 scheduled event: {field(event, 'Code')} at {as_text(begins)}")


def watches_metadata(mode: str, environ: Mapping[str, str]) -> bool:
    """Whether EC2's metadata is asked, by `preempt.notices` and the AWS tools' own variables."""
    if mode != "auto":
        return mode == "on"
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    return bool(environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")) or is_ec2()


def is_ec2(asset_tag: Path = Path("/sys/devices/virtual/dmi/id/board_asset_tag")) -> bool:
    """Nitro, as Trainium and all newer types, says the instance's id (EC2 user guide, "Detect ... an EC2 instance")."""
    return asset_tag.is_file() and asset_tag.read_text().startswith("i-")


def metadata_endpoint(environ: Mapping[str, str]) -> str:
    """As botocore finds it in the environment."""
    mode = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower()
    return environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or ENDPOINTS.get(mode, ENDPOINTS["ipv4"])


def field(notice: Any, name: str) -> str:
    """A word of a notice. ValueError if it has none."""
    if not isinstance(notice, dict) or not isinstance(notice.get(name), str):
        raise ValueError(f"{name} is missing in {notice}")
    return notice[name]


def now() -> datetime:
    """The wall clock: ends of blocks and events are dates."""
    return datetime.now(timezone.utc)


def as_text(at: datetime) -> str:
    return f"{at.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
