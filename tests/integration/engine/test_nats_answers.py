"""No answer of NATS ends a service, a worker or a running frame, whatever it was asked for; work goes on afterwards.

`tests/unit/infra/test_error_reactions.py` lists the reaction to each answer; here a replica and a worker get them.
"""

import asyncio
from urllib.parse import urlsplit

import pytest

from rota.infra.service import ServiceState
from tests.support.harness.effort import effort
from tests.support.harness.nats_proxy import (
    CONSUMER_DELETED,
    NO_RESPONDERS,
    NatsProxy,
    api_error,
    server_error,
    silence,
    status,
)
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

RESUME_S = 10.0
"""Work goes on within this time after the last answer."""
FULL = {
    "insufficient_resources": api_error(503, 10023, "insufficient resources"),
    "insufficient_storage": api_error(500, 10047, "insufficient storage resources available"),
    "account_limits": api_error(400, 10002, "resource limits exceeded for account"),
}
API_ERRORS = {
    "no_responders": NO_RESPONDERS,
    "timeout": silence,
    **FULL,
    "temporarily_unavailable": api_error(503, 10008, "JetStream system temporarily unavailable"),
    "not_leader": api_error(500, 10009, "JetStream cluster can not handle request"),
    "stream_offline": api_error(500, 10118, "stream is offline"),
    "too_many_requests": api_error(429, 10167, "too many requests"),
    "stream_not_found": api_error(404, 10059, "stream not found"),
    "consumer_not_found": api_error(404, 10014, "consumer not found"),
    "jetstream_off": api_error(503, 10076, "JetStream not enabled"),
    "bad_request": api_error(400, 10003, "bad request"),
}
ANSWERS = {
    "publish": {
        "no_responders": NO_RESPONDERS,
        "timeout": silence,
        **FULL,
        "maximum_messages": api_error(503, 10077, "maximum messages exceeded"),
        "maximum_bytes": api_error(503, 10077, "maximum bytes exceeded"),
        "temporarily_unavailable": API_ERRORS["temporarily_unavailable"],
        "stream_not_found": API_ERRORS["stream_not_found"],
        "stream_offline": API_ERRORS["stream_offline"],
    },
    "pull": {
        "no_responders": NO_RESPONDERS,
        "timeout": silence,
        "consumer_deleted": CONSUMER_DELETED,
        "leadership_change": status(409, "Leadership Change"),
        "server_shutdown": status(409, "Server Shutdown"),
        "max_waiting": status(409, "Exceeded MaxWaiting"),
        "bad_request": status(400, "Bad Request"),
    },
    "ack": {
        "timeout": silence,
        "no_permission": server_error('Permissions Violation for Publish to "$JS.ACK.x"'),
        "connection_closed": server_error("maximum subscriptions exceeded"),
    },
    "request": API_ERRORS,
    "create": {**API_ERRORS, "maximum_consumers": api_error(400, 10026, "maximum consumers limit reached")},
    "register": {"no_responders": NO_RESPONDERS, "timeout": silence},
}
SOME = {
    "publish": ["insufficient_storage", "timeout"],
    "pull": ["consumer_deleted", "bad_request"],
    "ack": ["timeout"],
    "request": ["insufficient_storage"],
    "create": ["stream_not_found", "maximum_consumers"],
    "register": ["no_responders"],
}
CASES = [(call, name) for call, answers in ANSWERS.items() for name in answers if name in effort(SOME[call], answers)]
ANSWERS_MIN = {"publish": 8, "pull": 12, "ack": 4, "request": 5, "create": 8, "register": 2}
"""Enough that each caller has repeated its call."""


def ended(farm):
    """Services that have crashed or failed. The restart of a worker loses frames, that of `feed` events: any end."""
    services = farm.replica.supervisor.services
    crashed = [each for each in services if each._crashes or each.state is ServiceState.FAILED]
    kept = [each for each in services if each.name == "feed" and each.error is not None]
    workers = [each for supervisor in farm.worker_supervisors for each in supervisor.services if each.error is not None]
    return {each.name: repr(each.error) for each in [*crashed, *kept, *workers]}


@pytest.mark.parametrize(("call", "name"), CASES)
async def test_answer_of_nats_ends_no_service_and_no_frame_and_work_goes_on(
    database_url, redis_url, nats_url, bus_prefix, proxy, call, name
):
    at = urlsplit(nats_url)
    between = await proxy(at.hostname, at.port, NatsProxy)
    answers = {call: ANSWERS[call][name]}
    if call == "create":
        answers["pull"] = CONSUMER_DELETED  # readers create their consumers again
    async with Farm(database_url, redis_url, between.url(nats_url), bus_prefix) as farm, asyncio.TaskGroup() as tasks:
        await farm.show()
        await farm.worker(slots=4)
        long, short = hanging("long"), hanging("short")
        long_job = await farm.submit("hang", "long", frames=2)
        await farm.running("long", 2)
        short_job = await farm.submit("hang", "short", frames=12)
        await farm.running("short", 2)
        between.answer(**answers)
        if call in ("pull", "request", "create"):
            between.reset()  # readers ask for their streams and pull again
        late = tasks.create_task(farm.worker("late", slots=4)) if call == "register" else None
        short.set()
        await until(lambda: between.answered[call] >= ANSWERS_MIN[call], within_s=30, what=f"answers to {call}")
        between.heal()
        assert await farm.ended(short_job, within_s=RESUME_S) == "SUCCEEDED"
        if late is not None:
            await late
        long.set()
        assert await farm.ended(long_job, within_s=RESUME_S) == "SUCCEEDED"
        assert ended(farm) == {}
        assert (seen["began"].count("long"), seen["began"].count("short"), seen.get("stopped")) == (2, 12, None)
        await farm.quiet()
