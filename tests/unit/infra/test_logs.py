"""What is logged, how it looks, and that no secret is in it."""

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
    """What stands on stderr since it was last asked; logging is as it was afterwards."""
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


def test_an_event_is_one_line_of_json_with_time_level_logger_and_values(written):
    logs.configure("json", "info")
    log.warning("lease_lost", name="leader\nnext", fence=7)
    (event,) = events(written)
    assert list(event)[:4] == ["timestamp", "level", "logger", "event"]
    assert event["timestamp"].endswith("Z")
    assert (event["level"], event["logger"], event["event"]) == ("warning", "tests.logs", "lease_lost")
    assert (event["name"], event["fence"]) == ("leader\nnext", 7)


def test_the_standard_library_takes_the_same_way(written):
    logs.configure("json", "info")
    logging.getLogger("uvicorn.error").warning("port %d", 80)
    logging.getLogger("nats").debug("too low to be shown")
    (event,) = events(written)
    assert (event["event"], event["logger"], event["level"]) == ("port 80", "uvicorn.error", "warning")


def test_a_record_that_does_not_format_is_still_logged(written):
    logs.configure("json", "info")
    logging.getLogger("redis").error("%d of %d", "one")  # noqa: PLE1206
    (event,) = events(written)
    assert "%d of %d" in event["event"]
    assert "one" in event["event"]


def test_bound_context_is_in_every_event_below(written):
    logs.configure("json", "info")
    with structlog.contextvars.bound_contextvars(replica="a"):
        log.info("inside")
        logging.getLogger("asyncpg").error("inside too")
    log.info("outside")
    assert [event.get("replica") for event in events(written)] == ["a", "a", None]


def test_levels_below_the_chosen_one_are_silent_and_configuring_again_changes_it(written):
    logs.configure("json", "warning")
    log.info("hidden")
    logs.configure("json", "debug")
    log.debug("shown")
    assert [event["event"] for event in events(written)] == ["shown"]


def test_an_exception_is_structured_with_its_cause(written):
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
    "object that has no repr": lambda: log.info("x", target=Broken()),
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
def test_no_secret_reaches_the_log_from_a(leak, shape, written):
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
def test_what_is_no_secret_stays_readable(text, shown):
    assert redact_text(text) == shown


def test_numbers_under_a_token_stay_since_fences_are_counted_but_a_numeric_password_goes():
    assert redact({"fencing_token": 7, "password": 1234}) == {"fencing_token": 7, "password": MASK}


def test_names_that_only_sound_near_are_shown():
    assert not [name for name in ("key", "idempotency_key", "pass_count", "author", "code") if is_secret(name)]


def test_redacting_a_huge_text_takes_linear_time():
    import time

    hostile = "://" + "a-password-" * 50_000 + "://" * 50_000 + "token" * 50_000
    began = time.perf_counter()
    redact_text(hostile)
    assert time.perf_counter() - began < 2


def test_a_log_call_never_fails_its_caller(written, monkeypatch):
    logs.configure("json", "info")
    cycle = []
    cycle.append(cycle)
    log.info("odd", lone="\udcff", huge=2**80, nan=float("nan"), cycle=cycle, broken=Broken())
    assert [event["event"] for event in events(written)] == ["odd"]
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.info("nobody reads this")


def test_warnings_are_events_too(written):
    logs.configure("json", "info")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest records warnings itself, so the hook is called as Python would call it.
        logging._showwarning("old way", DeprecationWarning, "file.py", 1)
    (event,) = events(written)
    assert "old way" in event["event"]
