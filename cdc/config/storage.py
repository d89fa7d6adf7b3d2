"""Storage: how an object store is reached, as a definition says it and as delta-rs wants to hear it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, ValidationError

from cdc.config.interpolation import interpolate
from cdc.config.model import Model
from cdc.config.names import Location, Switch, invalid
from cdc.config.secret import HIDDEN, Secret
from cdc.errors import InvalidDefinition
from cdc.log.object_path import Root, as_root

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
        raise invalid("a key stands in the file: write ${VAR}, {env: VAR} or {file: PATH}")
    return secret


Key = Annotated[Secret, AfterValidator(_referenced)]


class Storage(Model):
    """How the object store of the log is reached; what is not said is taken from the environment, as its tools do."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")] | None = None
    """URL of a store that is compatible with S3; default Amazon's."""
    allow_http: Switch = False
    """Let keys and rows pass unencrypted: for an endpoint `http://` inside one trusted network."""
    region: Annotated[str, Field(min_length=1)] | None = None
    """Of the bucket."""
    virtual_hosted: Switch = False
    """Whether the bucket's name is part of the endpoint's host name."""
    access_key_id: Secret | None = None
    """S3: which key."""
    secret_access_key: Key | None = None
    """S3: the key itself, by reference."""
    session_token: Key | None = None
    """S3: of a key that is lent, by reference."""
    account_name: Annotated[str, Field(min_length=1)] | None = None
    """Azure: the storage account."""
    account_key: Key | None = None
    """Azure: its key, by reference."""
    sas_token: Key | None = None
    """Azure: a shared access signature instead of a key, by reference."""
    service_account: Location | None = None
    """Google: the file with the key of a service account."""

    def handed_on(self) -> str:
        """JSON from which another process of this machine takes it over; references stand for what is secret."""
        said = {name: getattr(self, name) for name in sorted(self.model_fields_set)}
        return json.dumps({n: v.anywhere if isinstance(v, Secret) else v for n, v in said.items() if v is not None})

    @classmethod
    def taken_over(cls, text: str) -> Self:
        """Read it back, and fetch the secrets; raises InvalidDefinition."""
        try:
            said = json.loads(text)
            values = {n: interpolate(v, os.environ) if isinstance(v, str) else v for n, v in said.items()}
            return cls.model_validate(values)
        except (ValidationError, ValueError, AttributeError) as exc:
            keys = [".".join(map(str, e["loc"])) for e in exc.errors()] if isinstance(exc, ValidationError) else []
            what = f"its {', '.join(keys)} cannot be used" if keys else "expected a JSON object"
            raise InvalidDefinition(f"option 'storage' is not as log.storage of a definition: {what}") from None

    def options(self, scheme: str) -> tuple[tuple[str, str], ...]:
        """What was said, in the words of delta-rs for a URL of that scheme."""
        said: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS.get(scheme, ()) if getattr(self, name)}
        values = {name: value.reveal() if isinstance(value, Secret) else value for name, value in said.items()}
        options = {_OPTIONS[scheme][name]: "true" if value is True else str(value) for name, value in values.items()}
        return tuple(sorted(options.items()))


def log_root(path: str, storage: Storage) -> Root:
    """Where a log lies, with all that is needed to read and write there."""
    return as_root(path, storage.options(path.partition("://")[0]))


def storage_keys(scheme: str) -> frozenset[str]:
    """The fields of Storage that mean something for a URL of that scheme."""
    return frozenset(_OPTIONS.get(scheme, ()))
