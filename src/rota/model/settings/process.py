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

    url: Annotated[str | None, Url("Where it is; needs a key.", schemes=("http", "https"))] = None
    key: Annotated[
        str | None,
        Secret(
            "Key to call it with; `rota keys create` makes one.",
            pattern=r"rota_[0-9a-z]{10}_[0-9a-z]{39}",
            described="a key as it was shown when it was made",
        ),
    ] = None
    requests_per_s: Annotated[int, Integer("Requests a second that a server takes of each key; 0: any number.")] = 1000
    requests_burst: Annotated[int, Integer("Requests of a key that may come at once.", least=1)] = 2000
    requests_at_once: Annotated[int, Integer("Requests that a server answers at once, of all keys; 0: any number.")] = (
        256
    )


class LogSettings(Section, frozen=True):
    """Logs on stderr."""

    format: Annotated[
        LogFormat, Choice("One JSON object per line, or lines for people.", options=get_args(LogFormat))
    ] = "console"
    level: Annotated[LogLevel, Choice("The least that is written.", options=get_args(LogLevel))] = "info"


class ServiceSettings(Section, frozen=True):
    """Start and stop."""

    start_timeout: Annotated[
        float, Duration("Longest wait at the start of `rota server` for servers that do not answer.", least=0.0)
    ] = 60.0
    drain_timeout: Annotated[float, Duration("Longest wait at stop for work under way.")] = 15.0


class GrpcSettings(Section, frozen=True):
    """The gRPC service for other programs; disabled without a shared secret."""

    host: Annotated[
        str,
        String(
            "Address to listen on; other than loopback needs TLS.",
            pattern=r"[\w.:%-]{1,253}",
            described="a host name or address",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Integer("Port to listen on; 0: a free one.", most=65535)] = 7683
    shared_secret: Annotated[
        str | None,
        Secret(
            "What every caller must show.",
            pattern=r"[\x21-\x7e]{16,512}",
            described="16 to 512 printable characters without spaces",
        ),
    ] = None
    tls_cert: Annotated[
        str | None, String("File with the server's certificate chain, PEM.", pattern=_PATH, described="a path")
    ] = None
    tls_key: Annotated[str | None, String("File with its private key, PEM.", pattern=_PATH, described="a path")] = None
