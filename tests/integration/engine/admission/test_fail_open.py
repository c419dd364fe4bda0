"""Fail-open applies only when configured, only to an unavailable kernel, and always leaves a record."""

import asyncio

import pytest

from rota.engine.admission.controller import FAIL_OPEN_TEXT, FAILED_OPEN, AdmissionController
from rota.engine.admission.decision import DeferAll
from rota.engine.submission.submitter import Submitter
from rota.infra.audit.query import newest_entries
from rota.policy.decision_store import DecisionStore
from tests.support.jobs import NO_EVENTS, a_show, completions, task
from tests.support.kernels import AWAY, OPEN, Hanging, Table
from tests.support.queue import sql

STATE = sql("""
SELECT state FROM rota.job WHERE pk_job = $1 UNION ALL SELECT state FROM rota.job_done WHERE pk_job = $1""")


@pytest.fixture
async def controller(database):
    await a_show(database)
    publisher = completions(database)
    return AdmissionController(database, publisher, Table(), fail_open=lambda: True)


async def submit_and_decide(controller, topic):
    [one] = await Submitter(controller.database, NO_EVENTS, gate=DeferAll()).submit([task(topic=topic)])
    await controller.decide_all([one.job])
    return await controller.database.value(STATE, one.job)


@pytest.mark.parametrize("outage", [AWAY, OPEN, asyncio.CancelledError()])
async def test_fail_open_on_an_unavailable_kernel_schedules_the_job_and_records_it(
    database, controller, outage, capsys
):
    controller.kernel.fails = outage
    topic = f"silent_{type(outage).__name__}"
    assert await submit_and_decide(controller, topic) == "SCHEDULED"
    assert FAILED_OPEN.labels(topic)._value.get() == 1
    [entry] = [each for each in await newest_entries(database, most=5) if each.action == "policy.fail_open"]
    assert (entry.actor, entry.detail["because"]) == ("policy", FAIL_OPEN_TEXT)
    number = await database.value(sql("SELECT word FROM rota.job"))
    decision = (await DecisionStore(database).read([number]))[number]
    assert (decision.says, decision.reason, decision.snapshot) == ("ALLOW", FAIL_OPEN_TEXT, "")


@pytest.mark.parametrize("how", ["crash", "short", "deny", "odd", "throttle"])
async def test_fail_open_does_not_apply_when_the_policy_crashes_or_answers(database, controller, how):
    controller.kernel.miscounts = 1 if how == "short" else 0
    assert await submit_and_decide(controller, how) == ("DENIED" if how in ("deny", "odd") else "PENDING")
    assert [each for each in await newest_entries(database, most=5) if each.action == "policy.fail_open"] == []


async def test_stopping_server_does_not_fail_open(database, controller):
    controller.kernel.fails = AWAY
    controller.is_ending = True
    assert await submit_and_decide(controller, "allow") == "PENDING"


async def test_default_fail_mode_is_closed(database, controller):
    closed = AdmissionController(database, controller.publisher, Table())
    closed.kernel.fails = AWAY
    assert await submit_and_decide(closed, "allow") == "PENDING"


async def test_hanging_kernel_counts_as_unavailable(database, controller):
    controller.kernel_timeout_s = 0.01
    controller.kernel = Hanging()
    assert await submit_and_decide(controller, "allow") == "SCHEDULED"
