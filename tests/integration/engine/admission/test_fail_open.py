"""Silence opens the gate only where an operator said so, never by accident, and never without a trace."""

import asyncio

import pytest

from rota.accounting.service import AccountingService
from rota.engine.admission.controller import FAIL_OPEN_TEXT, FAILED_OPEN, AdmissionController
from rota.engine.admission.decision import DeferAll
from rota.engine.completion.finisher import Finisher
from rota.engine.submission.submitter import Submitter
from rota.infra.audit.query import newest_entries
from rota.policy.decision_store import DecisionStore
from rota.queue import Queue
from tests.support.jobs import a_show, task
from tests.support.kernels import AWAY, OPEN, Hanging, Table
from tests.support.queue import sql

STATE = sql("""
SELECT state FROM rota.job WHERE pk_job = $1 UNION ALL SELECT state FROM rota.job_done WHERE pk_job = $1""")


@pytest.fixture
async def keeper(database):
    await a_show(database)
    finisher = Finisher(database, Queue(database), AccountingService(database, None))
    return AdmissionController(database, finisher, Table(), fail_open=lambda: True)


async def judged(keeper, topic):
    [one] = await Submitter(keeper.database, gate=DeferAll()).submit([task(topic=topic)])
    await keeper.decide_all([one.job])
    return await keeper.database.value(STATE, one.job)


@pytest.mark.parametrize("silence", [AWAY, OPEN, asyncio.CancelledError()])
async def test_silence_lets_a_job_run_with_a_warning_a_count_an_entry_and_a_word_that_says_so(
    database, keeper, silence, capsys
):
    keeper.kernel.fails = silence
    topic = f"silent_{type(silence).__name__}"
    assert await judged(keeper, topic) == "SCHEDULED"
    assert FAILED_OPEN.labels(topic)._value.get() == 1
    [entry] = [each for each in await newest_entries(database, most=5) if each.action == "policy.fail_open"]
    assert (entry.actor, entry.detail["because"]) == ("policy", FAIL_OPEN_TEXT)
    number = await database.value(sql("SELECT word FROM rota.job"))
    word = (await DecisionStore(database).read([number]))[number]
    assert (word.says, word.reason, word.snapshot) == ("ALLOW", FAIL_OPEN_TEXT, "")


@pytest.mark.parametrize("how", ["crash", "short", "deny", "odd", "throttle"])
async def test_a_policy_that_fails_or_says_anything_else_opens_nothing(database, keeper, how):
    keeper.kernel.miscounts = 1 if how == "short" else 0
    assert await judged(keeper, how) == ("DENIED" if how in ("deny", "odd") else "PENDING")
    assert [each for each in await newest_entries(database, most=5) if each.action == "policy.fail_open"] == []


async def test_a_server_that_ends_opens_nothing(database, keeper):
    keeper.kernel.fails = AWAY
    keeper.is_ending = True
    assert await judged(keeper, "allow") == "PENDING"


async def test_closed_is_the_default(database, keeper):
    closed = AdmissionController(database, keeper.finisher, Table())
    closed.kernel.fails = AWAY
    assert await judged(closed, "allow") == "PENDING"


async def test_a_kernel_that_hangs_is_silence(database, keeper, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.controller.KERNEL_TIMEOUT_S", 0.01)
    keeper.kernel = Hanging()
    assert await judged(keeper, "allow") == "SCHEDULED"
