"""Declaring agents."""

from datetime import UTC, datetime

import pytest

from rota import Rota
from rota.model.errors import InvalidInput
from rota.model.failure_classes import FailureClass, classify
from rota.model.schedules import IntervalSchedule, OneTimeSchedule


@pytest.fixture
def app():
    return Rota()


def test_agent_function_stays_callable(app):
    @app.agent(every="30s", timeout="2min", error_interval=5)
    def beat():
        return 42

    assert beat() == 42
    agent = app.recurring["beat"]
    assert agent.spec.schedule == IntervalSchedule(30_000)
    assert (agent.spec.timeout_ms, agent.spec.error_interval_ms) == (120_000, 5_000)
    assert not agent.is_async
    assert agent.call(None) == 42


def test_agent_function_may_take_its_run(app):
    @app.agent(every=1)
    async def beat(run, more=1):
        return run, more

    assert app.recurring["beat"].takes_run
    assert app.recurring["beat"].is_async


def test_one_time_agent_needs_a_time_zone(app):
    app.agent(at=datetime(2030, 1, 1, tzinfo=UTC), name="party")(lambda: None)
    assert app.recurring["party"].spec.schedule == OneTimeSchedule(1_893_456_000_000)
    with pytest.raises(InvalidInput, match="has no time zone"):
        app.agent(at=datetime(2030, 1, 1), name="other")(lambda: None)  # noqa: DTZ001


def test_task_declared_as_an_agent_is_submitted(app):
    @app.agent(every="1h", name="hourly")
    @app.task(cores=2)
    def report(day=None):
        return day

    spec = app.recurring["hourly"].spec
    assert app.recurring["hourly"].function is None
    assert (spec.job.layers[0].task, spec.job.layers[0].cores) == ("report", 2)
    assert report("monday") == "monday"


def test_task_call_declared_as_an_agent_is_submitted_with_its_arguments(app):
    @app.task
    def report(day):
        return day

    app.agent(every="1d", name="mondays")(report.call("monday"))
    assert app.recurring["mondays"].spec.job.layers[0].input == {"args": ["monday"], "kwargs": {}}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "needs exactly one schedule"),
        ({"every": 1, "at": datetime(2030, 1, 1, tzinfo=UTC)}, "needs exactly one schedule"),
        ({"every": 0}, "1 ms to 366 days"),
        ({"every": -1}, "is not a valid duration"),
        ({"every": "soon"}, "is not a valid duration"),
        ({"every": 1, "name": "12345"}, "taken for a score"),
        ({"every": 1, "group": "a b"}, "agent group"),
    ],
)
def test_invalid_agent_options_are_refused_with_a_reason(app, options, complaint):
    def beat():
        return None

    with pytest.raises(InvalidInput, match=complaint):
        app.agent(**options)(beat)
    assert not app.recurring


def test_duplicate_agent_name_is_refused(app):
    app.agent(every=1, name="beat")(lambda: None)
    with pytest.raises(InvalidInput, match="Agent 'beat' is declared twice"):
        app.agent(every=1, name="beat")(lambda: None)


def test_agent_function_with_more_arguments_is_refused(app):
    with pytest.raises(InvalidInput, match="accept none, or one"):
        app.agent(every=1, name="beat")(lambda _run, _more: None)


def test_app_has_one_failure_classifier(app):
    @app.classify_failure
    def kind(error):
        return "THROTTLED" if isinstance(error, KeyError) else None

    assert classify(KeyError("x"), app.failure_hook) is FailureClass.THROTTLED
    assert classify(TimeoutError(), app.failure_hook) is FailureClass.TRANSIENT
    with pytest.raises(InvalidInput, match="already has a failure hook"):
        app.classify_failure(kind)
