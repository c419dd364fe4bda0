"""Settings of one process: listening, logging, start and stop."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from rota.model.settings.kinds import Choice, Duration, Integer, Secret, String, Url
from rota.model.settings.section import Section

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]

_PATH = r"[^\x00-\x1f]+"


class ListenSettings(Section, frozen=True):
    """HTTP API, health, readiness and metrics. Addresses other than loopback require an API key."""

    host: Annotated[
        str,
        String("Address to listen on.", pattern=r"[\w.:%-]{1,253}", described="a host name or address"),
    ] = "127.0.0.1"
    port: Annotated[int, Integer("Port to listen on; 0: a free one.", most=65535)] = 7682
    tls_cert: Annotated[
        str | None, String("File with the certificate chain for HTTPS, PEM.", pattern=_PATH, described="a path")
    ] = None
    tls_key: Annotated[str | None, String("File with its private key, PEM.", pattern=_PATH, described="a path")] = None


class ApiSettings(Section, frozen=True):
    """The API that clients on this machine call. Without a URL: that of `rota up` in this data directory."""

    url: Annotated[str | None, Url("URL of the API; requires a key.", schemes=("http", "https"))] = None
    key: Annotated[
        str | None,
        Secret(
            "API key; `rota keys create` creates one.",
            pattern=r"rota_[0-9a-z]{10}_[0-9a-z]{39}",
            described="a key as shown when it was created",
        ),
    ] = None
    requests_per_s: Annotated[
        int, Integer("Requests per second that all servers together accept from each key; 0: no limit.")
    ] = 1000
    requests_burst: Annotated[int, Integer("Burst of requests allowed per key, over all servers.", least=1)] = 2000
    requests_at_once: Annotated[int, Integer("Concurrent requests per server, over all keys; 0: no limit.")] = 256


class LogSettings(Section, frozen=True):
    """Logs on stderr."""

    format: Annotated[
        LogFormat, Choice("One JSON object per line, or human-readable lines.", options=get_args(LogFormat))
    ] = "console"
    level: Annotated[LogLevel, Choice("Lowest level that is logged.", options=get_args(LogLevel))] = "info"


class ServiceSettings(Section, frozen=True):
    """Start and stop."""

    start_timeout: Annotated[
        float, Duration("Longest wait of `rota server` at start for PostgreSQL, Redis and NATS.", least=0.0)
    ] = 60.0
    drain_timeout: Annotated[float, Duration("Longest wait at stop for work in progress.")] = 15.0


class GrpcSettings(Section, frozen=True):
    """The gRPC service for other programs; disabled without a shared secret."""

    host: Annotated[
        str,
        String(
            "Address to listen on; any other than loopback requires TLS.",
            pattern=r"[\w.:%-]{1,253}",
            described="a host name or address",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Integer("Port to listen on; 0: a free one.", most=65535)] = 7683
    shared_secret: Annotated[
        str | None,
        Secret(
            "Secret that every caller must send.",
            pattern=r"[\x21-\x7e]{16,512}",
            described="16 to 512 printable characters without spaces",
        ),
    ] = None
    tls_cert: Annotated[
        str | None, String("File with the server's certificate chain, PEM.", pattern=_PATH, described="a path")
    ] = None
    tls_key: Annotated[str | None, String("File with its private key, PEM.", pattern=_PATH, described="a path")] = None
