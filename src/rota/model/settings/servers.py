"""Settings of PostgreSQL, Redis and NATS: addresses, timeouts, and how local ones are run."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from rota.model.settings.agents import AgentSchedulerSettings, AgentSettings
from rota.model.settings.kinds import Choice, Duration, Integer, Milliseconds, String, Url
from rota.model.settings.section import Section

BinarySource = Literal["auto", "wheel", "system"]
RootMode = Literal["auto", "userns", "setuid"]

_PATH = r"[^\x00-\x1f]+"


class PostgresSettings(Section, frozen=True):
    """The durable store. Without a URL `rota up` runs its own."""

    url: Annotated[str | None, Url("URL of PostgreSQL.", schemes=("postgresql", "postgres"))] = None
    pool_min: Annotated[int, Integer("Connections opened at start.", most=1000)] = 1
    pool_max: Annotated[int, Integer("Maximum number of connections.", least=1, most=1000)] = 10
    connect_timeout: Annotated[float, Duration("Timeout for opening a connection.")] = 5.0
    acquire_timeout: Annotated[float, Duration("Longest wait for a free connection from the pool.")] = 5.0
    statement_timeout: Annotated[float, Duration("Timeout of one statement.")] = 30.0
    lock_timeout: Annotated[float, Duration("Longest wait of a statement for a lock.")] = 5.0
    idle_in_transaction_timeout: Annotated[
        float, Duration("Longest idle time inside a transaction that waits for more than PostgreSQL.")
    ] = 60.0


class ConnectionPoolSettings(Section, frozen=True):
    """Connection pool to Redis."""

    max_wait_millis: Annotated[int, Milliseconds("Longest wait for a free connection.", least=1)] = 5_000
    max_total: Annotated[int, Integer("Maximum number of connections.", least=1, most=10_000)] = 50
    max_idle: Annotated[
        int, Integer("Accepted without effect: connections stay open until the process ends.", most=10_000)
    ] = 10
    min_idle: Annotated[int, Integer("Accepted without effect: connections are opened when needed.", most=10_000)] = 2


class RedisConnectionSettings(Section, frozen=True):
    """Limits of every call to Redis."""

    pool: ConnectionPoolSettings = ConnectionPoolSettings()
    timeout: Annotated[float, Duration("Timeout of one command.", bare="ms")] = 3.0
    connect_timeout: Annotated[float, Duration("Timeout for opening a connection.", bare="ms")] = 2.0


class RedisSettings(Section, frozen=True):
    """The live state. Without a URL `rota up` runs its own."""

    url: Annotated[str | None, Url("URL of Redis or Valkey.", schemes=("redis", "rediss", "unix"))] = None
    connection: RedisConnectionSettings = RedisConnectionSettings()
    agent: AgentSettings = AgentSettings()
    scheduler: AgentSchedulerSettings = AgentSchedulerSettings()


class NatsSettings(Section, frozen=True):
    """The message bus. Without a URL `rota up` runs its own."""

    url: Annotated[
        str | None,
        Url(
            "URL of NATS with JetStream; separate several servers by commas.",
            schemes=("nats", "tls"),
            several=True,
        ),
    ] = None
    prefix: Annotated[
        str,
        String(
            "Prefix of stream and subject names, for several installations on one NATS.",
            pattern=r"(?:[A-Z][A-Z0-9]{0,31})?",
            described="nothing, or up to 32 capital letters and digits, starting with a letter",
        ),
    ] = ""
    connect_timeout: Annotated[float, Duration("Timeout for opening a connection.")] = 5.0
    publish_timeout: Annotated[float, Duration("Timeout for the acknowledgement of a publish.")] = 2.0
    ack_wait: Annotated[float, Duration("Accepted without effect: consumers extend their acks, see job_ack_wait.")] = (
        600.0
    )
    job_ack_wait: Annotated[
        float, Duration("Time after which a message without an ack or a progress ack is redelivered.")
    ] = 3.0
    max_deliver: Annotated[int, Integer("Deliveries of one message before it goes to the DLQ.", least=1)] = 100
    max_ack_pending: Annotated[int, Integer("Unacknowledged messages allowed per consumer.", least=1, most=50_000)] = (
        2048
    )
    in_flight_ttl: Annotated[float, Duration("Accepted without effect: PostgreSQL detects duplicate messages.")] = 120.0
    nak_delay: Annotated[
        float, Duration("Delay before redelivery of a message whose DLQ entry could not be written.")
    ] = 5.0
    max_age: Annotated[float, Duration("Retention of messages in streams.", least=60.0)] = 7 * 86400.0
    replicas: Annotated[int, Integer("Replicas of each stream in a NATS cluster.", least=1, most=5)] = 1


_BIN = "Server binary or its directory; empty: the one from the wheel, else from this machine."
_PORT = "Port on 127.0.0.1; 0: a free one, reused at the next start."


class LocalPostgresSettings(Section, frozen=True):
    """The local PostgreSQL."""

    bin: Annotated[str | None, String(_BIN, pattern=_PATH, described="a path")] = None
    port: Annotated[int, Integer(_PORT, most=65535)] = 0


class LocalRedisSettings(Section, frozen=True):
    """The local Valkey or Redis."""

    bin: Annotated[str | None, String(_BIN, pattern=_PATH, described="a path")] = None
    port: Annotated[int, Integer(_PORT, most=65535)] = 0


class LocalNatsSettings(Section, frozen=True):
    """The local NATS."""

    bin: Annotated[str | None, String(_BIN, pattern=_PATH, described="a path")] = None
    port: Annotated[int, Integer(_PORT, most=65535)] = 0


class LocalSettings(Section, frozen=True):
    """The servers that `rota up` runs."""

    data_dir: Annotated[str, String("Data directory.", pattern=_PATH, described="a path")] = ".rota"
    source: Annotated[
        BinarySource,
        Choice("Source of the server binaries: the wheels, this machine, or both.", options=get_args(BinarySource)),
    ] = "auto"
    root_mode: Annotated[
        RootMode,
        Choice("How root runs PostgreSQL: in a user namespace, or as another user.", options=get_args(RootMode)),
    ] = "auto"
    postgres: LocalPostgresSettings = LocalPostgresSettings()
    redis: LocalRedisSettings = LocalRedisSettings()
    nats: LocalNatsSettings = LocalNatsSettings()
