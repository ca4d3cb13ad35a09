"""Sessions and clients of boto3, which find the user's settings and credentials.

Every error of this search is one line that names the files it read. It never looks like an answer of S3.
"""

from __future__ import annotations

import os
from typing import Any

import boto3
from botocore.exceptions import ProfileNotFound

from train.config import InputError, S3Config
from train.storage.aws_errors import settings_explained

METADATA_ATTEMPTS = 5  # attempts to get credentials from the metadata service


def open_session(s3: S3Config) -> Any:
    """Return a boto3 session, which finds credentials and renews them."""
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
    """Return boto3's client of a service. Credentials are looked for now, so that faults are reported here."""
    with settings_explained():
        client = session.client(service, **options)
    credentials(session)
    return client


def credentials(session: Any) -> Any:
    """Return the session's credentials, renewed if they are about to expire; None if this machine has none."""
    with settings_explained():
        held = session.get_credentials()
        return held and held.get_frozen_credentials()
