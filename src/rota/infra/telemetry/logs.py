"""Logs: one event per line on stderr, as JSON or for a terminal, without secrets.

    log = structlog.get_logger(__name__)
    log.warning("lease_lost", name=name, fence=fence)

The owner of the process (the CLI, a test) calls `configure` once; libraries only get a logger. Records of `logging`
(uvicorn, nats, asyncpg, redis, asyncio) and uncaught exceptions use the same processors.

Invariants, enforced by the processors built here: neither a value under a secret's name nor a password in a URL is
written, wherever it occurs (message, value, nested value, exception); a log call never fails its caller, whatever is
logged and even if stderr is closed.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from types import TracebackType
from typing import Final, Literal

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from rota.infra.telemetry.redaction import redact

Format = Literal["json", "console"]
NOISY_LOGGERS: Final = ("httpx", "httpcore")
"""Libraries that log every call; Rota logs the failed ones itself."""


def configure(format: Format = "json", level: str = "info") -> None:  # noqa: A002 - the setting's name
    """Send all logs of this process to stderr as `format`, from `level` on. May be called again."""
    lowest = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*_COMMON_PROCESSORS, *_output_processors(format)],
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_StdlibForwarder()]
    root.setLevel(lowest)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(lowest, logging.WARNING))
    logging.captureWarnings(capture=True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


class _StderrLogger:
    """Writes lines. Looks up stderr for each line, so that a replaced stream is used."""

    def __init__(self, name: str = "rota") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            # Closed pipe or stream: the work must go on without its log.
            return

    debug = info = warning = warn = error = critical = exception = fatal = log = failure = msg


class _StdlibForwarder(logging.Handler):
    """Converts a record of `logging` to a structlog event."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, "%s", _message(record), exc_info=record.exc_info or None)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        return f"{record.msg} {record.args!r}"


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    structlog.get_logger(__name__).critical("uncaught", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _add_logger_name(logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event.setdefault("logger", getattr(logger, "name", "rota"))
    return event


def _redact_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    first = {key: event.pop(key) for key in ("timestamp", "level", "logger", "event") if key in event}
    return {str(key): redact(value, str(key)) for key, value in {**first, **event}.items()}


def _json(event: EventDict, **_options: object) -> str:
    try:
        return msgspec.json.encode(event).decode()
    except (UnicodeEncodeError, msgspec.MsgspecError, OverflowError):
        # Lone surrogates from undecodable file names, integers beyond 64 bits.
        return json.dumps(event)


_COMMON_PROCESSORS: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    _add_logger_name,
]


def _output_processors(format: Format) -> list[Processor]:  # noqa: A002
    if format == "json":
        shape = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
        return [
            structlog.processors.ExceptionRenderer(shape),
            _redact_event,
            structlog.processors.JSONRenderer(serializer=_json),
        ]
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=28
    )
    return [structlog.processors.format_exc_info, _redact_event, renderer]
