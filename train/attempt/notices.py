"""Requests to stop other than signals: EC2's notices, a file in the run folder, a time limit, the end of a block.

EC2's notices are in its instance metadata. Each is answered with 404 until there is one (EC2 user guide):

- spot/instance-action: this spot instance will be taken back, announced two minutes ahead at best.
- events/recommendations/rebalance: it may be taken back soon; sent long before the notice, or together with it.
- events/maintenance/scheduled: a stop or retirement for good, announced days ahead; obeyed shortly before it begins.
  Reboots are left to the SIGTERM that they begin with: the machine comes back, and a run that is restarted on it
  before the reboot would leave again and again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

from train.attempt.preempt import StopRequest
from train.config import InputError, TrainConfig, Unreachable, check
from train.host.metadata import Metadata, metadata_endpoint

BLOCK_LEAD_S = 1800  # EC2 ends the instances of a capacity block this long before the block ends (EC2 user guide)
BLOCK_MARGIN_S = 60  # beside the save: for the steps in which the ranks agree, and for clocks that differ
EVENT_LEAD_S = 120  # before a scheduled stop; as long as after a spot notice
FOR_GOOD = ("instance-stop", "instance-retirement")
CLOSE_S = 5.0  # for the last request; a thread that S3 holds longer ends with the process

logger = logging.getLogger("train")


class Notices:
    """Threads that ask `stop` to leave or to save, a context of local rank 0 of each machine.

    Each source has a thread of its own, which asks at once and then every `cfg.poll_s`: S3 may take minutes to answer
    whether a file exists, and a spot notice leaves two. A source that fails is reported once and asked again. Before an
    end that is known, `stop.save_s` is kept free, which the last save took. Raises InputError for a capacity block that
    has no time left and for an invalid address.
    """

    def __init__(self, cfg: TrainConfig, stop: StopRequest, has_stop_file: Callable[[], bool], began_s: float) -> None:
        """`began_s` is of time.monotonic()."""
        self.cfg, self.max_run_s = cfg.preempt, cfg.max_run_s
        self.stop, self.has_stop_file, self.began_s = stop, has_stop_file, began_s
        end = self.cfg.block_end
        self.block_end = None if end is None else datetime.fromisoformat(end.replace("Z", "+00:00"))
        check(
            self.block_end is None or now() < self.block_leave_at(self.block_end),
            f"preempt.block_end={end} leaves no time: EC2 ends the instances of a block 30 minutes before, "
            f"and it is {as_text(now())}; give the end of a later block, or null",
        )
        self.sources: dict[str, Callable[[], None]] = {"clock": self.look_at_clock, "stop file": self.look_for_file}
        if watches_metadata(self.cfg.notices, os.environ):
            self.metadata = Metadata(metadata_endpoint(os.environ))
            self.sources[f"EC2 notices, {self.metadata.endpoint}"] = self.look_at_metadata
        self.rebalance: object = None  # the last recommendation that was followed
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
        if self.max_run_s is not None and time.monotonic() - self.began_s >= self.max_run_s - self.stop.save_s:
            self.stop.ask(f"max_run_s={self.max_run_s:g} is over", kind="max_run_s")
        if self.block_end is not None and now() >= self.block_leave_at(self.block_end):
            ends = f"the capacity block ends at {as_text(self.block_end)}, its instances 30 minutes before"
            self.stop.ask(ends, kind="capacity_block")

    def block_leave_at(self, end: datetime) -> datetime:
        return end - timedelta(seconds=BLOCK_LEAD_S + BLOCK_MARGIN_S + self.stop.save_s)

    def look_for_file(self) -> None:
        if self.has_stop_file():
            self.stop.ask("the file STOP in the run folder", kind="stop_file")

    def look_at_metadata(self) -> None:
        if notice := self.metadata.get("spot/instance-action"):
            asked = f"EC2 spot notice: {field(notice, 'action')} at {field(notice, 'time')}"
            self.stop.ask(asked, kind="spot_notice")
        if self.cfg.rebalance != "ignore":
            self.look_at_rebalance(self.metadata.get("events/recommendations/rebalance"))
        events = self.metadata.get("events/maintenance/scheduled")
        for event in events if isinstance(events, list) else ():
            if field(event, "Code") not in FOR_GOOD or field(event, "State") != "active":
                continue
            begins = parsedate_to_datetime(field(event, "NotBefore"))  # as "21 Jan 2019 09:00:43 GMT"
            if now() >= begins - timedelta(seconds=EVENT_LEAD_S + self.stop.save_s):
                asked = f"EC2 scheduled event: {field(event, 'Code')} at {as_text(begins)}"
                self.stop.ask(asked, kind="scheduled_event")

    def look_at_rebalance(self, notice: Any) -> None:
        if notice is None or notice == self.rebalance:
            return
        asked = f"EC2 rebalance recommendation of {field(notice, 'noticeTime')}"
        self.rebalance = notice
        if self.cfg.rebalance == "leave":
            self.stop.ask(asked, kind="rebalance")
        else:
            self.stop.ask_save(asked)


def watches_metadata(mode: str, environ: Mapping[str, str]) -> bool:
    """Whether to ask EC2's metadata, by `preempt.notices` and the variables of the AWS tools."""
    if mode != "auto":
        return mode == "on"
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    return bool(environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")) or is_ec2()


def is_ec2(asset_tag: Path = Path("/sys/devices/virtual/dmi/id/board_asset_tag")) -> bool:
    """Whether this is an EC2 instance. On Nitro, as on Trainium and all newer types, the asset tag is the instance's id
    (EC2 user guide, "Detect whether a host is an EC2 instance").
    """
    return asset_tag.is_file() and asset_tag.read_text().startswith("i-")


def field(notice: Any, name: str) -> str:
    """A field of a notice. Raises ValueError if it is missing or no text."""
    if not isinstance(notice, dict) or not isinstance(notice.get(name), str):
        raise ValueError(f"{name} is missing in {notice}")
    return notice[name]


def now() -> datetime:
    """The time by the wall clock, since ends of blocks and events are dates."""
    return datetime.now(UTC)


def as_text(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
