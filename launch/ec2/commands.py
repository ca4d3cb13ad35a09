"""The command `launch clean`: it ends a run's machines on EC2. boto3 is imported only when the command needs it."""

from __future__ import annotations

import argparse

from launch.record import CANCEL, Record
from train.config import S3Config
from train.machine.console import say
from train.run.command import DONE, FAILED, Parser


def clean_flags(parser: Parser) -> None:
    run = "run_dir of a launched run: s3://bucket/prefix; its record may be gone"
    yes = "end the machines; without --yes, only list them"
    more = "further regions to search"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument("--yes", action="store_true", help=yes)
    parser.add_argument("--regions", metavar="A,B", default="", help=more)


def clean(options: argparse.Namespace, s3: S3Config) -> int:
    """End a run's machines on EC2 until none can appear. Prints those that remain, and returns FAILED if any do."""
    from launch.ec2.api import Api
    from launch.ec2.instances import end_all, find, regions_of

    record = Record(options.run, s3)
    api = Api(s3.region)
    more = [*options.regions.split(","), api.default_region]
    regions = api.regions(regions_of(record, more))
    where = ", ".join(regions)
    if not options.yes:
        left = [each for each in find(api, record, regions) if each.is_left]
        say(*(f"found {each}" for each in left))
        say(
            f"EC2 lists {len(left) or 'no'} machines of {record.run_dir} in {where}; --yes ends them"
        )
        return FAILED if left else DONE
    history = record.history()
    if not history.has_end:
        record.ask(CANCEL)  # first: a running launch then asks for no more machines
    left = end_all(api, record, regions)
    if left:
        say(*(f"still there: {each}" for each in left))
        return FAILED
    if history.submission is None:
        say(f"{record.location} is gone: machines requested in the last minutes may still appear")
    say(f"no machine of {record.run_dir} is left in {where}")
    return DONE
