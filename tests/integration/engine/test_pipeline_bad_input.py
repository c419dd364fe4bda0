"""Bad input end to end: invalid messages and misbehaving tasks. No process crashes, nothing is lost."""

import sys
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from rota.engine.completion.publisher import LATE_ENDS
from rota.engine.completion.report_consumer import INVALID_MESSAGES, RANGE_TOKENS_MAX, TOKENS_MAX
from rota.engine.completion.retry_decision import WORKER_LOST, decide_retry_after_loss
from rota.infra.nats import BusMessage
from rota.model import heartbeats
from rota.model.errors import RotaError
from rota.model.jobs.submission import RetrySpec
from rota.model.jobs.work import Work
from rota.model.protocol import (
    CANCEL_SUBJECT,
    HANDSHAKE_SUBJECT,
    HEARTBEAT_SUBJECT,
    JOBS_SUBJECT,
    LIVENESS_SUBJECT,
    LOG_SUBJECT,
    PROGRESS_SUBJECT,
    RELEASED_SUBJECT,
    RESULT_SUBJECT,
    SUBMIT_SUBJECT,
    Artifact,
    AssignedRange,
    Assignment,
    AttemptResult,
    AttemptStatus,
    CancelFrames,
    FramesReleased,
    Heartbeat,
    LogChunk,
    Progress,
    Register,
    Registered,
    Report,
    decode,
    encode,
)
from rota.model.settings.lifecycle import SchedulerSettings
from rota.placement.heartbeat_consumer import HeartbeatConsumer
from rota.queue.dead_letters import DeadLetterFilter
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

BOOKED = sql("SELECT count(*) FROM rota.proc")
TOKENS = sql("SELECT token FROM rota.proc")
ROOT = Path(__file__).parents[3]
UNKNOWN_WORKER = uuid4()
DONE_JOBS = sql("SELECT count(*) FROM rota.job_done")
UNREADABLE = {
    "empty": b"",
    "not msgpack": b"\xc1\xff\x00",
    "text": b"hello",
    "wrong type": msgspec.msgpack.encode({"a": [1, 2, {"b": None}]}),
    "truncated": encode(Report(UNKNOWN_WORKER, [(1, 1)]))[:-3],
    "deeply nested": b"\x91" * 100_000,
    "a number": msgspec.msgpack.encode(2**63),
    "nulls": b"\x00" * 1000,
}
IMPOSSIBLE = {
    "negative range": Report(UNKNOWN_WORKER, [(-1, 5)]),
    "oversized range": Report(UNKNOWN_WORKER, [(0, 2**40)]),
    "token out of range": Report(UNKNOWN_WORKER, ends=[AttemptResult(2**60, AttemptStatus.SUCCEEDED)]),
    "overlapping ranges": Report(UNKNOWN_WORKER, [(5, 2), (6, 1)]),
    "negative duration": Report(UNKNOWN_WORKER, [(5, 2)], took_ms=-1),
    "negative frame duration": Report(UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.FAILED, took_ms=-(2**40))]),
    "delay is NaN": Report(UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.FAILED, after_s=float("nan"))]),
    "NUL in a code": Report(UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.FAILED, code="a\0b")]),
    "NUL in a pointer": Report(UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, pointer="a\0b")]),
    "NUL in an artifact name": Report(
        UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, artifacts=(Artifact("a\0b"),))]
    ),
    "artifact outside its directory": Report(
        UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, artifacts=(Artifact("../b"),))]
    ),
    "line break in an artifact pointer": Report(
        UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, artifacts=(Artifact("b", "pg:\n"),))]
    ),
    "overlong code": Report(UNKNOWN_WORKER, ends=[AttemptResult(5, AttemptStatus.FAILED, code="c" * 5000)]),
    "too many frames": Report(
        UNKNOWN_WORKER, [(at * RANGE_TOKENS_MAX, RANGE_TOKENS_MAX) for at in range(TOKENS_MAX // RANGE_TOKENS_MAX + 1)]
    ),
}


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        yield cluster
        await cluster.quiet()


async def dead_letters(cluster):
    return await cluster.replica.queue.dead_letters.find(DeadLetterFilter(kind="message"))


def crashed(cluster):
    return {service.name: service.error for service in cluster.replica.supervisor.services if service.error is not None}


async def test_undecodable_reports_become_one_dead_letter_each_and_block_nothing(cluster):
    await cluster.worker()
    bad = [*UNREADABLE.values(), *map(encode, IMPOSSIBLE.values())]
    before = await cluster.submit("noop", frames=20)
    for number, data in enumerate(bad):
        await cluster.replica.bus.publish(BusMessage(subject=RESULT_SUBJECT, data=data, msg_id=f"bad:{number}"))
    after = await cluster.submit("noop", frames=20)
    assert await cluster.ended(before) == await cluster.ended(after) == "SUCCEEDED"

    async def all_arrived():
        return len(await dead_letters(cluster)) >= len(bad)

    await until(all_arrived, what="all dead letters")
    found = await dead_letters(cluster)
    assert len(found) == len({dead_letter.cause for dead_letter in found}) == len(bad)
    assert {dead_letter.reason for dead_letter in found} == {"unreadable_message"}
    assert not crashed(cluster)


async def test_reports_about_foreign_or_unknown_frames_change_nothing(cluster):
    await cluster.worker()
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=3)
    await cluster.running("x", 3)
    [worker] = cluster.replica.engine.registry.workers.values()
    foreign = Report(UNKNOWN_WORKER, list(worker.booked.token_ranges()))
    await cluster.replica.bus.publish(BusMessage(subject=RESULT_SUBJECT, data=encode(foreign), msg_id="stranger"))
    unknown = Report(worker.id, [(2**50, 5)], [AttemptResult(2**51, AttemptStatus.FAILED, error="never was")])
    await cluster.replica.bus.publish(BusMessage(subject=RESULT_SUBJECT, data=encode(unknown), msg_id="unknown"))
    other = await cluster.submit("noop")
    assert await cluster.ended(other) == "SUCCEEDED"
    assert await cluster.done(job) is None
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"
    assert not await dead_letters(cluster)


async def test_error_text_of_any_length_and_characters_is_stored_truncated(cluster):
    await cluster.worker()
    hanging("x")
    job = await cluster.submit("hang", "x")
    await cluster.running("x")
    [worker] = cluster.replica.engine.registry.workers.values()
    [(token, _)] = worker.booked.token_ranges()
    long = AttemptResult(token, AttemptStatus.FAILED, code="odd", error="e\0" * 200_000)
    await cluster.replica.bus.publish(
        BusMessage(subject=RESULT_SUBJECT, data=encode(Report(worker.id, ends=[long])), msg_id="odd")
    )
    assert await cluster.ended(job) == "FAILED"
    assert not crashed(cluster)


GATE = "sys.job.gate"
INVALID_SUBMISSIONS = {
    **UNREADABLE,
    "one megabyte of spaces": b" " * 1_000_000,
    "oversized input": b'{"show": "film", "layers": [{"task": "noop", "input": "%s"}]}' % (b"x" * 900_000),
    "too deep": b'{"show": "film", "layers": [{"task": "noop", "input": %s}]}' % (b"[" * 40 + b"]" * 40),
    "too many frames": b'{"show": "film", "layers": [{"task": "noop", "frames": 1000000000000}]}',
    "too many layers": b'{"show": "film", "layers": [%s]}' % b",".join([b'{"task": "noop"}'] * 1000),
    "NUL in a name": b'{"show": "film", "name": "a\\u0000b", "layers": [{"task": "noop"}]}',
    "unknown show": b'{"show": "nobody", "layers": [{"task": "noop"}]}',
}


@pytest.mark.parametrize(
    ("subject", "bodies", "reason"),
    [(SUBMIT_SUBJECT, INVALID_SUBMISSIONS, "submission_refused"), (GATE, UNREADABLE, "unreadable_message")],
)
async def test_undecodable_messages_become_one_dead_letter_each_and_block_nothing(cluster, subject, bodies, reason):
    await cluster.worker()
    bus = cluster.replica.bus
    for number, data in enumerate(bodies.values()):
        await bus.publish(BusMessage(subject=subject, data=data, msg_id=f"bad:{number}"))
    good = b'{"show": "film", "layers": [{"task": "noop"}], "idempotency_key": "behind them"}'
    await bus.publish(BusMessage(subject=SUBMIT_SUBJECT, data=good, msg_id="good"))

    async def all_arrived():
        return len(await dead_letters(cluster)) >= len(bodies) and await cluster.database.value(DONE_JOBS)

    await until(all_arrived, what="all dead letters and the job behind them")
    found = await dead_letters(cluster)
    assert sorted(dead_letter.payload for dead_letter in found) == sorted(bodies.values())
    assert {dead_letter.reason for dead_letter in found} == {reason}
    assert all(dead_letter.error for dead_letter in found), "a dead letter lacks its error"
    assert not crashed(cluster)


async def test_message_too_large_for_nats_is_refused_to_its_sender(cluster):
    for subject in (SUBMIT_SUBJECT, RESULT_SUBJECT):
        with pytest.raises(RotaError, match="bytes"):
            await cluster.replica.bus.publish(BusMessage(subject=subject, data=b" " * 100_000_000, msg_id="huge"))
    await cluster.worker()
    assert await cluster.ended(await cluster.submit("noop")) == "SUCCEEDED"
    assert not crashed(cluster)


async def test_result_of_the_maximum_message_size_is_stored(cluster):
    await cluster.worker()
    hanging("x")
    job = await cluster.submit("hang", "x")
    await cluster.running("x")
    [worker] = cluster.replica.engine.registry.workers.values()
    [(token, _)] = worker.booked.token_ranges()
    large = AttemptResult(token, AttemptStatus.SUCCEEDED, value=msgspec.msgpack.encode("v" * 900_000))
    await cluster.replica.bus.publish(
        BusMessage(subject=RESULT_SUBJECT, data=encode(Report(worker.id, ends=[large])), msg_id="big")
    )
    assert await cluster.ended(job) == "SUCCEEDED"
    [end] = await cluster.ends(job)
    assert end[-1] == large.value
    assert not crashed(cluster)


IMPOSSIBLE_HEARTBEATS = {
    "negative number": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", -1, 1, 100),
    "negative slots": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", 1, -1, 100),
    "negative token": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", 1, 1, 100, held=[(-5, 2)]),
    "oversized token range": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", 1, 1, 100, held=[(0, 2**53)]),
    "too many cores": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", 1, 2**62, 2**62, 2**62, 2**62),
    "load is NaN": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", 1, 1, 100, cpu_load=float("nan"), memory_load=1e308),
    "overlong names": Heartbeat(
        UNKNOWN_WORKER, "w\0" * 50_000, "p\0" * 50_000, 1, 1, 100, labels={"l" * 100_000: "\0"}
    ),
    "many labels": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", 1, 1, 100, labels={str(n): "x" for n in range(30_000)}),
    "many tokens": Heartbeat(UNKNOWN_WORKER, "w", "nowhere", 1, 1, 100, held=[(2 * n, 1) for n in range(60_000)]),
}


async def test_oversized_or_impossible_heartbeats_are_harmless(cluster):
    await cluster.worker()
    for beat in IMPOSSIBLE_HEARTBEATS.values():
        await cluster.replica.bus.publish_core(HEARTBEAT_SUBJECT, encode(msgspec.structs.replace(beat, worker=uuid4())))
    assert await cluster.ended(await cluster.submit("noop", frames=5)) == "SUCCEEDED"
    # The heartbeat consumer looks up all of them, too.
    consumer = HeartbeatConsumer(cluster.replica.bus, cluster.replica.engine.registry, cluster.database)
    await consumer.resolve_unknown_frames()
    assert not crashed(cluster)


async def test_impossible_release_and_log_messages_are_harmless(cluster):
    await cluster.worker()
    bus = cluster.replica.bus
    for run, frames in (((-1, 5), -3), ((0, 2**53), 2**62), ((2**63, 1), 0)):
        await bus.publish_core(RELEASED_SUBJECT, encode(FramesReleased(UNKNOWN_WORKER, [run], UNKNOWN_WORKER, frames)))
    for token, at, data in ((-1, 0, b"x"), (2**60, 0, b"x"), (1, -1, b"x"), (1, 2**60, b"x"), (1, 0, b"x" * 900_000)):
        await bus.publish_core(LOG_SUBJECT, encode(LogChunk(UNKNOWN_WORKER, token, "stdout", at, data)))
    assert await cluster.ended(await cluster.submit("noop", frames=5)) == "SUCCEEDED"
    assert not crashed(cluster)


@pytest.mark.parametrize(
    "subject",
    [
        HEARTBEAT_SUBJECT,
        PROGRESS_SUBJECT,
        LIVENESS_SUBJECT,
        CANCEL_SUBJECT,
        RELEASED_SUBJECT,
        LOG_SUBJECT,
        "sys.server.heartbeat",
    ],
)
async def test_undecodable_core_messages_are_ignored(cluster, subject):
    await cluster.worker()
    for data in UNREADABLE.values():
        await cluster.replica.bus.publish_core(subject, data)
    job = await cluster.submit("noop", frames=5)
    assert await cluster.ended(job) == "SUCCEEDED"
    assert not crashed(cluster)


async def test_impossible_progress_messages_are_ignored(cluster):
    await cluster.worker()
    refused = INVALID_MESSAGES.labels("progress")._value.get()
    for run in ((0, 2**52), (-5, 3), (2**53, 1)):
        await cluster.replica.bus.publish_core(PROGRESS_SUBJECT, encode(Progress(UNKNOWN_WORKER, [run])))
    await cluster.replica.bus.publish_core(
        PROGRESS_SUBJECT,
        encode(Progress(UNKNOWN_WORKER, [(0, RANGE_TOKENS_MAX)] * (2 * TOKENS_MAX // RANGE_TOKENS_MAX))),
    )
    for _ in range(20):
        await cluster.replica.bus.publish_core(PROGRESS_SUBJECT, encode(Progress(UNKNOWN_WORKER, [(0, 65_536)])))
    job = await cluster.submit("noop")
    assert await cluster.ended(job) == "SUCCEEDED"
    await until(
        lambda: INVALID_MESSAGES.labels("progress")._value.get() == refused + 4,
        what="the refused messages to be counted",
    )
    assert not crashed(cluster)


@pytest.mark.parametrize("bad", UNREADABLE)
async def test_undecodable_registration_is_refused_with_a_reason(cluster, bad):
    answer = decode(Registered, await cluster.replica.bus.request(HANDSHAKE_SUBJECT, UNREADABLE[bad]))
    assert answer.worker is None
    assert "is not a valid Register" in answer.refusal
    await cluster.worker()
    assert await cluster.ended(await cluster.submit("noop")) == "SUCCEEDED"


INVALID_REGISTRATIONS = {
    "NUL in its pool": Register("w", "a\0b", 1, 100),
    "NUL in its name": Register("a\0b", "local", 1, 100),
    "cores out of range": Register("w", "local", 1, 2**64 - 1),
    "overlong pool": Register("w", "p" * 100_000, 1, 100),
}


@pytest.mark.parametrize("kind", INVALID_REGISTRATIONS)
async def test_invalid_registration_never_crashes_a_server(cluster, kind):
    for _ in range(7):  # more often than a service may restart
        answer = decode(
            Registered, await cluster.replica.bus.request(HANDSHAKE_SUBJECT, encode(INVALID_REGISTRATIONS[kind]))
        )
        assert answer.worker is None
        assert answer.refusal
    assert not crashed(cluster)


async def test_cancel_with_impossible_token_ranges_does_not_harm_a_worker(cluster):
    await cluster.worker()
    gate = hanging("x")
    job = await cluster.submit("hang", "x")
    await cluster.running("x")
    [worker] = cluster.replica.engine.registry.workers
    for run in ((2**62, 2**63), (2**63, 2**64 - 1), (-(2**63), 1), (5, -1)):
        await cluster.replica.bus.publish_core(CANCEL_SUBJECT, encode(CancelFrames([run])))
    other = await cluster.submit("noop")
    assert await cluster.ended(other) == "SUCCEEDED"
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"
    assert worker in cluster.replica.engine.registry.workers, "it registered again"


async def test_worker_ignores_undecodable_assignments(cluster):
    await cluster.worker()
    [worker] = cluster.replica.engine.registry.workers
    ranges = [AssignedRange(2**40 + at * 4096, 4096, UNKNOWN_WORKER, UNKNOWN_WORKER, 1, 1, 0) for at in range(100)]
    endless = encode(Assignment([Work(task="noop")], ranges))
    late = LATE_ENDS._value.get()
    for number, data in enumerate([*UNREADABLE.values(), endless]):
        subject = JOBS_SUBJECT.format(worker)
        await cluster.replica.bus.publish(BusMessage(subject=subject, data=data, msg_id=f"bad:{number}"))
    assert await cluster.ended(await cluster.submit("noop", frames=5)) == "SUCCEEDED"
    assert worker in cluster.replica.engine.registry.workers, "it registered again"
    assert LATE_ENDS._value.get() == late, "it reported unknown frames"


class MisbehavingWorker:
    """A real worker process with an app of misbehaving tasks."""

    def __init__(self, cluster, process):
        self.cluster = cluster
        self.process = process

    @classmethod
    async def start(cls, cluster, spawn, folder, name="wild"):
        args = [
            "worker",
            "tests/integration/engine/pipeline_fuzz.py:app",
            "--name",
            name,
            "--slots",
            "16",
            "--cores",
            "16",
        ]
        env = {
            "ROTA_NATS_URL": cluster.urls.nats,
            "ROTA_NATS_PREFIX": cluster.settings.nats.prefix,
            "ROTA_WORKER_PROCESSES": "4",
            "ROTA_LOG_LEVEL": "error",
            "PYTHONPATH": str(ROOT / "src"),
        }
        process = await spawn(None, argv=[sys.executable, "-m", "rota.cli", *args], env=env)
        known = cluster.replica.engine.registry.workers
        await until(lambda: any(worker.name == name for worker in known.values()), within_s=20, what="the worker")
        return cls(cluster, process)

    async def end(self, task, **layer):
        """Run a job of one frame; returns its state, code, error and value."""
        job = await self.cluster.submit(task, layer={"kill_after_s": 0.5, **layer})
        state = await self.cluster.ended(job, within_s=60)
        ends = await self.cluster.ends(job)
        return state, ends[-1][3], ends[-1][4] or "", ends[-1][5]


async def test_misbehaving_tasks_harm_only_their_own_frames(cluster, spawn, tmp_path):
    misbehaving = await MisbehavingWorker.start(cluster, spawn, tmp_path)
    worker = next(iter(cluster.replica.engine.registry.workers))

    state, code, error, _ = await misbehaving.end("raises")
    assert (state, code) == ("FAILED", "exception")
    assert "out of luck" in error
    assert (await misbehaving.end("hangs", timeout_s=0.5))[:2] == ("TIMEOUT", "timeout")
    assert (await misbehaving.end("hangs_async", timeout_s=0.5))[:2] == ("TIMEOUT", "timeout")
    assert (await misbehaving.end("leaves_a_child", timeout_s=1))[0] == "TIMEOUT"
    state, _, _, value = await misbehaving.end("forks")
    assert (state, msgspec.msgpack.decode(value)) == ("SUCCEEDED", "from the parent")
    state, _, _, value = await misbehaving.end("prints")
    assert (state, msgspec.msgpack.decode(value)) == ("SUCCEEDED", "printed")
    assert (await misbehaving.end("exits"))[0] == "FAILED"
    assert (await misbehaving.end("kills_itself"))[0] == "FAILED"
    assert (await misbehaving.end("exits_async"))[0] == "FAILED"

    assert (await misbehaving.end("fine"))[0] == "SUCCEEDED"
    assert misbehaving.process.status is None, "the worker ended"
    assert worker in cluster.replica.engine.registry.workers, "it registered again"
    assert not _leftover_processes()


async def test_frame_that_kills_worker_after_worker_fails_without_its_neighbour(cluster, spawn, tmp_path, monkeypatch):
    cluster.replica.engine.finisher._pace = SchedulerSettings(max_worker_losses=1)
    monkeypatch.setattr(heartbeats, "SILENT_MIN_S", 1.0)
    first = await MisbehavingWorker.start(cluster, spawn, tmp_path, "first")
    neighbour = await cluster.submit("naps", 2.0, layer={"retries": RetrySpec(lost=5)})
    await until(lambda: cluster.database.value(BOOKED), what="the neighbour to be booked")
    poison = await cluster.submit("ends_its_worker")
    assert await first.process.wait() == 3
    second = await MisbehavingWorker.start(cluster, spawn, tmp_path, "second")
    assert await second.process.wait() == 3
    assert await cluster.ended(poison) == "FAILED"
    assert [end[2:4] for end in await cluster.ends(poison)] == [("RETRIED", "worker_lost"), ("FAILED", "worker_lost")]
    [dead_letter] = await cluster.replica.queue.dead_letters.find(DeadLetterFilter(kind="frame"))
    assert (dead_letter.job, dead_letter.reason, dead_letter.error) == (
        poison,
        "worker_lost",
        "The worker stopped responding.",
    )
    await MisbehavingWorker.start(cluster, spawn, tmp_path, "third")
    assert await cluster.ended(neighbour, within_s=30) == "SUCCEEDED"


async def test_layer_can_limit_worker_losses_per_frame(cluster):
    assert cluster.settings.scheduler.max_worker_losses == 10
    await cluster.worker()
    hanging("x")
    job = await cluster.submit("hang", "x", layer={"retries": RetrySpec(lost=0)})
    await cluster.running("x")
    await _lose_workers(cluster)
    assert await cluster.ended(job) == "FAILED"


def test_frames_lost_again_come_back_staggered_in_few_batches():
    first = {decide_retry_after_loss(token, before=0, most=9) for token in range(512)}
    assert {(ending.state, ending.delay_s) for ending in first} == {("RETRIED", 0.0)}
    pauses = [
        {decide_retry_after_loss(token, before=before, most=9).delay_s for token in range(512)} for before in (1, 2, 8)
    ]
    assert [len(each) for each in pauses] == [8, 8, 8]
    assert [(0.5 * top <= min(each), max(each) < top) for each, top in zip(pauses, (1, 2, 60), strict=True)] == [
        (True, True)
    ] * 3
    assert {decide_retry_after_loss(token, before=9, most=9).state for token in range(512)} == {"FAILED"}


async def _lose_workers(cluster):
    """End all booked frames as if their worker was lost."""
    ends = [
        AttemptResult(row["token"], AttemptStatus.FAILED, code=WORKER_LOST)
        for row in await cluster.database.rows(TOKENS)
    ]
    await cluster.replica.engine.finisher.finish_attempts({None: ends})


def _leftover_processes():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"left by a frame" in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found
