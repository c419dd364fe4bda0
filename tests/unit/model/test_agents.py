"""When an agent runs next, and how failures are classified."""

import asyncio
import errno
import json
import urllib.error

import grpc
import httpx
import pytest
import requests

from rota.model.agents import (
    AgentOutcome,
    AgentRunResult,
    AgentSpec,
    NextRun,
    is_missed,
    plan_first_run,
    plan_next_run,
    validate_agent,
)
from rota.model.errors import InvalidInput
from rota.model.failure_classes import FailureClass, classify
from rota.model.schedules import IntervalSchedule, OneTimeSchedule
from rota.model.settings.agents import FailureBackoffSettings

ON = FailureBackoffSettings(enabled=True, max_immediate_retries=2)
OFF = FailureBackoffSettings()
SPEC = AgentSpec(name="beat", schedule=IntervalSchedule(60_000), error_interval_ms=5_000)


def after(outcome=AgentOutcome.SUCCEEDED, *, spec=SPEC, acquired=1_000, now=2_000, streak=0, failure=None, **more):
    ended = AgentRunResult(
        outcome=outcome, acquired_ms=acquired, now_ms=now, slot_ms=more.pop("slot", 900), streak=streak, failure=failure
    )
    return plan_next_run(spec, ended, more.pop("backoff", OFF), more.pop("ratio", 0.0), more.pop("chance", 0.5))


def test_success_schedules_the_next_run_one_interval_after_acquisition():
    assert after() == NextRun(61_000, 61_000, 0)


def test_overrun_is_due_at_once_and_missed_slots_are_merged():
    assert after(now=500_000).due_ms == 500_000


def test_success_resets_the_failure_streak():
    assert after(streak=7).streak == 0


def test_failure_without_backoff_waits_for_the_error_interval():
    for failure in FailureClass:
        assert after(AgentOutcome.FAILED, failure=failure, streak=3) == NextRun(7_000, 900, 4)


def test_error_interval_defaults_to_the_interval():
    spec = AgentSpec(name="beat", schedule=IntervalSchedule(60_000))
    assert after(AgentOutcome.FAILED, spec=spec).due_ms == 62_000


@pytest.mark.parametrize(
    ("failure", "streak", "delay_ms"),
    [
        (FailureClass.PERMANENT_FORBIDDEN, 0, 1_800_000),
        (FailureClass.PERMANENT_FORBIDDEN, 9, 1_800_000),
        (FailureClass.THROTTLED, 0, 30_000),
        (FailureClass.THROTTLED, 1, 60_000),
        (FailureClass.THROTTLED, 4, 480_000),
        (FailureClass.THROTTLED, 5, 600_000),
        (FailureClass.THROTTLED, 1_000_000, 600_000),
        (FailureClass.TRANSIENT, 0, 0),
        (FailureClass.TRANSIENT, 1, 0),
        (FailureClass.TRANSIENT, 2, 5_000),
        (FailureClass.SERVER_ERROR, 1, 0),
        (FailureClass.SERVER_ERROR, 2, 5_000),
        (FailureClass.UNKNOWN, 0, 5_000),
    ],
)
def test_failure_class_decides_the_delay(failure, streak, delay_ms):
    assert after(AgentOutcome.FAILED, failure=failure, streak=streak, backoff=ON).due_ms == 2_000 + delay_ms


def test_jitter_varies_error_delays_in_both_directions_and_no_others():
    assert after(AgentOutcome.FAILED, ratio=0.1, chance=0.0).due_ms == 2_000 + 4_500
    assert after(AgentOutcome.FAILED, ratio=0.1, chance=0.999).due_ms == pytest.approx(2_000 + 5_500, abs=2)
    retried = after(AgentOutcome.FAILED, failure=FailureClass.TRANSIENT, backoff=ON, ratio=0.1, chance=0.9)
    assert retried.due_ms == 2_000
    assert after(ratio=0.1, chance=0.9).due_ms == 61_000


def test_cancelled_run_is_due_at_once_and_keeps_its_slot_and_streak():
    assert after(AgentOutcome.CANCELLED, streak=3) == NextRun(2_000, 900, 3)


def test_one_time_agent_runs_once_and_retries_after_a_failure():
    once = AgentSpec(name="boot", schedule=OneTimeSchedule(900), error_interval_ms=5_000)
    assert after(spec=once).due_ms is None
    assert after(AgentOutcome.FAILED, spec=once).due_ms == 7_000
    assert after(AgentOutcome.FAILED, spec=AgentSpec(name="boot", schedule=OneTimeSchedule(900))).due_ms is None


def test_new_agent_starts_at_once_plus_its_spread():
    assert plan_first_run(SPEC, 5_000) == NextRun(5_000, 5_000)
    assert plan_first_run(SPEC, 5_000, 700).due_ms == 5_700
    assert plan_first_run(AgentSpec(name="boot", schedule=OneTimeSchedule(9_000)), 5_000, 700).due_ms == 9_000


def test_slot_is_missed_only_with_catch_up_skip():
    skipping = AgentSpec(name="beat", schedule=IntervalSchedule(1), catch_up="skip")
    assert is_missed(skipping, 0, 60_001)
    assert not is_missed(skipping, 0, 60_000)
    assert not is_missed(SPEC, 0, 10**9)
    assert not is_missed(skipping, None, 10**9)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"name": ""}, "1 to 200 characters"),
        ({"name": "x" * 201}, "1 to 200 characters"),
        ({"name": "a\nb"}, "one line"),
        ({"name": "\ud800"}, "one line"),
        ({"name": "1700000000"}, "taken for a score"),
        ({"name": "1700000000.25"}, "taken for a score"),
        ({"group": "a b"}, "letters, digits"),
        ({"schedule": IntervalSchedule(0)}, "1 ms to 366 days"),
        ({"schedule": IntervalSchedule(-5)}, "1 ms to 366 days"),
        ({"schedule": OneTimeSchedule(-1)}, "1970 to 9999"),
        ({"timeout_ms": -1}, "timeout of agent"),
    ],
)
def test_invalid_agent_is_refused_with_a_reason(wrong, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        validate_agent(AgentSpec(**{"name": "beat", "schedule": IntervalSchedule(1000), **wrong}))


class Botocore(Exception):
    def __init__(self, code, status):
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class Aiohttp(Exception):
    def __init__(self, status):
        self.status = status


class Grpc(grpc.RpcError):
    def __init__(self, status):
        self._status = status

    def code(self):
        return self._status


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("cannot be shown")


def httpx_error(status):
    request = httpx.Request("GET", "http://x")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


def requests_error(status):
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("no", response=response)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (httpx_error(403), FailureClass.PERMANENT_FORBIDDEN),
        (httpx_error(429), FailureClass.THROTTLED),
        (httpx_error(503), FailureClass.SERVER_ERROR),
        (httpx_error(404), FailureClass.UNKNOWN),
        (httpx.ConnectError("no"), FailureClass.TRANSIENT),
        (httpx.ReadTimeout("no"), FailureClass.TRANSIENT),
        (requests_error(403), FailureClass.PERMANENT_FORBIDDEN),
        (requests_error(500), FailureClass.SERVER_ERROR),
        (requests.ConnectionError("no"), FailureClass.TRANSIENT),
        (Aiohttp(429), FailureClass.THROTTLED),
        (Aiohttp(599), FailureClass.SERVER_ERROR),
        (urllib.error.HTTPError("http://x", 403, "no", {}, None), FailureClass.PERMANENT_FORBIDDEN),
        (Botocore("ThrottlingException", 400), FailureClass.THROTTLED),
        (Botocore("SlowDown", 503), FailureClass.THROTTLED),
        (Botocore("AccessDeniedException", 400), FailureClass.PERMANENT_FORBIDDEN),
        (Botocore("InternalError", 500), FailureClass.SERVER_ERROR),
        (Botocore("NoSuchKey", 404), FailureClass.UNKNOWN),
        (Grpc(grpc.StatusCode.PERMISSION_DENIED), FailureClass.PERMANENT_FORBIDDEN),
        (Grpc(grpc.StatusCode.RESOURCE_EXHAUSTED), FailureClass.THROTTLED),
        (Grpc(grpc.StatusCode.UNAVAILABLE), FailureClass.TRANSIENT),
        (Grpc(grpc.StatusCode.INTERNAL), FailureClass.SERVER_ERROR),
        (Grpc(grpc.StatusCode.NOT_FOUND), FailureClass.UNKNOWN),
        (TimeoutError(), FailureClass.TRANSIENT),
        (ConnectionResetError(), FailureClass.TRANSIENT),
        (OSError(errno.ENETUNREACH, "no"), FailureClass.TRANSIENT),
        (FileNotFoundError(errno.ENOENT, "no"), FailureClass.UNKNOWN),
        (MemoryError(), FailureClass.THROTTLED),
        (RuntimeError("Rate exceeded for this account"), FailureClass.THROTTLED),
        (RuntimeError("request was THROTTLED"), FailureClass.THROTTLED),
        (RuntimeError("AccessDenied: no"), FailureClass.PERMANENT_FORBIDDEN),
        (ValueError("no luck"), FailureClass.UNKNOWN),
        (json.JSONDecodeError("no", "", 0), FailureClass.UNKNOWN),
        (UnprintableError(), FailureClass.UNKNOWN),
    ],
)
def test_failure_is_classified_by_its_contents(error, failure):
    assert classify(error) is failure


def test_classification_walks_the_chain_of_causes():
    """Spinnaker looked only at the top exception, so a wrapped 403 was retried every interval."""
    assert classify(caused(RuntimeError("sync failed"), httpx_error(403))) is FailureClass.PERMANENT_FORBIDDEN
    deep = caused(RuntimeError("a"), caused(RuntimeError("b"), requests_error(429)))
    assert classify(deep) is FailureClass.THROTTLED
    group = ExceptionGroup("several", [ValueError("no"), httpx_error(502)])
    assert classify(group) is FailureClass.SERVER_ERROR


def test_exception_context_is_classified_unless_suppressed():
    def raised(suppress):
        try:
            try:
                raise httpx_error(403)
            except httpx.HTTPStatusError:
                if suppress:
                    raise RuntimeError("no") from None
                raise RuntimeError("no")  # noqa: B904 - the test needs the implicit context
        except RuntimeError as error:
            return error

    assert classify(raised(suppress=False)) is FailureClass.PERMANENT_FORBIDDEN
    assert classify(raised(suppress=True)) is FailureClass.UNKNOWN


def test_cyclic_exception_chain_is_classified_as_unknown():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert classify(one) is FailureClass.UNKNOWN


def test_user_classifier_takes_precedence_and_its_errors_are_ignored():
    assert classify(ValueError(), lambda _error: "THROTTLED") is FailureClass.THROTTLED
    assert classify(httpx_error(403), lambda _error: None) is FailureClass.PERMANENT_FORBIDDEN
    assert classify(httpx_error(403), lambda _error: "NONSENSE") is FailureClass.PERMANENT_FORBIDDEN
    assert classify(httpx_error(403), lambda _error: 1 / 0) is FailureClass.PERMANENT_FORBIDDEN


def test_cancellation_raised_by_an_agent_is_classified_as_unknown():
    assert classify(asyncio.CancelledError()) is FailureClass.UNKNOWN
