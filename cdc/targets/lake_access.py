"""Access to a lake in an object store: errors that say that the store refuses it, recognised by their text.

delta-rs and Spark report a missing permission, missing credentials and a missing bucket in exceptions of many classes.
"""

from __future__ import annotations

import re
from typing import Final

from cdc.errors import LakeInaccessible

_CAUSES: Final = (
    (
        re.compile(
            r"/latest/api/token|loading credentials|no credentials found|NoCredentials|CredentialsNotLoaded",
            re.IGNORECASE,
        ),
        "this process has no credentials for the object store",
    ),
    (
        re.compile(
            r"NoSuchBucket|ContainerNotFound|bucket does not exist|list request.{0,400}?\b404 Not Found", re.DOTALL
        ),
        "the bucket does not exist",
    ),
    (
        re.compile(
            r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|\b40[13] (?:Forbidden|Unauthorized)"
            r"|the necessary privileges|valid authentication credentials"
        ),
        "the object store denies access",
    ),
)
"""Text in an error of an object store → the cause; the first that is found counts."""


def access_error(exc: BaseException, subject: str) -> LakeInaccessible | None:
    """Return the error to report if an object store refuses access to a lake; None for another error.

    subject: what was read or written, such as `the published record 's3://lake/_cdc/published'`.
    """
    text = str(exc)
    for pattern, cause in _CAUSES:
        if pattern.search(text):
            return LakeInaccessible(f"{subject} cannot be accessed: {cause}")
    return None
