"""Errors of AWS's SDK that no server has to give: each is one line of a kind."""

import pytest
from botocore import exceptions

from train.config import InputError, Unreachable
from train.storage.aws_errors import BadCredentials, Rejected, explained

ENDPOINT = {"endpoint_url": "https://ec2.us-east-9.amazonaws.com"}
ERRORS = [  # error, kind, words
    (
        exceptions.NoCredentialsError(),
        BadCredentials,
        "no AWS credentials on this machine; attach a role",
    ),
    (
        exceptions.PartialCredentialsError(provider="env", cred_var="x"),
        BadCredentials,
        "missing: x; attach a role",
    ),
    (exceptions.UnauthorizedSSOTokenError(), BadCredentials, "cannot be renewed (The SSO session"),
    (
        exceptions.CredentialRetrievalError(provider="p", error_msg="e"),
        BadCredentials,
        "aws sso login",
    ),
    (exceptions.TokenRetrievalError(provider="p", error_msg="e"), BadCredentials, "aws sso login"),
    (exceptions.NoRegionError(), Rejected, "no region is named; set one"),
    (exceptions.EndpointConnectionError(**ENDPOINT), Unreachable, "us-east-9.amazonaws.com"),
    (exceptions.ReadTimeoutError(**ENDPOINT), Unreachable, "no answer from AWS: Read timeout"),
    (exceptions.InvalidRegionError(region_name="x y"), InputError, "Provided region_name 'x y'"),
    (
        exceptions.ClientError({"Error": {"Code": "New", "Message": "a\n b"}}, "X"),
        InputError,
        "AWS answers New: a b",
    ),
]


@pytest.mark.parametrize(
    ("error", "kind", "words"), ERRORS, ids=[type(each[0]).__name__ for each in ERRORS]
)
def test_an_error_of_the_sdk_is_one_line(error, kind, words):
    with pytest.raises(kind) as raised, explained("here"):
        raise error
    assert (
        words in str(raised.value)
        and str(raised.value).startswith("here: ")
        and "\n" not in str(raised.value)
    )


def test_the_value_of_a_header_is_not_shown():
    failure = exceptions.HTTPClientError(
        error=ValueError(f"Invalid header value {b'a-token' + bytes([10])!r}")
    )
    with (
        pytest.raises(
            Unreachable, match="a key or token has a line end .*in it: look at ~/.aws"
        ) as raised,
        explained("S3"),
    ):
        raise failure
    assert "a-token" not in str(raised.value)
