"""Sessions and clients of boto3, which find the user's settings and credentials, and renew credentials.

Every error of this search is one line that names the files it read. It never looks like an answer of S3.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import boto3
from botocore.exceptions import ProfileNotFound
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from train.config import InputError, S3Config
from train.machine.console import strip_variables
from train.storage.aws_errors import settings_explained

METADATA_ATTEMPTS = 5  # attempts to get credentials from the metadata service
TOKEN_READS = 6  # attempts to read files that credentials need
TOKEN_PAUSE_S = 1.0  # seconds between these attempts


def open_session(s3: S3Config) -> Any:
    """Return a boto3 session, which finds credentials and renews them."""
    strip_variables()  # a notebook is no program, which has done so
    with settings_explained():
        try:
            session = boto3.session.Session(region_name=s3.region)
            session._session.get_scoped_config()  # reads the files, so that their faults are reported here
        except ProfileNotFound as error:
            raise InputError(
                f"AWS_PROFILE={os.environ.get('AWS_PROFILE')} is not in ~/.aws; aws configure list-profiles lists the "
                "profiles"
            ) from error
        # Many ranks of a machine ask its metadata service at the same time. By default boto3 asks only once, and may
        # then find no credentials.
        session._session.set_config_variable("metadata_service_num_attempts", METADATA_ATTEMPTS)
    return session


def open_service(session: Any, service: str, **options: Any) -> Any:
    """Return boto3's client of a service. Before each request, `renew` renews the credentials."""
    with settings_explained():
        client = session.client(service, **options)
        has_some = session.get_credentials() is not None
    if has_some:  # otherwise each request would look for some, and the first one already says that there are none
        client.meta.events.register_first("before-call", partial(renew, session))
    return client


def renew(session: Any, **_: object) -> None:
    """Renew the session's credentials if they are about to expire. boto3 would take a result for S3's answer."""
    credentials(session)


def credentials(session: Any) -> Any:
    """Return the session's credentials, renewed if they are about to expire; None if this machine has none.

    boto3 would renew them while it signs a request, where a missing file of a token looks like a missing object. Such a
    file may be gone for a moment while it is replaced.
    """

    def frozen() -> Any:
        held = session.get_credentials()
        return held and held.get_frozen_credentials()

    retrying = Retrying(
        retry=retry_if_exception_type(OSError),
        stop=stop_after_attempt(TOKEN_READS),
        wait=wait_fixed(TOKEN_PAUSE_S),
        reraise=True,
    )
    with settings_explained():
        return retrying(frozen)
