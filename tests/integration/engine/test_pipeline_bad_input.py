"""Bad input from end to end: messages that make no sense, and tasks that behave badly. Nobody dies, nothing is lost."""

import sys
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from rota.engine.completion.finisher import LATE_ENDS
from rota.engine.completion.report_consumer import INVALID_MESSAGES, RANGE_TOKENS_MAX, TOKENS_MAX
from rota.engine.completion.retry_decision import WORKER_LOST, decide_retry_after_loss
from rota.infra.nats import BusMessage
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
NOBODY = uuid4()
DONE_JOBS = sql("SELECT count(*) FROM rota.job_done")
UNREADABLE = {
    "empty": b"",
    "no msgpack": b"\xc1\xff\x00",
    "text": b"hello",
    "another kind": msgspec.msgpack.encode({"a": [1, 2, {"b": None}]}),
    "cut off": encode(Report(NOBODY, [(1, 1)]))[:-3],
    "deep": b"\x91" * 100_000,
    "a number": msgspec.msgpack.encode(2**63),
    "nulls": b"\x00" * 1000,
}
IMPOSSIBLE = {
    "a negative run": Report(NOBODY, [(-1, 5)]),
    "an endless run": Report(NOBODY, [(0, 2**40)]),
    "a token beyond all": Report(NOBODY, ends=[AttemptResult(2**60, AttemptStatus.SUCCEEDED)]),
    "a frame twice": Report(NOBODY, [(5, 2), (6, 1)]),
    "less than no time": Report(NOBODY, [(5, 2)], took_ms=-1),
    "a frame that took less than no time": Report(
        NOBODY, ends=[AttemptResult(5, AttemptStatus.FAILED, took_ms=-(2**40))]
    ),
    "a pause that is no number": Report(NOBODY, ends=[AttemptResult(5, AttemptStatus.FAILED, after_s=float("nan"))]),
    "a null in a code": Report(NOBODY, ends=[AttemptResult(5, AttemptStatus.FAILED, code="a\0b")]),
    "a null in a pointer": Report(NOBODY, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, pointer="a\0b")]),
    "a null in an artifact": Report(
        NOBODY, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, artifacts=(Artifact("a\0b"),))]
    ),
    "an artifact that leads away": Report(
        NOBODY, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, artifacts=(Artifact("../b"),))]
    ),
    "an artifact of two lines": Report(
        NOBODY, ends=[AttemptResult(5, AttemptStatus.SUCCEEDED, artifacts=(Artifact("b", "pg:\n"),))]
    ),
    "a code without end": Report(NOBODY, ends=[AttemptResult(5, AttemptStatus.FAILED, code="c" * 5000)]),
    "more frames than anybody has": Report(
        NOBODY, [(at * RANGE_TOKENS_MAX, RANGE_TOKENS_MAX) for at in range(TOKENS_MAX // RANGE_TOKENS_MAX + 1)]
    ),
}


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        await farm.quiet()


async def letters(farm):
    return await farm.replica.queue.dead_letters.find(DeadLetterFilter(kind="message"))


def crashed(farm):
    return {service.name: service.error for service in farm.replica.supervisor.services if service.error is not None}


async def test_reports_that_cannot_be_read_are_in_the_dead_letters_once_and_hold_up_nobody(farm):
    await farm.worker()
    bad = [*UNREADABLE.values(), *map(encode, IMPOSSIBLE.values())]
    before = await farm.submit("noop", frames=20)
    for number, data in enumerate(bad):
        await farm.replica.bus.publish(BusMessage(subject=RESULT_SUBJECT, data=data, msg_id=f"bad:{number}"))
    after = await farm.submit("noop", frames=20)
    assert await farm.ended(before) == await farm.ended(after) == "SUCCEEDED"

    async def all_there():
        return len(await letters(farm)) >= len(bad)

    await until(all_there, what="every dead letter")
    found = await letters(farm)
    assert len(found) == len({letter.cause for letter in found}) == len(bad)
    assert {letter.reason for letter in found} == {"unreadable_message"}
    assert not crashed(farm)


async def test_reports_about_frames_of_others_or_of_nobody_change_nothing(farm):
    await farm.worker()
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=3)
    await farm.running("x", 3)
    [worker] = farm.replica.engine.registry.workers.values()
    stranger = Report(NOBODY, list(worker.booked.token_ranges()))
    await farm.replica.bus.publish(BusMessage(subject=RESULT_SUBJECT, data=encode(stranger), msg_id="stranger"))
    unknown = Report(worker.id, [(2**50, 5)], [AttemptResult(2**51, AttemptStatus.FAILED, error="never was")])
    await farm.replica.bus.publish(BusMessage(subject=RESULT_SUBJECT, data=encode(unknown), msg_id="unknown"))
    other = await farm.submit("noop")
    assert await farm.ended(other) == "SUCCEEDED"
    assert await farm.done(job) is None
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"
    assert not await letters(farm)


async def test_an_error_of_any_length_and_with_any_character_is_kept_in_part(farm):
    await farm.worker()
    hanging("x")
    job = await farm.submit("hang", "x")
    await farm.running("x")
    [worker] = farm.replica.engine.registry.workers.values()
    [(token, _)] = worker.booked.token_ranges()
    long = AttemptResult(token, AttemptStatus.FAILED, code="odd", error="e\0" * 200_000)
    await farm.replica.bus.publish(
        BusMessage(subject=RESULT_SUBJECT, data=encode(Report(worker.id, ends=[long])), msg_id="odd")
    )
    assert await farm.ended(job) == "FAILED"
    assert not crashed(farm)


GATE = "sys.job.gate"
NO_SUBMISSIONS = {
    **UNREADABLE,
    "a megabyte of nothing": b" " * 1_000_000,
    "too large an input": b'{"show": "film", "layers": [{"task": "noop", "input": "%s"}]}' % (b"x" * 900_000),
    "too deep": b'{"show": "film", "layers": [{"task": "noop", "input": %s}]}' % (b"[" * 40 + b"]" * 40),
    "too many frames": b'{"show": "film", "layers": [{"task": "noop", "frames": 1000000000000}]}',
    "too many layers": b'{"show": "film", "layers": [%s]}' % b",".join([b'{"task": "noop"}'] * 1000),
    "a null in a name": b'{"show": "film", "name": "a\\u0000b", "layers": [{"task": "noop"}]}',
    "nobody's show": b'{"show": "nobody", "layers": [{"task": "noop"}]}',
}


@pytest.mark.parametrize(
    ("subject", "bodies", "reason"),
    [(SUBMIT_SUBJECT, NO_SUBMISSIONS, "submission_refused"), (GATE, UNREADABLE, "unreadable_message")],
)
async def test_messages_that_make_no_sense_are_dead_letters_once_and_hold_up_nobody(farm, subject, bodies, reason):
    await farm.worker()
    bus = farm.replica.bus
    for number, data in enumerate(bodies.values()):
        await bus.publish(BusMessage(subject=subject, data=data, msg_id=f"bad:{number}"))
    good = b'{"show": "film", "layers": [{"task": "noop"}], "idempotency_key": "behind them"}'
    await bus.publish(BusMessage(subject=SUBMIT_SUBJECT, data=good, msg_id="good"))

    async def all_there():
        return len(await letters(farm)) >= len(bodies) and await farm.database.value(DONE_JOBS)

    await until(all_there, what="every dead letter, and the job behind them")
    found = await letters(farm)
    assert sorted(letter.payload for letter in found) == sorted(bodies.values())
    assert {letter.reason for letter in found} == {reason}
    assert all(letter.error for letter in found), "nobody is told why"
    assert not crashed(farm)


async def test_a_message_that_nats_does_not_take_is_refused_to_whoever_sends_it(farm):
    for subject in (SUBMIT_SUBJECT, RESULT_SUBJECT):
        with pytest.raises(RotaError, match="bytes"):
            await farm.replica.bus.publish(BusMessage(subject=subject, data=b" " * 100_000_000, msg_id="huge"))
    await farm.worker()
    assert await farm.ended(await farm.submit("noop")) == "SUCCEEDED"
    assert not crashed(farm)


async def test_a_result_as_large_as_a_message_may_be_is_kept(farm):
    await farm.worker()
    hanging("x")
    job = await farm.submit("hang", "x")
    await farm.running("x")
    [worker] = farm.replica.engine.registry.workers.values()
    [(token, _)] = worker.booked.token_ranges()
    large = AttemptResult(token, AttemptStatus.SUCCEEDED, value=msgspec.msgpack.encode("v" * 900_000))
    await farm.replica.bus.publish(
        BusMessage(subject=RESULT_SUBJECT, data=encode(Report(worker.id, ends=[large])), msg_id="big")
    )
    assert await farm.ended(job) == "SUCCEEDED"
    [end] = await farm.ends(job)
    assert end[-1] == large.value
    assert not crashed(farm)


ODD_BEATS = {
    "a negative number": Heartbeat(NOBODY, "w", "nowhere", -1, 1, 100),
    "places below none": Heartbeat(NOBODY, "w", "nowhere", 1, -1, 100),
    "tokens that cannot be": Heartbeat(NOBODY, "w", "nowhere", 1, 1, 100, held=[(-5, 2)]),
    "every token there is": Heartbeat(NOBODY, "w", "nowhere", 1, 1, 100, held=[(0, 2**53)]),
    "more cores than there are": Heartbeat(NOBODY, "w", "nowhere", 1, 2**62, 2**62, 2**62, 2**62),
    "a load that is no number": Heartbeat(NOBODY, "w", "nowhere", 1, 1, 100, cpu_load=float("nan"), memory_load=1e308),
    "names without end": Heartbeat(NOBODY, "w\0" * 50_000, "p\0" * 50_000, 1, 1, 100, labels={"l" * 100_000: "\0"}),
    "many labels": Heartbeat(NOBODY, "w", "nowhere", 1, 1, 100, labels={str(n): "x" for n in range(30_000)}),
    "many tokens": Heartbeat(NOBODY, "w", "nowhere", 1, 1, 100, held=[(2 * n, 1) for n in range(60_000)]),
}


async def test_heartbeats_that_are_too_large_or_say_what_cannot_be_harm_nobody(farm):
    await farm.worker()
    for beat in ODD_BEATS.values():
        await farm.replica.bus.publish_core(HEARTBEAT_SUBJECT, encode(msgspec.structs.replace(beat, worker=uuid4())))
    assert await farm.ended(await farm.submit("noop", frames=5)) == "SUCCEEDED"
    # What keeps the registry looks at all of them, too.
    listening = HeartbeatConsumer(farm.replica.bus, farm.replica.engine.registry, farm.database)
    await listening.resolve_unknown_frames()
    assert not crashed(farm)


async def test_news_and_logs_that_cannot_be_harm_nobody(farm):
    await farm.worker()
    bus = farm.replica.bus
    for run, frames in (((-1, 5), -3), ((0, 2**53), 2**62), ((2**63, 1), 0)):
        await bus.publish_core(RELEASED_SUBJECT, encode(FramesReleased(NOBODY, [run], NOBODY, frames)))
    for token, at, data in ((-1, 0, b"x"), (2**60, 0, b"x"), (1, -1, b"x"), (1, 2**60, b"x"), (1, 0, b"x" * 900_000)):
        await bus.publish_core(LOG_SUBJECT, encode(LogChunk(NOBODY, token, "stdout", at, data)))
    assert await farm.ended(await farm.submit("noop", frames=5)) == "SUCCEEDED"
    assert not crashed(farm)


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
async def test_what_is_told_and_cannot_be_read_is_passed_over(farm, subject):
    await farm.worker()
    for data in UNREADABLE.values():
        await farm.replica.bus.publish_core(subject, data)
    job = await farm.submit("noop", frames=5)
    assert await farm.ended(job) == "SUCCEEDED"
    assert not crashed(farm)


async def test_progress_that_begins_everything_there_is_passed_over(farm):
    await farm.worker()
    refused = INVALID_MESSAGES.labels("progress")._value.get()
    for run in ((0, 2**52), (-5, 3), (2**53, 1)):
        await farm.replica.bus.publish_core(PROGRESS_SUBJECT, encode(Progress(NOBODY, [run])))
    await farm.replica.bus.publish_core(
        PROGRESS_SUBJECT, encode(Progress(NOBODY, [(0, RANGE_TOKENS_MAX)] * (2 * TOKENS_MAX // RANGE_TOKENS_MAX)))
    )
    for _ in range(20):
        await farm.replica.bus.publish_core(PROGRESS_SUBJECT, encode(Progress(NOBODY, [(0, 65_536)])))
    job = await farm.submit("noop")
    assert await farm.ended(job) == "SUCCEEDED"
    await until(
        lambda: INVALID_MESSAGES.labels("progress")._value.get() == refused + 4, what="what is refused to be counted"
    )
    assert not crashed(farm)


@pytest.mark.parametrize("bad", UNREADABLE)
async def test_a_hello_that_cannot_be_read_is_refused_with_a_sentence(farm, bad):
    answer = decode(Registered, await farm.replica.bus.request(HANDSHAKE_SUBJECT, UNREADABLE[bad]))
    assert answer.worker is None
    assert "is not a valid Register" in answer.refusal
    await farm.worker()
    assert await farm.ended(await farm.submit("noop")) == "SUCCEEDED"


ODD_HELLOS = {
    "a null in its pool": Register("w", "a\0b", 1, 100),
    "a null in its name": Register("a\0b", "local", 1, 100),
    "more cores than there are numbers": Register("w", "local", 1, 2**64 - 1),
    "a pool without end": Register("w", "p" * 100_000, 1, 100),
}


@pytest.mark.parametrize("odd", ODD_HELLOS)
async def test_a_hello_that_says_odd_things_never_ends_a_server(farm, odd):
    for _ in range(7):  # more often than a service may crash
        answer = decode(Registered, await farm.replica.bus.request(HANDSHAKE_SUBJECT, encode(ODD_HELLOS[odd])))
        assert answer.worker is None
        assert answer.refusal
    assert not crashed(farm)


async def test_cancelling_more_frames_than_there_are_numbers_harms_no_worker(farm):
    await farm.worker()
    gate = hanging("x")
    job = await farm.submit("hang", "x")
    await farm.running("x")
    [worker] = farm.replica.engine.registry.workers
    for run in ((2**62, 2**63), (2**63, 2**64 - 1), (-(2**63), 1), (5, -1)):
        await farm.replica.bus.publish_core(CANCEL_SUBJECT, encode(CancelFrames([run])))
    other = await farm.submit("noop")
    assert await farm.ended(other) == "SUCCEEDED"
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"
    assert worker in farm.replica.engine.registry.workers, "it began anew"


async def test_a_worker_passes_over_assignments_that_cannot_be_read(farm):
    await farm.worker()
    [worker] = farm.replica.engine.registry.workers
    portions = [AssignedRange(2**40 + at * 4096, 4096, NOBODY, NOBODY, 1, 1, 0) for at in range(100)]
    endless = encode(Assignment([Work(task="noop")], portions))
    late = LATE_ENDS._value.get()
    for number, data in enumerate([*UNREADABLE.values(), endless]):
        subject = JOBS_SUBJECT.format(worker)
        await farm.replica.bus.publish(BusMessage(subject=subject, data=data, msg_id=f"bad:{number}"))
    assert await farm.ended(await farm.submit("noop", frames=5)) == "SUCCEEDED"
    assert worker in farm.replica.engine.registry.workers, "it began anew"
    assert LATE_ENDS._value.get() == late, "it reported frames that nobody has"


class Wild:
    """A real worker with an app of tasks that behave badly."""

    def __init__(self, farm, process):
        self.farm = farm
        self.process = process

    @classmethod
    async def start(cls, farm, spawn, folder, name="wild"):
        words = [
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
            "ROTA_NATS_URL": farm.urls.nats,
            "ROTA_NATS_PREFIX": farm.settings.nats.prefix,
            "ROTA_WORKER_PROCESSES": "4",
            "ROTA_LOG_LEVEL": "error",
            "PYTHONPATH": str(ROOT / "src"),
        }
        process = await spawn(None, argv=[sys.executable, "-m", "rota.cli", *words], env=env)
        known = farm.replica.engine.registry.workers
        await until(lambda: any(worker.name == name for worker in known.values()), within_s=20, what="the worker")
        return cls(farm, process)

    async def end(self, task, **layer):
        """In which state a job of one frame ended, and with which code and error."""
        job = await self.farm.submit(task, layer={"kill_after_s": 0.5, **layer})
        state = await self.farm.ended(job, within_s=60)
        ends = await self.farm.ends(job)
        return state, ends[-1][3], ends[-1][4] or "", ends[-1][5]


async def test_tasks_that_behave_badly_harm_nobody_but_themselves(farm, spawn, tmp_path):
    wild = await Wild.start(farm, spawn, tmp_path)
    worker = next(iter(farm.replica.engine.registry.workers))

    state, code, error, _ = await wild.end("raises")
    assert (state, code) == ("FAILED", "exception")
    assert "out of luck" in error
    assert (await wild.end("hangs", timeout_s=0.5))[:2] == ("TIMEOUT", "timeout")
    assert (await wild.end("hangs_async", timeout_s=0.5))[:2] == ("TIMEOUT", "timeout")
    assert (await wild.end("leaves_a_child", timeout_s=1))[0] == "TIMEOUT"
    state, _, _, value = await wild.end("forks")
    assert (state, msgspec.msgpack.decode(value)) == ("SUCCEEDED", "from the parent")
    state, _, _, value = await wild.end("prints")
    assert (state, msgspec.msgpack.decode(value)) == ("SUCCEEDED", "printed")
    assert (await wild.end("exits"))[0] == "FAILED"
    assert (await wild.end("kills_itself"))[0] == "FAILED"
    assert (await wild.end("exits_async"))[0] == "FAILED"

    assert (await wild.end("fine"))[0] == "SUCCEEDED"
    assert wild.process.status is None, "the worker ended"
    assert worker in farm.replica.engine.registry.workers, "it began anew"
    assert not _left_by_a_frame()


async def test_a_frame_that_ends_worker_after_worker_is_given_up_and_its_neighbour_is_not(farm, spawn, tmp_path):
    farm.replica.engine.finisher._pace = SchedulerSettings(max_worker_losses=1)
    farm.replica.engine.recovery._silent_s = 1.0
    first = await Wild.start(farm, spawn, tmp_path, "first")
    neighbour = await farm.submit("naps", 2.0, layer={"retries": RetrySpec(lost=5)})
    await until(lambda: farm.database.value(BOOKED), what="the neighbour on the worker")
    poison = await farm.submit("ends_its_worker")
    assert await first.process.wait() == 3
    second = await Wild.start(farm, spawn, tmp_path, "second")
    assert await second.process.wait() == 3
    assert await farm.ended(poison) == "FAILED"
    assert [end[2:4] for end in await farm.ends(poison)] == [("RETRIED", "worker_lost"), ("FAILED", "worker_lost")]
    [letter] = await farm.replica.queue.dead_letters.find(DeadLetterFilter(kind="frame"))
    assert (letter.job, letter.reason, letter.error) == (poison, "worker_lost", "The worker stopped responding.")
    await Wild.start(farm, spawn, tmp_path, "third")
    assert await farm.ended(neighbour, within_s=30) == "SUCCEEDED"


async def test_a_layer_may_say_how_many_workers_a_frame_of_it_may_lose(farm):
    assert farm.settings.scheduler.max_worker_losses == 10
    await farm.worker()
    hanging("x")
    job = await farm.submit("hang", "x", layer={"retries": RetrySpec(lost=0)})
    await farm.running("x")
    await _lose(farm)
    assert await farm.ended(job) == "FAILED"


def test_frames_that_were_lost_before_come_back_apart_and_in_few_batches():
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


async def _lose(farm):
    """End all that is booked as if its worker had fallen silent."""
    ends = [
        AttemptResult(row["token"], AttemptStatus.FAILED, code=WORKER_LOST) for row in await farm.database.rows(TOKENS)
    ]
    await farm.replica.engine.finisher.finish_attempts(None, ends)


def _left_by_a_frame():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"left by a frame" in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found
