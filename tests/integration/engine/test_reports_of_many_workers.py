"""Reports of many workers end in one transaction, and none of them can affect the frames of another worker."""

from collections import defaultdict
from types import SimpleNamespace
from uuid import uuid4

import pytest

from rota.engine.completion.finisher import Successes
from rota.engine.completion.report_consumer import LONGEST_MS, ReportConsumer, SucceededRanges, _by_duration
from rota.engine.dispatch.series import WorkDurations
from rota.model.protocol import AttemptResult, AttemptStatus, Report, encode
from rota.model.token_ranges import count_tokens, to_ranges
from tests.support.dispatch import Rig
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging

PROCS = sql("SELECT token, pk_host, pk_layer FROM rota.proc ORDER BY token")
TOOK = sql("SELECT took_ms FROM rota.layer")
TOMBSTONES = sql("SELECT token_first, token_last FROM rota.proc_grave ORDER BY token_first")
VALUES = sql("SELECT value FROM rota.frame_end")
ENDS = sql("SELECT frame, attempt, token, state, value, value_at, took_ms, pk_host FROM rota.frame_end ORDER BY token")
STATEMENTS = "rota.frames_succeed_each"


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm


async def booked_on_three(cluster, *jobs):
    """Jobs of six frames each that run on three workers; the tokens by worker."""
    hanging("x")
    for name in ("a", "b", "c"):
        await cluster.worker(name, slots=8)
    submitted = [await cluster.submit("hang", "x", frames=6, **job) for job in jobs or ({},)]
    await cluster.running("x", 6 * len(submitted))
    tokens = defaultdict(list)
    for row in await cluster.database.rows(PROCS):
        tokens[row["pk_host"]].append(row["token"])
    assert len(tokens) == 3
    return submitted, tokens


def count_statements(database, monkeypatch):
    """The texts of statements that return rows, from now on."""
    calls = []

    async def rows(statement, *args, real=database.rows, **more):
        calls.append(statement.text)
        return await real(statement, *args, **more)

    monkeypatch.setattr(database, "rows", rows)
    return calls


async def test_frames_of_many_workers_end_in_one_call(cluster, monkeypatch):
    [job], tokens = await booked_on_three(cluster)
    calls = count_statements(cluster.replica.engine.database, monkeypatch)
    result = await cluster.replica.engine.finisher.finish_succeeded(
        {worker: to_ranges(each) for worker, each in tokens.items()}
    )
    assert sum(STATEMENTS in text for text in calls) == 1
    assert {worker: count_tokens(freed) for worker, freed in result.freed.items()} == {
        worker: len(each) for worker, each in tokens.items()
    }
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_adjacent_frames_of_many_workers_leave_one_tombstone_per_claim(cluster):
    [job], tokens = await booked_on_three(cluster)
    await cluster.replica.engine.finisher.finish_succeeded({worker: to_ranges(each) for worker, each in tokens.items()})
    ended = to_ranges(token for each in tokens.values() for token in each)
    rows = await cluster.database.rows(TOMBSTONES)
    assert [(row["token_first"], row["token_last"] - row["token_first"] + 1) for row in rows] == ended
    assert len(ended) < sum(len(to_ranges(each)) for each in tokens.values())
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_reports_of_sixty_workers_end_in_one_transaction(database, redis, monkeypatch):
    rig = await Rig(database, redis).open()
    await rig.show("film", {"farm": 120})
    rig.route({"*": ("farm",)})
    for number in range(60):
        rig.beat(f"w{number}", slots=2, cores=200, capabilities=("task.noop",))
    jobs = [await rig.submit("film", frames=60, job={"priority": priority}) for priority in (5, 8)]
    await rig.settle()
    tokens = defaultdict(list)
    for row in await database.rows(PROCS):
        tokens[row["pk_host"]].append(row["token"])
    assert {len(each) for each in tokens.values()} == {2}
    waits = await rig.submit("film")
    await rig.settle()
    [full, limit] = sorted((await rig.explainer.explain(waits)).reasons, key=lambda reason: reason.code)
    assert (full.code, full.considered, limit.code, limit.amounts.have) == (
        "pool_overloaded",
        60,
        "quota_subscription",
        120,
    )
    calls, ended = count_statements(database, monkeypatch), []
    consumer = ReportConsumer(rig.dispatcher.finisher, ended.append, WorkDurations())
    reports = [Report(worker=worker, done=to_ranges(each), took_ms=20) for worker, each in tokens.items()]
    answers = await consumer.handle([SimpleNamespace(data=encode(report)) for report in reports])
    assert set(answers) == {None}
    assert sum(STATEMENTS in text for text in calls) == 1
    assert sum(count_tokens(freed) for result in ended for freed in result.freed.values()) == 120
    assert [(await rig.explainer.explain(job)).state for job in jobs] == ["SUCCEEDED"] * 2


async def test_false_report_of_one_worker_affects_no_frame_of_another(cluster):
    [job], tokens = await booked_on_three(cluster)
    first, second, third = tokens
    engine = cluster.replica.engine
    claimed = {
        first: to_ranges(tokens[first]),
        second: to_ranges([*tokens[second], *tokens[first], *tokens[third]]),
        third: to_ranges(tokens[third][:1]),
    }
    result = await engine.finisher.finish_succeeded(claimed)
    assert result.late == len(tokens[first]) + len(tokens[third])
    left = [row["token"] for row in await cluster.database.rows(PROCS)]
    assert left == tokens[third][1:]
    assert {worker: count_tokens(freed) for worker, freed in result.freed.items()} == {
        first: len(tokens[first]),
        second: len(tokens[second]),
        third: 1,
    }
    await engine.finisher.finish_succeeded({third: to_ranges(left)})
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_late_frame_of_one_worker_costs_one_more_call_for_all(cluster, monkeypatch):
    [job], tokens = await booked_on_three(cluster)
    finisher = cluster.replica.engine.finisher
    late = next(iter(tokens))
    await finisher.finish_succeeded({late: to_ranges(tokens[late][:1])})
    calls = count_statements(cluster.replica.engine.database, monkeypatch)
    result = await finisher.finish_succeeded({worker: to_ranges(each) for worker, each in tokens.items()})
    assert sum(STATEMENTS in text for text in calls) == 2
    assert result.late == 1
    assert sum(map(count_tokens, result.freed.values())) == 5
    assert await cluster.ended(job) == "SUCCEEDED"


def results(tokens, value=None):
    """A result each, which tells its token unless a value is given."""
    return [
        AttemptResult(token, AttemptStatus.SUCCEEDED, value or b"%d" % token, took_ms=token % 1000) for token in tokens
    ]


async def test_results_of_many_workers_are_stored_in_one_call(cluster, monkeypatch):
    [job], tokens = await booked_on_three(cluster)
    calls = count_statements(cluster.replica.engine.database, monkeypatch)
    finisher = cluster.replica.engine.finisher
    reported = {worker: results(each) for worker, each in tokens.items()}
    assert all(finisher.is_plain_result(end) for each in reported.values() for end in each)
    result = await finisher.finish_results(reported)
    assert sum("frames_succeed_with_results" in text for text in calls) == 1
    assert {worker: count_tokens(freed) for worker, freed in result.freed.items()} == {
        worker: len(each) for worker, each in tokens.items()
    }
    assert await cluster.ended(job) == "SUCCEEDED"
    rows = await cluster.database.rows(ENDS)
    assert {row["frame"] for row in rows} == set(range(6))
    assert {(row["token"], row["value"], row["took_ms"], row["pk_host"]) for row in rows} == {
        (token, b"%d" % token, token % 1000, worker) for worker, each in tokens.items() for token in each
    }
    assert {(row["attempt"], row["state"], row["value_at"]) for row in rows} == {(1, "SUCCEEDED", None)}


async def test_results_that_are_reported_again_are_late_and_stored_once(cluster):
    [job], tokens = await booked_on_three(cluster)
    finisher = cluster.replica.engine.finisher
    worker, mine = next((worker, each) for worker, each in tokens.items() if len(each) > 1)
    await finisher.finish_results({worker: results(mine[:1])})
    result = await finisher.finish_results({each: results(found, b"again") for each, found in tokens.items()})
    assert result.late == 1
    again = await finisher.finish_results({worker: results(mine, b"third")})
    assert again.late == len(mine)
    assert await cluster.ended(job) == "SUCCEEDED"
    stored = {row["token"]: row["value"] for row in await cluster.database.rows(ENDS)}
    assert stored == {token: b"again" for each in tokens.values() for token in each} | {mine[0]: b"%d" % mine[0]}


async def test_results_of_frames_whose_claim_refuses_them_are_not_stored(cluster):
    _, tokens = await booked_on_three(cluster)
    engine = cluster.replica.engine
    mine = next(iter(tokens.values()))
    await engine.queue.complete(mine[:1])
    result = await engine.finisher.finish_results({each: results(found) for each, found in tokens.items()})
    assert result.late == 1
    assert mine[0] not in {row["token"] for row in await cluster.database.rows(ENDS)}
    assert await cluster.database.rows(PROCS) == []


@pytest.mark.parametrize("finish", ["finish_results", "finish_attempts"])
async def test_forged_value_of_another_worker_is_not_stored(cluster, finish):
    [job], tokens = await booked_on_three(cluster)
    first, second, _ = tokens
    reported = {worker: results(each, b"\x01") for worker, each in tokens.items()}
    reported[second] = [*results(tokens[first], b"\x02"), *reported[second]]
    result = await getattr(cluster.replica.engine.finisher, finish)(reported)
    assert result.late == len(tokens[first])
    assert await cluster.ended(job) == "SUCCEEDED"
    assert [row["value"] for row in await cluster.database.rows(VALUES)] == [b"\x01"] * 6


async def test_failures_and_results_of_one_report_end_in_two_calls(cluster):
    _, tokens = await booked_on_three(cluster)
    ended = []
    consumer = ReportConsumer(cluster.replica.engine.finisher, ended.append, WorkDurations())
    failed = {each[0] for each in tokens.values()}
    reports = [
        Report(
            worker=worker,
            ends=tuple(
                AttemptResult(end.token, AttemptStatus.FAILED, code="exception", error="no")
                if end.token in failed
                else end
                for end in results(each)
            ),
        )
        for worker, each in tokens.items()
    ]
    assert set(await consumer.handle([SimpleNamespace(data=encode(report)) for report in reports])) == {None}
    assert [sum(map(count_tokens, result.freed.values())) for result in ended] == [6 - len(failed), len(failed)]
    states = {row["token"]: row["state"] for row in await cluster.database.rows(ENDS)}
    assert states == {token: "FAILED" if token in failed else "SUCCEEDED" for each in tokens.values() for token in each}


async def test_frames_that_end_between_two_tries_do_not_keep_the_others_from_ending(cluster, monkeypatch):
    [job], tokens = await booked_on_three(cluster)
    finisher = cluster.replica.engine.finisher
    worker, mine = next((worker, each) for worker, each in tokens.items() if len(each) > 1)
    others = {each: to_ranges(found) for each, found in tokens.items() if each != worker}
    tries, succeed = [], finisher._succeed

    async def end_one_first(successes):
        tries.append(successes)
        if len(tries) == 2:
            await succeed(Successes.without_results({worker: to_ranges(mine[:1])}, 0))
        return await succeed(successes)

    monkeypatch.setattr(finisher, "_succeed", end_one_first)
    result = await finisher.finish_succeeded({worker: [*to_ranges(mine), (2**50, 1)]})
    monkeypatch.undo()
    assert (len(tries), result.late) == (3, 2)
    await finisher.finish_succeeded(others)
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_ends_of_several_kinds_lock_their_claims_in_one_order(cluster, monkeypatch):
    _, tokens = await booked_on_three(cluster)
    queue, calls = cluster.replica.engine.queue, []

    def recorded(name, real):
        async def record(*given, **more):
            calls.append((name, sorted(given[0]) if name == "lock_claims" else None))
            return await real(*given, **more)

        monkeypatch.setattr(queue, name, record)

    for name in ("lock_claims", "complete", "fail"):
        recorded(name, getattr(queue, name))
    kinds = (AttemptStatus.SUCCEEDED, AttemptStatus.FAILED)
    ends = {worker: [AttemptResult(each[0], kind)] for kind, (worker, each) in zip(kinds, tokens.items(), strict=False)}
    await cluster.replica.engine.finisher.finish_attempts(ends)
    assert calls[0] == ("lock_claims", sorted(each[0].token for each in ends.values()))
    assert len(calls) == 3


def test_durations_are_divided_between_frames_that_took_about_as_long():
    short, long, forged = SucceededRanges(), SucceededRanges(), SucceededRanges()
    short.add([(0, 4)], 4, 40)
    long.add([(10, 2)], 2, 7_200_000)
    forged.add([(20, 1)], 1, 2**53 - 1)
    workers = [uuid4() for _ in range(3)]
    groups = _by_duration(dict(zip(workers, (short, long, forged), strict=True)))
    assert [list(group.values()) for group in groups] == [[short], [long], [forged]]
    assert forged.took_ms == LONGEST_MS


async def test_duration_of_a_report_is_divided_between_its_layers(cluster):
    _, tokens = await booked_on_three(cluster, {}, {"priority": 3})
    last = {row["pk_layer"]: row["token"] for row in await cluster.database.rows(PROCS)}.values()
    most = {worker: to_ranges(set(each).difference(last)) for worker, each in tokens.items()}
    await cluster.replica.engine.finisher.finish_succeeded(most, 9000)
    assert [row["took_ms"] for row in await cluster.database.rows(TOOK)] == [4500, 4500]
