"""Whether a bucket can be reached, where it is, and how far this clock is from S3's. Imports boto3: import it late.

One HEAD request of the bucket; nothing is written. Run against a local server, not against S3 itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from train.doctor.finding import Finding, bad, ok, warn

TIMEOUT_S = 5
REFUSED_CLOCK_S = 15 * 60  # S3 answers RequestTimeTooSkewed from here on
WANTED_CLOCK_S = 5.0  # the header has whole seconds, and the request takes its time


def bucket(location: str, *, now_s: float) -> list[Finding]:
    """Findings about `s3://bucket/...`. The request goes where boto3 sends it (AWS_ENDPOINT_URL included)."""
    name = location.removeprefix("s3://").split("/")[0]
    session = boto3.session.Session()
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"total_max_attempts": 2})
    try:
        answer = session.client("s3", config=config).head_bucket(Bucket=name)
    except (NoCredentialsError, PartialCredentialsError) as error:
        cure = "attach a role to the instance, or aws configure (aws sts get-caller-identity shows who you are)"
        return [bad("S3", f"{name}: no credentials ({error})", cure=cure)]
    except (ConnectionError, HTTPClientError) as error:
        cure = "give the subnet an S3 gateway endpoint or a NAT route, allow port 443 out; check HTTPS_PROXY"
        return [bad("S3", f"{name}: no route to S3 ({type(error).__name__})", cure=cure)]
    except ClientError as error:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return [refusal(name, error.response, session.region_name), *clock(headers, now_s=now_s)]
    except BotoCoreError as error:  # a name that no bucket can have, credentials that cannot be fetched, ...
        return [bad("S3", f"{name}: {error}", cure="check the name; aws sts get-caller-identity")]
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    return [place(name, region_of(headers), session.region_name), *clock(headers, now_s=now_s)]


def region_of(headers: Mapping[str, str]) -> str:
    return headers.get("x-amz-bucket-region", "")


def place(name: str, bucket_region: str, region: str | None) -> Finding:
    """A bucket that answers: is it near?"""
    if not bucket_region:
        return ok("S3", f"{name} answers; its region is not told")
    if not region:
        text = f"{name} answers from {bucket_region}; this session has no region (boto3 does not read AWS_REGION)"
        return warn("S3", text, cure=f"export AWS_DEFAULT_REGION={bucket_region}, if this machine is there")
    if region != bucket_region:
        text = f"{name} is in {bucket_region}, this session in {region}: traffic between regions is slow and billed"
        cure = f"train in {bucket_region} or copy the bucket; if this machine is there: "
        return warn("S3", text, cure=cure + f"export AWS_DEFAULT_REGION={bucket_region}")
    return ok("S3", f"{name} answers, in {bucket_region} like this session")


def refusal(name: str, response: Mapping[str, Any], region: str | None) -> Finding:
    """A HEAD request has no body: the status is all that S3 says."""
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    where = region_of(response.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
    if status == 404:
        return bad("S3", f"{name}: there is no such bucket (404)", cure="check the name: aws s3 ls")
    if status == 403:
        cure = f"allow s3:ListBucket on arn:aws:s3:::{name} and s3:GetObject, s3:PutObject on arn:aws:s3:::{name}/*; "
        return bad("S3", f"{name}: access refused (403)", cure=cure + "aws sts get-caller-identity shows who asks")
    if status in (301, 307):
        text = f"{name} is in another region ({where or 'not told'}; this session: {region or 'none'})"
        return bad("S3", text, cure=f"export AWS_DEFAULT_REGION={where or 'the region of the bucket'}")
    if status == 400:
        text = f"{name}: request refused (400), as with a session token that is out of date"
        return bad("S3", text, cure="renew the credentials: aws sso login, or unset AWS_SESSION_TOKEN")
    code = response.get("Error", {}).get("Code", "?")
    return bad("S3", f"{name}: S3 answers {status or code}", cure="try again; if it stays, see the AWS health page")


def clock(headers: Mapping[str, str], *, now_s: float) -> list[Finding]:
    """How far this machine's clock is from the one that answered; [] if it did not say."""
    if "date" not in headers:
        return []
    name, off_s = "clock and S3", now_s - parsedate_to_datetime(headers["date"]).timestamp()
    text, cure = f"{abs(off_s):.0f} s {'ahead' if off_s > 0 else 'behind'}", "sudo chronyc makestep"
    if abs(off_s) >= REFUSED_CLOCK_S:
        return [bad(name, f"{text}: S3 refuses from 15 minutes on", cure=cure)]
    if abs(off_s) > WANTED_CLOCK_S + TIMEOUT_S:
        return [warn(name, text, cure=cure)]
    return [ok(name, "agree")]
