"""Access to a search server: the keys of a search sink's `server`, and the settings of the indexes that it creates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.field_types import Identifier, Location, Model, Switch, invalid, placeholders
from cdc.config.secret import ReferencedSecret
from cdc.config.units import Bytes, Seconds

_OURS: Final = ("_position", "_deleted", "_raw")
"""Fields that every index has."""


def _alias(template: str) -> str:
    if set(placeholders(template)) - {"schema", "table"}:
        raise invalid("unknown placeholder: expected {schema} or {table}")
    fixed = template.replace("{schema}", "").replace("{table}", "")
    if "{table}" not in template or fixed.strip("abcdefghijklmnopqrstuvwxyz0123456789._-") or template[0] in "_-.":
        raise invalid("expected {table}, {schema}, lower-case letters, digits, '.', '_' and '-', as in shop-{table}")
    return template


class AwsSigning(Model):
    """How requests are signed for AWS, with the credentials that AWS tools find in the environment of the process."""

    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    """Region of the cluster, for example `eu-central-1`."""


class SearchServer(Model):
    """Access to an OpenSearch or Elasticsearch cluster, and the settings of the indexes in it."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/[^\s]*)?$")]
    """URL of the cluster, for example `https://search.example.com:9200`."""
    user: Annotated[str, Field(min_length=1)] | None = None
    """Name of the user for basic authentication."""
    password: ReferencedSecret | None = None
    """Password of the user, as a reference such as `${VAR}`."""
    api_key: ReferencedSecret | None = None
    """API key instead of user and password, as a reference such as `${VAR}`."""
    aws: AwsSigning | None = None
    """Signing of requests for AWS, instead of user or API key; requires the package extra `aws`."""
    ca_file: Location | None = None
    """PEM file with the certificate authority of the server; default: the authorities of the system."""
    insecure_skip_tls_verification: Switch = False
    """Whether to accept any certificate, so that anybody on the way can read and change everything."""
    timeout: Seconds = 60.0
    """Time after which a request without an answer is sent again; default 1 minute."""
    index: Annotated[str, AfterValidator(_alias)] = "{schema}.{table}"
    """Alias of a table's index, by which applications search; `{schema}` and `{table}` are replaced by the escaped
    names of the source table."""
    settings: Mapping[str, Any] = {}
    """Index settings of new indexes, for example `number_of_replicas` or `analysis`."""
    mappings: Mapping[str, Any] = {}
    """Mapping keys of new indexes, for example `dynamic_templates`; takes precedence over the usual mapping."""
    field_types: Mapping[Identifier, str | Mapping[str, Any]] = {}
    """Field type of single columns, by their names at the source: a type such as `keyword` or `geo_point`, or a whole
    field mapping. Unknown names are ignored."""
    bulk_size: Bytes = 5 * 2**20
    """Maximum bytes of one bulk request; a single larger document is sent alone. Default 5 MiB."""
    bulk_requests: Annotated[int, Field(ge=1, le=64)] = 4
    """Maximum number of bulk requests at once; the sink sends fewer while the server rejects some as too many."""
    keep_tombstones: Seconds = 86400.0
    """Time for which the version of a deleted row is remembered, so that a delayed request cannot restore the row;
    default 1 day."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.api_key is not None and (self.user is not None or self.password is not None):
            raise invalid("'api_key' and 'user' exclude each other")
        if self.aws is not None and (self.user is not None or self.password is not None or self.api_key is not None):
            raise invalid("'aws' excludes 'user' and 'api_key'")
        if (self.user is None) != (self.password is None):
            raise invalid("'user' and 'password' require each other")
        if self.url.startswith("http://") and self._has_login:
            host = self.url.removeprefix("http://").partition("/")[0].partition(":")[0]
            if host not in {"localhost", "127.0.0.1"}:
                raise invalid("an http:// URL sends the login unencrypted: use https://")
        if mine := sorted(set(self.mappings.get("properties", {})) & set(_OURS)):
            raise invalid("'mappings' contains {name}, a field of every index", name=repr(mine[0]))
        return self

    @property
    def _has_login(self) -> bool:
        return any(login is not None for login in (self.password, self.api_key, self.aws))
