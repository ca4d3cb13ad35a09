"""A table of S3, EC2, SSM and IAM errors, with a one-line explanation and cure for each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from botocore.exceptions import BotoCoreError, ClientError

from train.config import InputError, Unreachable

EXPIRED = ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"]
UNKNOWN = [
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "AuthFailure",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
]
NOT_ALLOWED = ["AccessDenied", "AccessDeniedException", "UnauthorizedOperation"]
KMS = "KMS."  # prefix of the codes that S3 forwards from AWS's key service
TEMPORARY_CODES = [
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "BandwidthLimitExceeded",
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "Unavailable",
    "ServiceUnavailable",
    # S3 answers with status 400 and one of these codes if a request's body arrived late or damaged.
    "RequestTimeout",
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
]
TEMPORARY_STATUS = (429, 500, 502, 503, 504)
NO_RENEWAL = ["CredentialRetrievalError", "SSOError", "TokenRetrievalError"]
NO_ANSWER = ["ConnectionError", "HTTPClientError", "EndpointConnectionError"]
# These codes concern the credentials, not the request.
CREDENTIALS = [*EXPIRED, *UNKNOWN, *NO_RENEWAL, "NoCredentialsError", "PartialCredentialsError"]
SETTINGS_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
SAID = "{service} answers {answer}: {text}"  # {text} is AWS's message
RENEW = "renew them (aws sso login)"
GET_SOME = "attach a role to the instance; elsewhere create a profile (aws configure sso) and set AWS_PROFILE to it"
HEADER = "a key or token has a line end or another control character in it: look at ~/.aws/credentials and AWS_*"
WHOSE = "aws sts get-caller-identity shows the user"
ROWS: list[
    tuple[list[str], str, str]
] = [  # AWS's codes or botocore's error classes, the problem, and the cure
    (EXPIRED, "the AWS credentials have expired ({code})", RENEW),
    (
        ["RequestExpired"],
        "the AWS credentials have expired, or this machine's clock is wrong ({code})",
        RENEW,
    ),
    (
        UNKNOWN,
        "{service} does not recognise these credentials ({code})",
        f"{WHOSE}, aws configure sets new keys",
    ),
    (
        NOT_ALLOWED,
        "no permission ({code}): {text}",
        f"add the permission to the role's or user's policy; {WHOSE}",
    ),
    (
        ["RequestTimeTooSkewed"],
        "this machine's clock is wrong: {service} rejects its signature",
        "set it (chrony)",
    ),
    (["NoSuchBucket"], "there is no such bucket", "check the name (aws s3 ls)"),
    (
        [KMS],
        "its KMS key cannot be used ({code}): {text}",
        "enable the key, or cancel its deletion (aws kms describe-key)",
    ),
    (["NoCredentialsError"], "no AWS credentials on this machine", GET_SOME),
    (["PartialCredentialsError"], "{text}", GET_SOME),
    (NO_RENEWAL, "the AWS credentials cannot be renewed ({text})", RENEW),
    (
        ["NoRegionError"],
        "no region is named",
        "set one in the settings, or set AWS_DEFAULT_REGION",
    ),
    (["EndpointConnectionError"], "{text}", "check the name of the region, and the route to it"),
    (NO_ANSWER[:2], "no answer from {service}: {text}", ""),
]
TABLE = {code: (problem, cure) for codes, problem, cure in ROWS for code in codes}


class Rejected(InputError):
    """An error raised because AWS rejected a request. `code` is from AWS's answer."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class BadCredentials(Rejected):
    """An error raised because credentials are absent, expired or unknown, so that no request can succeed."""


def one_line(error: object) -> str:
    """Return an error's text as one line, without the value of a header that it quotes: that may be a token."""
    return re.sub("Invalid header value .*", HEADER, " ".join(str(error).split()))


def code_of(error: BaseException) -> str:
    """Return the code in AWS's answer. Without an answer, return the error's class or base class in TABLE, or ""."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return next((each.__name__ for each in type(error).__mro__ if each.__name__ in TABLE), "")


def is_temporary(status: int, code: str | None) -> bool:
    """Return whether the same request may succeed later. EC2's status 500 for lack of capacity is not temporary."""
    code = code or ""
    if code.removeprefix(KMS) in TEMPORARY_CODES:
        return True
    return status in TEMPORARY_STATUS and "Capacity" not in code


def problem_and_cure(
    code: str,
    text: str = "",
    *,
    status: int = 0,
    service: str = "AWS",
    cures: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """Return the meaning of a code, including AWS's text, and its cure ("" if unknown). `cures` overrides TABLE."""
    said = SAID if code or status else "{text}"
    known = KMS if code.startswith(KMS) else code
    problem, cure = TABLE.get(known, (said, ""))
    answer = f"{status or ''} {code}".strip()
    if is_temporary(status, code):
        problem = "{service} answers {answer}"
        cure = ""
    problem = problem.format(service=service, answer=answer, code=code, text=text)
    return problem.rstrip(" .:"), (cures or {}).get(code, cure)


def explain(
    error: BaseException,
    where: str,
    *,
    service: str = "AWS",
    cures: Mapping[str, str] | None = None,
) -> Exception:
    """Return Rejected, BadCredentials or Unreachable for an error of boto3, in one line that begins with `where`."""
    code = code_of(error)
    text = one_line(error)
    status = 0
    times = 1
    if isinstance(error, ClientError):
        metadata = error.response.get("ResponseMetadata", {})
        status = int(metadata.get("HTTPStatusCode", 0))
        times += int(metadata.get("RetryAttempts", 0))
        text = one_line(error.response.get("Error", {}).get("Message") or "")
        text = text.split(" Encoded authorization failure")[0][:500]
    problem, cure = problem_and_cure(code, text, status=status, service=service, cures=cures)
    line = f"{where}: {problem}"
    if is_temporary(status, code) and times > 1:
        line += f", {times} times"
    if cure:
        line += f"; {cure}"
    if is_temporary(status, code) or code in NO_ANSWER:
        return Unreachable(line)
    return (BadCredentials if code in CREDENTIALS else Rejected)(line, code)


@contextmanager
def settings_explained() -> Iterator[None]:
    """Raise any error of the block, in which boto3 reads the user's AWS settings, in one line that names their files.

    boto3 passes on whatever its parsers, the files (~/.aws, a token) and the programs that these name raise. A missing
    token would otherwise be a FileNotFoundError, and look like a missing object.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, ClientError) or code_of(error) in TABLE:
            raise explain(error, "AWS credentials") from error
        reason = re.sub(r"\S*@", "", one_line(error))  # hides the credentials in a URL
        if not isinstance(error, BotoCoreError | OSError):  # such as an AttributeError of a parser
            reason = f"{type(error).__name__}: {reason}"
        files = [os.environ.get(name) or default for name, default in SETTINGS_FILES.items()]
        where = f"check {' and '.join(files)}, the variables AWS_*, and the settings"
        raise BadCredentials(
            f"AWS's settings cannot be used: {reason.rstrip(' .:')}; {where}", ""
        ) from error


@contextmanager
def explained(where: str, *, cures: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise errors of boto3 in the block as the errors that `explain` returns for them."""
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise explain(error, where, cures=cures) from error
