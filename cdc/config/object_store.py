"""Access to an object store: the keys of `log.storage`, and their translation to the options of delta-rs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, ValidationError

from cdc.bucket_files import Root, as_root
from cdc.config.field_types import Location, Model, Switch, invalid
from cdc.config.interpolation import interpolate
from cdc.config.secret import HIDDEN, Secret
from cdc.errors import InvalidDefinition

_S3: Final = {
    "endpoint": "aws_endpoint",
    "allow_http": "allow_http",
    "region": "aws_region",
    "virtual_hosted": "aws_virtual_hosted_style_request",
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}
_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": _S3,
    "s3a": _S3,
    "abfss": {
        "endpoint": "azure_storage_endpoint",
        "allow_http": "allow_http",
        "account_name": "azure_storage_account_name",
        "account_key": "azure_storage_account_key",
        "sas_token": "azure_storage_sas_key",
    },
    "gs": {"service_account": "google_service_account"},
}


def _referenced(secret: Secret) -> Secret:
    if secret.reference == HIDDEN:
        raise invalid(
            "an access key is in plain text in the definition: write ${VAR}, {env: VAR} or {file: PATH} instead"
        )
    return secret


Key = Annotated[Secret, AfterValidator(_referenced)]


class Storage(Model):
    """Access to the object store of the log; keys that are not set are read from the environment."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")] | None = None
    """URL of an S3-compatible store; default Amazon S3."""
    allow_http: Switch = False
    """Whether to allow an unencrypted `http://` endpoint; use it only inside a trusted network."""
    region: Annotated[str, Field(min_length=1)] | None = None
    """Region of the bucket."""
    virtual_hosted: Switch = False
    """Whether the bucket's name is part of the endpoint's host name."""
    access_key_id: Secret | None = None
    """S3: access key ID."""
    secret_access_key: Key | None = None
    """S3: secret access key, as a reference such as `${VAR}`."""
    session_token: Key | None = None
    """S3: session token of temporary credentials, as a reference such as `${VAR}`."""
    account_name: Annotated[str, Field(min_length=1)] | None = None
    """Azure: name of the storage account."""
    account_key: Key | None = None
    """Azure: key of the storage account, as a reference such as `${VAR}`."""
    sas_token: Key | None = None
    """Azure: shared access signature instead of a key, as a reference such as `${VAR}`."""
    service_account: Location | None = None
    """Google: path of the key file of a service account."""

    def to_json(self) -> str:
        """Return JSON for another process on this machine; it contains references instead of secrets."""
        said = {name: getattr(self, name) for name in sorted(self.model_fields_set)}
        return json.dumps(
            {n: v.portable_reference if isinstance(v, Secret) else v for n, v in said.items() if v is not None}
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json` and read the secrets; raises InvalidDefinition."""
        try:
            said = json.loads(text)
            values = {n: interpolate(v, os.environ) if isinstance(v, str) else v for n, v in said.items()}
            return cls.model_validate(values)
        except (ValidationError, ValueError, AttributeError) as exc:
            keys = [".".join(map(str, e["loc"])) for e in exc.errors()] if isinstance(exc, ValidationError) else []
            what = f"invalid {', '.join(keys)}" if keys else "expected a JSON object"
            raise InvalidDefinition(
                f"option 'storage' is malformed: {what}; expected the value of log.storage as JSON"
            ) from None

    def options(self, scheme: str) -> tuple[tuple[str, str], ...]:
        """Return the keys that are set, as (name, value) options of delta-rs for a URL of the scheme."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS.get(scheme, ()) if getattr(self, name)}
        values = {name: value.reveal() if isinstance(value, Secret) else value for name, value in given.items()}
        options = {_OPTIONS[scheme][name]: "true" if value is True else str(value) for name, value in values.items()}
        return tuple(sorted(options.items()))


def log_root(path: str, storage: Storage) -> Root:
    """Return the location of a log, with the options of its object store."""
    return as_root(path, storage.options(path.partition("://")[0]))


def storage_keys(scheme: str) -> frozenset[str]:
    """Return the names of the fields of Storage that apply to a URL of the scheme."""
    return frozenset(_OPTIONS.get(scheme, ()))
