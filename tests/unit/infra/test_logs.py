"""Log format and levels, and the redaction of secrets."""

import io
import json
import logging
import sys
import threading
import warnings

import pytest
import structlog

from rota.infra.telemetry import logs
from rota.infra.telemetry.redaction import MASK, is_secret, redact, redact_text
from rota.model.errors import LoginRefused

# ruff: noqa: G004
CANARY = "c4nary-S3cret"
log = structlog.get_logger("tests.logs")


@pytest.fixture
def written(capsys):
    """Returns what was written to stderr since the last call; restores the logging setup afterwards."""
    root = logging.getLogger()
    configured = structlog.get_config() if structlog.is_configured() else None
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook, warnings.showwarning
    yield lambda: capsys.readouterr().err
    structlog.configure(**configured) if configured else structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(capture=False)
    root.handlers[:], level, sys.excepthook, threading.excepthook, warnings.showwarning = before
    root.setLevel(level)


def events(written):
    return [json.loads(line) for line in written().splitlines()]


def raise_from(cause, error):
    try:
        try:
            raise cause
        except type(cause) as inner:
            raise error from inner
    except type(error):
        return sys.exc_info()


def raised_beside(value):
    try:
        raise ValueError(len(value))
    except ValueError:
        return sys.exc_info()


def test_event_is_one_json_line_with_time_level_logger_and_values(written):
    logs.configure("json", "info")
    log.warning("lease_lost", name="leader\nnext", fence=7)
    (event,) = events(written)
    assert list(event)[:4] == ["timestamp", "level", "logger", "event"]
    assert event["timestamp"].endswith("Z")
    assert (event["level"], event["logger"], event["event"]) == ("warning", "tests.logs", "lease_lost")
    assert (event["name"], event["fence"]) == ("leader\nnext", 7)


def test_standard_library_logging_uses_the_same_format(written):
    logs.configure("json", "info")
    logging.getLogger("uvicorn.error").warning("port %d", 80)
    logging.getLogger("nats").debug("too low to be shown")
    (event,) = events(written)
    assert (event["event"], event["logger"], event["level"]) == ("port 80", "uvicorn.error", "warning")


def test_record_with_wrong_format_arguments_is_still_logged(written):
    logs.configure("json", "info")
    logging.getLogger("redis").error("%d of %d", "one")  # noqa: PLE1206
    (event,) = events(written)
    assert "%d of %d" in event["event"]
    assert "one" in event["event"]


def test_bound_context_is_added_to_every_event_in_its_scope(written):
    logs.configure("json", "info")
    with structlog.contextvars.bound_contextvars(replica="a"):
        log.info("inside")
        logging.getLogger("asyncpg").error("inside too")
    log.info("outside")
    assert [event.get("replica") for event in events(written)] == ["a", "a", None]


def test_events_below_the_level_are_dropped_and_reconfiguring_changes_the_level(written):
    logs.configure("json", "warning")
    log.info("hidden")
    logs.configure("json", "debug")
    log.debug("shown")
    assert [event["event"] for event in events(written)] == ["shown"]


def test_exception_is_structured_with_its_cause(written):
    logs.configure("json", "info")
    log.error("failed", exc_info=raise_from(ValueError("first"), KeyError("second")))
    (event,) = events(written)
    assert [part["exc_type"] for part in event["exception"]] == ["KeyError", "ValueError"]
    assert event["exception"][0]["frames"]


class Target:
    def __repr__(self):
        return f"Target(url='nats://{CANARY}@host', api_key='{CANARY}')"


class Broken:
    def __repr__(self):
        raise RuntimeError(CANARY)


LEAKS = {
    "message": lambda: log.info(f"connecting to redis://:{CANARY}@host:6379/0"),
    "format argument": lambda: log.info("connecting to %s", f"redis://:{CANARY}@host"),
    "value": lambda: log.info("x", url=f"postgres://rota:{CANARY}@host/db"),
    "secret's name": lambda: log.info("x", password=CANARY, DB_PASSWORD=CANARY, apiKey=CANARY, token=CANARY),
    "nested": lambda: log.info("x", settings={"redis": [{"secret": CANARY}, ({"auth_token": CANARY},)]}),
    "key of a dict": lambda: log.info("x", by_url={f"nats://u:{CANARY}@host": 1}),
    "bytes": lambda: log.info("x", payload=f"amqp://u:{CANARY}@host".encode()),
    "object": lambda: log.info("x", target=Target()),
    "object with a failing repr": lambda: log.info("x", target=Broken()),
    "very deep": lambda: log.info("x", deep=[[[[[[[[[[{"password": CANARY}]]]]]]]]]]),
    "header": lambda: log.info("x", headers=[("Authorization", f"Bearer {CANARY}")]),
    "header text": lambda: log.info(f"sent Authorization: Bearer {CANARY}, Basic {CANARY}"),
    "dsn": lambda: log.info(f"host=h user=rota password={CANARY} port=1"),
    "quoted dsn": lambda: log.info(f"host=h password='{CANARY} {CANARY}' port=1"),
    "query": lambda: log.info("x", url=f"https://host/path?user=a&token={CANARY}&b=c"),
    "several urls": lambda: log.info(f"nats://a:{CANARY}@one:1,nats://b:{CANARY}@two:2"),
    "odd characters": lambda: log.info(f"redis://:@/?#,'{CANARY}\"@host/0"),
    "exception": lambda: log.error("x", exc_info=raise_from(OSError(f"a://:{CANARY}@b"), LoginRefused(f"a://:{CANARY}@b"))),
    "stdlib": lambda: logging.getLogger("nats").error("to %s", f"nats://{CANARY}@host"),
    "stdlib exception": lambda: logging.getLogger("nats").error(
        "x", exc_info=raise_from(OSError(f"password={CANARY}"), OSError(f"a://u:{CANARY}@b"))
    ),
    "local variable": lambda: log.error("x", exc_info=raised_beside(CANARY)),
    "bound": lambda: log.bind(url=f"redis://u:{CANARY}@h").info("x"),
    "uncaught": lambda: sys.excepthook(*raise_from(OSError(f"a://:{CANARY}@b"), OSError(f"a://:{CANARY}@b"))),
    "uncaught in a thread": lambda: run_thread_raising(OSError(f"a://:{CANARY}@b")),
    "warning": lambda: logging.getLogger("py.warnings").warning("a://:%s@b", CANARY),
}  # fmt: skip


def run_thread_raising(error):
    def fail():
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


@pytest.mark.parametrize("shape", ["json", "console"])
@pytest.mark.parametrize("leak", LEAKS)
def test_secret_is_redacted_from_log_record(leak, shape, written):
    logs.configure(shape, "debug")
    LEAKS[leak]()
    text = written()
    assert text
    assert CANARY not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://rota:pw@host:5432/db?x=1", f"postgres://rota:{MASK}@host:5432/db?x=1"),
        ("nats://a:b@one,nats://c:d@two", f"nats://a:{MASK}@one,nats://c:{MASK}@two"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("write to me@example.org", "write to me@example.org"),
        ("the password was refused for user rota", "the password was refused for user rota"),
        ("host=a password=b port=1", f"host=a password={MASK} port=1"),
        (f"who is rota_9x4hq2mzt7_{'3n8c' * 8}0000000?", f"who is rota_9x4hq2mzt7_{MASK}?"),
        ("rota_accounting_declined_total", "rota_accounting_declined_total"),
    ],
)
def test_text_without_secrets_is_not_changed(text, shown):
    assert redact_text(text) == shown


def test_numeric_token_is_kept_as_a_fence_but_numeric_password_is_masked():
    assert redact({"fencing_token": 7, "password": 1234}) == {"fencing_token": 7, "password": MASK}


def test_names_similar_to_secrets_are_not_secret():
    assert not [name for name in ("key", "idempotency_key", "pass_count", "author", "code") if is_secret(name)]


def test_redacting_a_huge_text_takes_linear_time():
    import time

    hostile = "://" + "a-password-" * 50_000 + "://" * 50_000 + "token" * 50_000
    began = time.perf_counter()
    redact_text(hostile)
    assert time.perf_counter() - began < 2


def test_log_call_with_odd_values_or_closed_stderr_does_not_raise(written, monkeypatch):
    logs.configure("json", "info")
    cycle = []
    cycle.append(cycle)
    log.info("odd", lone="\udcff", huge=2**80, nan=float("nan"), cycle=cycle, broken=Broken())
    assert [event["event"] for event in events(written)] == ["odd"]
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.info("written to a closed stream")


def test_python_warnings_are_logged_as_events(written):
    logs.configure("json", "info")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest captures warnings itself, so call the hook directly.
        logging._showwarning("old way", DeprecationWarning, "file.py", 1)
    (event,) = events(written)
    assert "old way" in event["event"]
