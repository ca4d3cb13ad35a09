"""Checks of a bucket with one HEAD request. Not run against S3 itself. This module imports boto3, which is slow."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from train.config import S3Config
from train.system.aws_errors import NO_ANSWER, code_of, one_line, problem_and_cure
from train.system.s3 import open_session
from train.tools.doctor.probe import Finding, bad, ok, warn

TIMEOUT_S = 5
REJECTED_CLOCK_S = 15 * 60  # clock difference from which S3 answers RequestTimeTooSkewed
NO_ROUTE = "add an S3 gateway endpoint or a NAT route to the subnet, allow outbound port 443, check HTTPS_PROXY"
HEAD = {400: "ExpiredToken", 403: "AccessDenied", 404: "NoSuchBucket"}  # most likely error code of an HTTP status
WANTED_CLOCK_S = 5.0  # clock difference without a warning: the header has whole seconds, and a request takes time


def bucket(location: str, *, now_s: float) -> dict[str, Finding]:
    """Return findings about `s3://bucket/...`. boto3 chooses the endpoint, and reads AWS_ENDPOINT_URL."""
    name = location.removeprefix("s3://").split("/")[0]
    session = open_session(S3Config())
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"total_max_attempts": 2})
    try:
        answer = session.client("s3", config=config).head_bucket(Bucket=name)
    except ClientError as error:
        answer = error.response
    except BotoCoreError as error:
        cures = dict.fromkeys(NO_ANSWER, NO_ROUTE)
        problem, cure = problem_and_cure(code_of(error), one_line(error), service="S3", cures=cures)
        return {"S3": bad(f"{name}: {problem}", cure=cure or "check the name; aws sts get-caller-identity")}
    status, headers = answer["ResponseMetadata"]["HTTPStatusCode"], answer["ResponseMetadata"].get("HTTPHeaders", {})
    there, here = headers.get("x-amz-bucket-region", ""), session.region_name
    return {"S3": answered(name, status, there, here), **clock(headers, now_s)}


def answered(name: str, status: int, there: str, here: str | None) -> Finding:
    """Return the finding on a bucket that answered a HEAD request with `status` and the region `there`.

    `here` is the session's region.
    """
    change = f"export AWS_DEFAULT_REGION={there or 'the region of the bucket'}"
    if status in (301, 307):
        text = f"{name} is in another region ({there or 'unknown'}; this session: {here or 'none'})"
        return bad(text, cure=change)
    if status != 200:
        allow = f"allow s3:ListBucket on arn:aws:s3:::{name} and s3:GetObject, s3:PutObject on its objects"
        problem, cure = problem_and_cure(HEAD.get(status, ""), service="S3", cures={"AccessDenied": allow})
        text = f"{name}: S3 answers {status}{problem and f', most likely {problem}'}"
        return bad(text, cure=cure or "try again; if that does not help, see the AWS health page")
    if not there:
        return ok(f"{name} answers; it does not name its region")
    if not here:
        text = f"{name} answers from {there}; this session has no region (boto3 does not read AWS_REGION)"
        return warn(text, cure=f"{change}, if this machine is there")
    if here != there:
        text = f"{name} is in {there}, this session in {here}: traffic between regions is slow and billed"
        return warn(text, cure=f"train in {there} or copy the bucket; if this machine is there: {change}")
    return ok(f"{name} answers, in {there} like this session")


def clock(headers: Mapping[str, str], now_s: float) -> dict[str, Finding]:
    """Return the finding on this machine's clock compared with the server's; {} if the server sends no date."""
    if "date" not in headers:
        return {}
    off_s = now_s - parsedate_to_datetime(headers["date"]).timestamp()
    text, cure = f"{abs(off_s):.0f} s {'ahead' if off_s > 0 else 'behind'}", "sudo chronyc makestep"
    finding = ok("agree")
    if abs(off_s) >= REJECTED_CLOCK_S:
        finding = bad(f"{text}: S3 rejects requests if the clock is off by 15 minutes or more", cure=cure)
    elif abs(off_s) > WANTED_CLOCK_S + TIMEOUT_S:
        finding = warn(text, cure=cure)
    return {"clock and S3": finding}
