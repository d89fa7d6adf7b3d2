"""Models of the destinations of deliveries: the keys that only one type of delivery has."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import normpath
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from cdc.config.condition_syntax import Condition
from cdc.config.deliveries import DeliverySettings
from cdc.config.field_types import Glob, Identifier, Location, Model, Switch, Whole, invalid, only_placeholders
from cdc.config.kafka import KafkaClientSetting, KafkaLogin, KafkaServerAddress, KafkaTopics, is_local
from cdc.config.secret import ReferencedSecret
from cdc.config.units import Bytes, Seconds

_PLACE: Final = r"://(\[[0-9a-fA-F:.]+\]|[^\s/@?#:\[\]]+)(:\d{1,5})?"
"""Pattern of host and port in a URL; a login is not part of the URL."""

_ZEROMQ_ADDRESS: Final = r"^(tcp://(\*|[^\s/:*]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|ipc://[^\s]+)$"
_ZEROMQ_LOCAL: Final = ("tcp://127.0.0.1:", "tcp://[::1]:", "tcp://localhost:", "ipc://")
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")


def _with_port(url: str) -> str:
    try:
        urlsplit(url).port  # noqa: B018 - the library checks the port when it is read
    except ValueError:
        raise invalid("the port of the URL is larger than 65535") from None
    return url


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise invalid("expected a URL, for example https://sqs.eu-central-1.amazonaws.com")
    if parts.username is not None or parts.query or parts.fragment:
        raise invalid("a URL of an endpoint has neither a user nor a query")
    if parts.scheme == "http" and parts.hostname not in LOCAL_HOSTS:
        raise invalid("an endpoint that is not on this machine needs https")
    return text


BrokerUrl = Annotated[str, AfterValidator(_with_port)]


class FileDelivery(DeliverySettings):
    """A delivery that appends events to files, one JSON object per line."""

    type: Literal["file"]
    path: Location
    """Directory of the files."""
    rotate: Bytes = 128 * 2**20
    """Size above which a new file begins."""
    fsync: Switch = True
    """Whether a batch is on the disk before its progress is recorded."""

    @property
    def own_directory(self) -> str:
        """See DeliverySettings.own_directory."""
        return normpath(self.path.removeprefix("file://"))


class StdoutDelivery(DeliverySettings):
    """A delivery that prints events, one JSON object per line; `cdc deliver NAME` runs it, `cdc run` does not."""

    type: Literal["stdout"]

    @property
    def is_run_by_hand(self) -> bool:
        """See DeliverySettings.is_run_by_hand."""
        return True


class SocketDelivery(DeliverySettings):
    """A delivery that writes events to a TCP connection, one JSON object per line."""

    type: Literal["tcp"]
    host: Annotated[str, Field(min_length=1)]
    """Host name or address of the receiver."""
    port: Annotated[Whole, Field(ge=1, le=65535)]
    """Port of the receiver."""
    acknowledge: Switch = False
    """Whether the receiver answers each line with a line that begins with the id of the event. Otherwise an event
    counts as delivered when the operating system has taken it, and is lost if the receiver dies: at most once."""

    @property
    def is_acknowledged(self) -> bool:
        """See DeliverySettings.is_acknowledged."""
        return self.acknowledge


class KafkaDelivery(DeliverySettings):
    """A delivery to topics of a Kafka cluster, exactly once: in transactions that contain the progress, too."""

    type: Literal["kafka"]
    servers: Annotated[tuple[KafkaServerAddress, ...], Field(min_length=1)]
    """Addresses of some brokers, `host:port`; the others are found through them."""
    tls: Switch = False
    """Whether to use TLS also for brokers on this machine; it is always used for others."""
    ca_file: Location | None = None
    """PEM file with the certificate authority of the brokers; default: the authorities of the system."""
    cert_file: Location | None = None
    """PEM file with the certificate that the client shows."""
    key_file: Location | None = None
    """PEM file with the private key of `cert_file`, without a password."""
    login: KafkaLogin | None = None
    """Login; default: none."""
    insecure_plaintext: Switch = False
    """Whether to do without TLS, so that anybody on the way can read and change everything."""
    insecure_skip_tls_verification: Switch = False
    """Whether to accept any certificate, so that anybody on the way can read and change everything."""
    topics: KafkaTopics = KafkaTopics()
    partitioner: Literal["murmur2", "crc32"] = "murmur2"
    """How the partition follows from the key: `murmur2` as Java clients do, `crc32` as librdkafka does."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "lz4"
    """Compression of the events."""
    linger: Seconds = 0.05
    """Maximum time for which events are collected before they are sent together; default 50 ms. The end of a
    transaction does not wait for it."""
    max_event_size: Annotated[Bytes, Field(ge=1_000, le=1_000_000_000)] = 1_000_000
    """Maximum bytes of key, value and headers of an event; brokers and topics have to take as much
    (`message.max.bytes`, `max.message.bytes`). A larger event becomes a dead letter."""
    transactional_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Name under which brokers know the delivery (`transactional.id`); default: from the names of pipeline, delivery
    and log."""
    transaction_timeout: Annotated[Seconds, Field(ge=1)] = 900.0
    """Time after which brokers abort a transaction; until then the consumers wait for a delivery that was killed in one
    and does not run again. A batch must not take longer. Default 15 minutes, the brokers' usual maximum."""
    progress_topic: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")] | None = None
    """Compacted topic with one partition that contains the progress; default: `cdc.progress.PIPELINE.DELIVERY`."""
    timeout: Annotated[Seconds, Field(ge=1)] = 30.0
    """Time without an answer after which the brokers count as unreachable; default 30 seconds."""
    client: Mapping[KafkaClientSetting, str] = {}
    """Other settings of the client, librdkafka, as text, for example `socket.keepalive.enable: "true"`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise invalid("'cert_file' and 'key_file' require each other")
        if self.insecure_plaintext and self._asks_for_tls:
            raise invalid("'insecure_plaintext' excludes the keys of TLS")
        if self.login is not None and self.login.mechanism == "plain" and not self.uses_tls and not self._is_local:
            raise invalid("the mechanism 'plain' would send the password unencrypted: use TLS, or a 'scram' mechanism")
        if self.timeout > self.transaction_timeout:
            raise invalid("'timeout' is longer than 'transaction_timeout'")
        return self

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self._asks_for_tls or not (self.insecure_plaintext or self._is_local)

    @property
    def _asks_for_tls(self) -> bool:
        return self.tls or self.ca_file is not None or self.cert_file is not None or self.insecure_skip_tls_verification

    @property
    def _is_local(self) -> bool:
        return all(is_local(server) for server in self.servers)


class BrokerDelivery(DeliverySettings):
    """Settings of a delivery to a broker: address, login, certificates and patience."""

    url: BrokerUrl
    """URL of the broker."""
    insecure_plaintext: Switch = False
    """Whether to send a login without TLS to another machine, so that anybody on the way can read it."""
    user: Annotated[str, Field(min_length=1)] | None = None
    """Name of the user."""
    password: ReferencedSecret | None = None
    """Password of the user, as a reference such as `${VAR}`."""
    ca_file: Location | None = None
    """PEM file with the certificate authority of the broker; default: the authorities of the system."""
    cert_file: Location | None = None
    """PEM file with the certificate by which cdc identifies itself, if the broker requires one."""
    key_file: Location | None = None
    """PEM file with the private key of `cert_file`."""
    timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    """Time after which a broker that does not answer counts as unavailable; default 30 seconds."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise invalid("'cert_file' and 'key_file' require each other")
        if self.password is None and self.user is not None:
            raise invalid("'user' requires 'password'")
        url = urlsplit(self.url)
        is_plain = url.scheme in {"amqp", "nats", "redis", "mqtt"} and url.hostname not in LOCAL_HOSTS
        if is_plain and self._has_login and not self.insecure_plaintext:
            raise invalid("a URL of this scheme sends the login unencrypted: use the scheme with TLS")
        return self

    @property
    def _has_login(self) -> bool:
        return self.password is not None


class AmqpDelivery(BrokerDelivery):
    """A delivery to RabbitMQ, or another broker of AMQP 0.9.1; requires the package extra `amqp`."""

    type: Literal["amqp"]
    url: Annotated[BrokerUrl, Field(pattern=rf"^amqps?{_PLACE}(/[^\s]*)?$")]
    """URL of the broker, for example `amqps://rabbit.example.com/shop`; the path is the virtual host, default `/`."""
    exchange: Annotated[str, Field(max_length=255)] = ""
    """Exchange; the topic is the routing key. Default the exchange that leads to the queue with the topic's name."""
    create: Switch = False
    """Whether to declare what is missing: the exchange, as a durable one of type topic; with the default exchange a
    durable queue for each topic."""
    in_flight: Annotated[Whole, Field(ge=1, le=100_000)] = 2_000
    """Maximum number of unconfirmed events. With 1 a key stays in order also if a queue rejects events."""
    max_size: Bytes = 128 * 2**20
    """Bytes of the largest value that the broker takes (`max_message_size`)."""


class Amqp1Delivery(BrokerDelivery):
    """A delivery to a broker of AMQP 1.0, such as ActiveMQ or Azure Service Bus; requires the package extra `amqp1`."""

    type: Literal["amqp1"]
    url: Annotated[BrokerUrl, Field(pattern=rf"^amqps?{_PLACE}$")]
    """URL of the broker, for example `amqps://shop.servicebus.windows.net`."""
    address: Annotated[str, Field(min_length=1), only_placeholders("topic")] = "{topic}"
    """Address of the queue or topic at the broker; `{topic}` is replaced by the topic of the event. Without `{topic}`,
    one address takes the events of all topics."""
    routing: Literal["queue", "topic"] = "queue"
    """What a broker makes that makes addresses when they are used; a topic loses events while nobody is subscribed."""
    max_size: Annotated[Bytes, Field(ge=1_000)] = 100 * 2**20
    """Maximum bytes of a message, if the broker does not take less. A larger event becomes a dead letter."""


class NatsDelivery(BrokerDelivery):
    """A delivery to NATS JetStream; requires the package extra `nats`."""

    type: Literal["nats"]
    url: Annotated[BrokerUrl, Field(pattern=rf"^(nats|tls){_PLACE}$")]
    """URL of the server, for example `tls://nats.example.com:4222`."""
    token: ReferencedSecret | None = None
    """Token instead of user and password, as a reference such as `${VAR}`."""
    stream: Annotated[str, Field(pattern=r"^[^\s.*>/\\]{1,255}$")] | None = None
    """Stream that has to take the events; default any stream that has the subject."""
    create: Switch = False
    """Whether to create the stream if it is missing, with `subjects`; requires `stream`."""
    subjects: tuple[Annotated[str, Field(pattern=r"^\S+$")], ...] = ()
    """Subjects of the created stream, for example `shop.>`."""
    deduplicate: Annotated[Seconds, Field(gt=0)] = 120.0
    """Time for which the created stream recognizes an event that is sent again; default 2 minutes."""
    in_flight: Annotated[Whole, Field(ge=1, le=100_000)] = 2_000
    """Maximum number of unacknowledged events; of each key it is one."""

    @property
    def _has_login(self) -> bool:
        return self.password is not None or self.token is not None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.token is not None and self.user is not None:
            raise invalid("'token' and 'user' exclude each other")
        if self.create and (self.stream is None or not self.subjects):
            raise invalid("'create' requires 'stream' and 'subjects'")
        return self


class RedisDelivery(BrokerDelivery):
    """A delivery to Redis Streams; requires the package extra `redis`."""

    type: Literal["redis"]
    url: Annotated[BrokerUrl, Field(pattern=rf"^rediss?{_PLACE}(/\d+)?$")]
    """URL of the server, for example `rediss://redis.example.com:6379/0`; the path is the number of the database."""
    max_length: Annotated[Whole, Field(ge=1)] | None = None
    """Number of entries above which the oldest of a stream are removed, approximately; default: none is removed."""
    max_batch: Bytes = 900 * 2**20
    """Bytes of the largest batch; Redis keeps it in memory until it is complete (`client-query-buffer-limit`)."""


class MqttDelivery(BrokerDelivery):
    """A delivery to a broker of MQTT 5; requires the package extra `mqtt`."""

    type: Literal["mqtt"]
    url: Annotated[BrokerUrl, Field(pattern=rf"^mqtts?{_PLACE}$")]
    """URL of the broker, for example `mqtts://mqtt.example.com:8883`."""
    retain: Switch = False
    """Whether the broker keeps the last event of each topic for later subscribers."""
    in_flight: Annotated[Whole, Field(ge=1, le=65_535)] = 1_000
    """Maximum number of unacknowledged events, if the broker does not ask for fewer; of each key it is one."""


class AwsDelivery(DeliverySettings):
    """Settings of every delivery to AWS. Credentials are found as AWS's own tools find them: environment, profile,
    role of the machine or of the pod.
    """

    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] | None = None
    """Region of the service; default: `AWS_REGION` or the profile."""
    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = None
    """URL of the service; default: the one of the region."""
    create: Switch = False
    """Whether to create queues, topics or streams that do not exist; otherwise the delivery waits until they exist."""
    parallel: Annotated[Whole, Field(ge=1, le=64)] = 8
    """Maximum number of requests at the same time; events of one key are never in two of them."""
    timeout: Annotated[Seconds, Field(ge=1)] = 30.0
    """Time without an answer after which the service counts as unreachable; default 30 seconds."""


class SqsDelivery(AwsDelivery):
    """A delivery to queues of Amazon SQS."""

    type: Literal["sqs"]
    queue: Annotated[str, Field(min_length=1), only_placeholders("topic")] = "{topic}.fifo"
    """Name of the queue; `{topic}` is replaced by the topic of the event. Without `{topic}`, one queue takes the events
    of all topics. Only a queue whose name ends with `.fifo` keeps the order of the events of a key."""
    owner: Annotated[str, Field(pattern=r"^\d{12}$")] | None = None
    """Account that owns the queues; default: the account of the credentials."""
    max_event_size: Annotated[Bytes, Field(ge=1_024, le=2**20)] = 2**18
    """Maximum bytes of a message with its attributes, as the queues are set (`MaximumMessageSize`). A larger event
    becomes a dead letter."""


class SnsDelivery(AwsDelivery):
    """A delivery to topics of Amazon SNS."""

    type: Literal["sns"]
    topic_name: Annotated[str, Field(min_length=1), only_placeholders("topic")] = "{topic}.fifo"
    """Name of the topic in SNS; `{topic}` is replaced by the topic of the event. Only a topic whose name ends with
    `.fifo` keeps the order of the events of a key."""
    owner: Annotated[str, Field(pattern=r"^\d{12}$")] | None = None
    """Account that owns the topics; default: the account of the credentials."""
    max_event_size: Annotated[Bytes, Field(ge=1_024, le=2**18)] = 2**18
    """Maximum bytes of a message with its attributes. A larger event becomes a dead letter."""


class KinesisDelivery(AwsDelivery):
    """A delivery to streams of Amazon Kinesis Data Streams."""

    type: Literal["kinesis"]
    stream: Annotated[str, Field(min_length=1), only_placeholders("topic")] = "{topic}"
    """Name of the stream; `{topic}` is replaced by the topic of the event."""
    max_event_size: Annotated[Bytes, Field(ge=1_024, le=10 * 2**20)] = 2**20
    """Maximum bytes of a record and its partition key, as the streams are set. A larger event becomes a dead letter."""


class PubsubDelivery(DeliverySettings):
    """A delivery to topics of Google Pub/Sub; requires the package extra `gcp`."""

    type: Literal["pubsub"]
    project: Annotated[str, Field(pattern=r"^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$")]
    """Identifier of the Google Cloud project that owns the topics."""
    topic_name: Annotated[str, Field(min_length=1), only_placeholders("topic")] = "{topic}"
    """Name of the topic in Pub/Sub; `{topic}` is replaced by the topic of the event."""
    endpoint: Annotated[BrokerUrl, Field(pattern=rf"^https?{_PLACE}$")] | None = None
    """URL of the service, for example `https://europe-west3-pubsub.googleapis.com`; Pub/Sub keeps order in one region.
    With `http`, for an emulator, no credentials are used. Default: the emulator at `PUBSUB_EMULATOR_HOST` if that is
    set, otherwise the global endpoint."""
    insecure_plaintext: Switch = False
    """Whether an emulator may be on another machine, so that anybody on the way can read and change everything."""
    credentials_file: Location | None = None
    """JSON file with the key of a service account, read at each connection; default: Application Default Credentials,
    as Google's own tools find them (`GOOGLE_APPLICATION_CREDENTIALS`, gcloud, the service account of the machine)."""
    ca_file: Location | None = None
    """PEM file with the certificate authority of the endpoint; default: the authorities of the client library."""
    create: Switch = False
    """Whether to create topics that do not exist; otherwise the delivery waits until they exist."""
    retention: Annotated[Seconds, Field(ge=600, le=2_678_400)] = 604_800.0
    """Time for which a created topic keeps events for subscriptions that are made later; default 7 days."""
    ordering_keys: Annotated[Whole, Field(ge=1, le=1_000_000)] | None = None
    """Number of ordering keys among which the keys are distributed, so that a request has the events of several keys;
    fewer make a delivery with many keys faster. Default: every key is an ordering key of its own."""
    parallel: Annotated[Whole, Field(ge=1, le=256)] = 32
    """Maximum number of requests at the same time; a request has events of one ordering key only."""
    timeout: Annotated[Seconds, Field(ge=1)] = 30.0
    """Time without an answer after which the service counts as unreachable; default 30 seconds."""

    @model_validator(mode="after")
    def _protected(self) -> Self:
        if self.endpoint is None or self.endpoint.startswith("https:"):
            return self
        if self.credentials_file is not None or self.ca_file is not None:
            raise invalid("an endpoint without TLS is an emulator, which takes neither credentials nor certificates")
        if not self.insecure_plaintext and urlsplit(self.endpoint).hostname not in LOCAL_HOSTS:
            raise invalid("an endpoint that is not on this machine needs https, or 'insecure_plaintext'")
        return self


class StatsdMetric(Model):
    """A metric that is made from the changes of a table."""

    metric: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$", max_length=200)]
    """Name of the metric, for example `orders.placed`."""
    table: Glob
    """Glob over `schema.table`."""
    when: Condition | None = None
    """Condition in a subset of Spark SQL over `op` and the columns of both images, for example `op = 'c'`; a change
    that does not contain a column of the condition counts."""
    type: Literal["counter", "gauge"] = "counter"
    """`counter` adds up, `gauge` is the newest value."""
    value: Identifier | None = None
    """Column with the value, of a numeric type; default of a counter: 1 for each change."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "gauge" and self.value is None:
            raise invalid("a gauge needs 'value', the column that it shows")
        return self


class StatsdDelivery(DeliverySettings):
    """A delivery that counts changes and sends the counts to a StatsD server by UDP, which may lose some."""

    type: Literal["statsd"]
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Host name or address of the server."""
    port: Annotated[Whole, Field(ge=1, le=65535)] = 8125
    """UDP port of the server."""
    metrics: Annotated[tuple[StatsdMetric, ...], Field(min_length=1)]
    """The metrics."""
    datagram: Annotated[Bytes, Field(ge=256, le=65_000)] = 1_432
    """Maximum bytes of a datagram."""

    @property
    def has_topics(self) -> bool:
        """See DeliverySettings.has_topics."""
        return False

    @property
    def counted_tables(self) -> tuple[str, ...]:
        """See DeliverySettings.counted_tables."""
        return tuple(metric.table for metric in self.metrics)

    @model_validator(mode="after")
    def _only_metrics(self) -> Self:
        for key in ("format", "debezium", "encoding", "schema_registry", "messages"):
            if key in self.model_fields_set:
                raise invalid("{key} has no effect on metrics: remove it", key=repr(key))
        return self


class MulticastDelivery(DeliverySettings):
    """A delivery by UDP multicast, which loses events; a receiver asks for them again by TCP."""

    type: Literal["multicast"]
    group: Annotated[str, Field(pattern=r"^2(2[4-9]|3\d)(\.\d{1,3}){3}$")]
    """IPv4 address of the group, for example `239.255.7.1`."""
    port: Annotated[Whole, Field(ge=1, le=65535)]
    """UDP port of the group."""
    interface: Annotated[str, Field(pattern=r"^\d{1,3}(\.\d{1,3}){3}$")] = "127.0.0.1"
    """Address of this machine through which datagrams leave."""
    ttl: Annotated[Whole, Field(ge=0, le=255)] = 0
    """Number of networks that a datagram passes; 0: it stays on this machine, 1: in the network of `interface`."""
    datagram: Annotated[Bytes, Field(ge=576, le=65_000)] = 1_400
    """Maximum bytes of a datagram; an event that is larger becomes several."""
    rate: Annotated[Bytes, Field(ge=1_000)] = 20 * 2**20
    """Bytes per second at most, so that receivers and switches can follow."""
    heartbeat: Annotated[Seconds, Field(ge=0.01)] = 0.2
    """Time between datagrams without an event, by which a receiver sees that the last event was lost."""
    repair_port: Annotated[Whole, Field(ge=0, le=65535)] = 0
    """TCP port at `interface` where receivers ask for events; 0 takes a free one, which every datagram contains."""
    max_event_size: Annotated[Bytes, Field(ge=1_000, le=2**26)] = 2**20
    """Maximum bytes of an event that is sent to the group. A receiver gets a larger one as if it had lost it."""
    insecure_plaintext: Switch = False
    """Whether receivers may be on other machines: everybody who joins the group gets all events, and anybody on the way
    can read and change them."""

    @model_validator(mode="after")
    def _protected(self) -> Self:
        if not self.insecure_plaintext and (self.ttl > 0 or not self.interface.startswith("127.")):
            raise invalid("other machines can join this group: set 'insecure_plaintext' if they may read all events")
        return self


class ZeromqDelivery(DeliverySettings):
    """A delivery to subscribers of a ZeroMQ PUB socket, which loses events; a subscriber asks for them again."""

    type: Literal["zeromq"]
    publish: Annotated[str, Field(pattern=_ZEROMQ_ADDRESS)]
    """Address at which subscribers connect, for example `tcp://127.0.0.1:5556`."""
    history: Annotated[str, Field(pattern=_ZEROMQ_ADDRESS)]
    """Address at which subscribers ask for events again, for example `tcp://127.0.0.1:5557`."""
    queue: Annotated[Whole, Field(ge=1)] = 100_000
    """Number of events that wait for a slow subscriber; later ones are lost for it until it asks for them."""
    insecure_plaintext: Switch = False
    """Whether subscribers may be on other machines: everybody who reaches the addresses gets all events, and anybody on
    the way can read and change them."""

    @model_validator(mode="after")
    def _protected(self) -> Self:
        places = self.publish, self.history
        if not self.insecure_plaintext and not all(place.startswith(_ZEROMQ_LOCAL) for place in places):
            raise invalid("other machines can reach this address: set 'insecure_plaintext' if they may read all events")
        if self.publish == self.history:
            raise invalid("'publish' and 'history' need different addresses")
        return self


Delivery = Annotated[
    Amqp1Delivery
    | AmqpDelivery
    | FileDelivery
    | KafkaDelivery
    | KinesisDelivery
    | MqttDelivery
    | MulticastDelivery
    | NatsDelivery
    | PubsubDelivery
    | RedisDelivery
    | SnsDelivery
    | SocketDelivery
    | SqsDelivery
    | StatsdDelivery
    | StdoutDelivery
    | ZeromqDelivery,
    Field(discriminator="type"),
]  # fmt: skip
"""A delivery of a definition; `type` selects the destination."""
