"""Checks of a bucket: whether it can be reached, its region, and the difference between this clock and S3's.

They need one HEAD request, and write nothing. They were run against a local server, not against S3 itself. The module
imports boto3: import it late.
"""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from train.config import S3Config
from train.doctor.finding import Finding, bad, ok, warn
from train.storage.aws_errors import NO_ANSWER, code_of, one_line, problem_and_cure
from train.storage.s3 import open_session

TIMEOUT_S = 5
REJECTED_CLOCK_S = 15 * 60  # from here on S3 answers RequestTimeTooSkewed
HEAD = {400: "ExpiredToken", 403: "AccessDenied", 404: "NoSuchBucket"}  # what a status most likely stands for
WANTED_CLOCK_S = 5.0  # the header has whole seconds, and the request takes some time


def bucket(location: str, *, now_s: float) -> dict[str, Finding]:
    """Findings about `s3://bucket/...`. boto3 decides where the request goes (AWS_ENDPOINT_URL included)."""
    name = location.removeprefix("s3://").split("/")[0]
    session = open_session(S3Config())
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"total_max_attempts": 2})
    try:
        metadata = session.client("s3", config=config).head_bucket(Bucket=name)["ResponseMetadata"]
    except ClientError as error:
        metadata = error.response["ResponseMetadata"]
    except BotoCoreError as error:
        cures = dict.fromkeys(
            NO_ANSWER, "add to the subnet an S3 gateway endpoint or a NAT route, allow port 443 out; check HTTPS_PROXY"
        )
        problem, cure = problem_and_cure(code_of(error), one_line(error), service="S3", cures=cures)
        return {"S3": bad(f"{name}: {problem}", cure=cure or "check the name; aws sts get-caller-identity")}
    status, headers = metadata["HTTPStatusCode"], metadata.get("HTTPHeaders", {})
    there, here = headers.get("x-amz-bucket-region", ""), session.region_name
    finding = region(name, there, here) if status == 200 else rejection(name, status, there, here)
    return {"S3": finding, **clock(headers, now_s)}


def region(name: str, bucket_region: str, own_region: str | None) -> Finding:
    """Whether a bucket that answers is in the region of this session."""
    if not bucket_region:
        return ok(f"{name} answers; it does not name its region")
    if not own_region:
        text = f"{name} answers from {bucket_region}; this session has no region (boto3 does not read AWS_REGION)"
        return warn(text, cure=f"export AWS_DEFAULT_REGION={bucket_region}, if this machine is there")
    if own_region != bucket_region:
        text = f"{name} is in {bucket_region}, this session in {own_region}: traffic between regions is slow and billed"
        cure = f"train in {bucket_region} or copy the bucket; if this machine is there: "
        return warn(text, cure=cure + f"export AWS_DEFAULT_REGION={bucket_region}")
    return ok(f"{name} answers, in {bucket_region} like this session")


def rejection(name: str, status: int, bucket_region: str, own_region: str | None) -> Finding:
    """The finding for a rejected request, by its status: the answer to a HEAD request has no body."""
    if status in (301, 307):
        text = f"{name} is in another region ({bucket_region or 'unknown'}; this session: {own_region or 'none'})"
        return bad(text, cure=f"export AWS_DEFAULT_REGION={bucket_region or 'the region of the bucket'}")
    cures = {
        "AccessDenied": f"allow s3:ListBucket on arn:aws:s3:::{name} and s3:GetObject, s3:PutObject on its objects"
    }
    problem, cure = problem_and_cure(HEAD.get(status, ""), service="S3", cures=cures)
    return bad(
        f"{name}: S3 answers {status}{problem and f', most likely {problem}'}",
        cure=cure or "try again; if it stays, see the AWS health page",
    )


def clock(headers: Mapping[str, str], now_s: float) -> dict[str, Finding]:
    """Difference between this machine's clock and the server's; nothing if the server sends no date."""
    if "date" not in headers:
        return {}
    off_s = now_s - parsedate_to_datetime(headers["date"]).timestamp()
    text, cure = f"{abs(off_s):.0f} s {'ahead' if off_s > 0 else 'behind'}", "sudo chronyc makestep"
    finding = ok("agree")
    if abs(off_s) >= REJECTED_CLOCK_S:
        finding = bad(f"{text}: S3 rejects requests from 15 minutes on", cure=cure)
    elif abs(off_s) > WANTED_CLOCK_S + TIMEOUT_S:
        finding = warn(text, cure=cure)
    return {"clock and S3": finding}
