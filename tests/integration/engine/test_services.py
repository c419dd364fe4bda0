"""The lesser services of a replica, on a farm with a real bus: submissions from it, the gate, letters, logs."""

import json

import msgspec
import pytest

from rota import runtime
from rota.accounting.audit import audit
from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.engine.admission import controller
from rota.engine.completion import report_consumer
from rota.engine.queries.logs import LogReader
from rota.engine.submission.bus_consumer import SUBMIT_CONSUMER_SPEC
from rota.engine.submission.submitter import Submitter
from rota.infra.nats import BusMessage, ConsumerSpec
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.protocol import RESULT_SUBJECT, SUBMIT_SUBJECT
from rota.model.quota import Level
from rota.queue import DeadLetterFilter
from rota.runtime import Replica
from tests.integration.infra.nats_support import consumer_info, delete_stream
from tests.support.kernels import TABLE, Table
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

STATES = sql("SELECT state FROM rota.job_done")


class Later:
    at_once = False

    def decide(self, _batch):
        raise AssertionError("nobody is asked while jobs are written")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        await farm.quiet()


async def test_a_submission_from_the_bus_runs_and_one_that_is_no_submission_is_a_dead_letter(farm):
    await farm.worker()
    bus = farm.replica.bus
    good = json.dumps({"show": "film", "layers": [{"task": "noop"}]}).encode()
    await bus.publish_many(
        [BusMessage(subject=SUBMIT_SUBJECT, data=data, msg_id=f"m{n}") for n, data in enumerate((good, b"x"))]
    )
    await until(lambda: farm.database.rows(STATES), what="a job that ended")
    assert [row["state"] for row in await farm.database.rows(STATES)] == ["SUCCEEDED"]
    letters = farm.replica.queue.dead_letters
    await until(lambda: letters.count(DeadLetterFilter(kind="message")), what="a dead letter")
    [letter] = await letters.find(DeadLetterFilter())
    assert (letter.reason, letter.payload) == ("submission_refused", b"x")


async def test_a_job_that_is_to_be_decided_about_is_and_then_runs(farm):
    await farm.worker()
    submitter = Submitter(farm.database, gate=Later())
    [one] = await submitter.submit([Submission(show="film", layers=(LayerSpec(task="noop", frames=3),))])
    assert one.state == "PENDING"
    assert await farm.ended(one.job) == "SUCCEEDED"


async def test_a_submission_from_the_bus_meets_the_policy_of_the_installation(
    database_url, redis_url, nats_url, bus_prefix, monkeypatch
):
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: Table(default=TABLE["deny"]))
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        data = json.dumps({"show": "film", "layers": [{"task": "noop"}]}).encode()
        await farm.replica.bus.publish_many([BusMessage(subject=SUBMIT_SUBJECT, data=data, msg_id="m")])
        assert (await until(lambda: farm.database.row(STATES), what="the end of the job"))["state"] == "DENIED"


async def test_a_message_that_nats_gives_up_is_one_dead_letter(farm):
    bus = farm.replica.bus
    spec = ConsumerSpec(stream="SYS", durable="deaf", filter="sys.audit.x", ack_wait_s=0.25, max_deliver=1)
    spec = msgspec.structs.replace(spec, spare_deliveries=0)
    await bus.ensure([spec])
    letters = farm.replica.queue.dead_letters
    async with bus.consumer(spec) as consumer:
        receipt = await bus.publish(BusMessage(subject="sys.audit.x", data=b"unheard", msg_id="u"))
        assert await consumer.fetch(1, 5.0)
        await until(lambda: letters.count(DeadLetterFilter(kind="message")), what="a dead letter")
    [letter] = await letters.find(DeadLetterFilter())
    assert (letter.reason, letter.payload) == ("deliveries_exhausted", b"unheard")
    stored = await bus.get_message("SYS", receipt.stream_seq)
    assert letter.cause == f"SYS:{receipt.stream_seq}:{stored.stored_ns}"


async def test_messages_of_the_same_number_before_and_after_a_wiped_stream_are_a_dead_letter_each(farm):
    bus, letters = farm.replica.bus, farm.replica.queue.dead_letters
    for number, data in enumerate((b"before", b"after"), 1):
        await bus.publish(BusMessage(subject=RESULT_SUBJECT, data=data, msg_id=f"bad:{number}"))

        async def is_there(number=number):
            return await letters.count(DeadLetterFilter(kind="message")) == number

        await until(is_there, what=f"the letter of what came {data.decode()} the wipe")
        await delete_stream(bus, "SYS")
    assert [letter.payload for letter in await letters.find(DeadLetterFilter())] == [b"before", b"after"]


async def test_what_a_frame_writes_is_kept_and_can_be_read_when_it_has_ended(farm):
    await farm.worker()
    layer = LayerSpec(argv=("sh", "-c", "echo out; echo err >&2"))
    [one] = await farm.submitter.submit([Submission(show="film", layers=(layer,))])
    assert await farm.ended(one.job) == "SUCCEEDED"
    logs = LogReader(farm.database)

    async def both():
        pieces = await logs.read(one.job)
        return {piece.stream: piece.data for piece in pieces if piece.data} == {"stdout": b"out\n", "stderr": b"err\n"}

    await until(both, what="what it wrote")


async def test_a_replica_that_starts_with_a_file_of_pools_routes_by_it_and_all_follow_when_it_changes(farm, tmp_path):
    path = tmp_path / "pools.yaml"
    path.write_text("topics: {render: local}")
    routing = msgspec.structs.replace(farm.settings.routing, pools_file=str(path), reload_interval=0.05)
    farm.settings = msgspec.structs.replace(farm.settings, routing=routing)
    async with Replica.open(farm.settings, farm.urls) as replica:
        assert replica.engine.registry.routes.topics == {"render": ("local",)}, "before its services start"
    await farm.server()
    path.write_text("topics: {render: local, train: local}")
    registries = [each.engine.registry for each in farm.replicas]
    await until(lambda: all("train" in each.routes.topics for each in registries), what="both to follow the file")


async def test_what_servers_read_from_the_bus_has_the_limits_that_are_set(
    database_url, redis_url, nats_url, bus_prefix
):
    farm = Farm(database_url, redis_url, nats_url, bus_prefix)
    nats = msgspec.structs.replace(farm.settings.nats, job_ack_wait=7.0, max_deliver=9, max_ack_pending=77)
    farm.settings = msgspec.structs.replace(farm.settings, nats=nats)
    async with farm:
        for spec in (report_consumer.CONSUMER_SPEC, controller.CONSUMER_SPEC, SUBMIT_CONSUMER_SPEC):
            config = (await consumer_info(farm.replica.bus, spec))["config"]
            assert (config["ack_wait"], config["max_ack_pending"]) == (7 * 10**9, 77)
        for name in ("results_1", "results_2", "gate", "submits"):
            [service] = [each for each in farm.replica.supervisor.services if each.name == name]
            handling = service._run.__self__
            assert (handling._spec.max_deliver, handling._dead_letter_retry_s) == (9, nats.nak_delay)


async def test_caps_of_a_job_that_has_ended_leave_postgresql_and_redis(farm):
    await farm.worker()
    job = await farm.submit("noop", frames=3, max_cores=2)
    assert await farm.ended(job) == "SUCCEEDED"
    await farm.quiet()
    [show] = await farm.books.admin.shows()
    live = farm.books.live
    limits = live.keys.show_keys(str(show.id)).limits
    assert script_args.counter_name(Level.JOB, job) in [
        name async for name, _ in live_reader.scan_hash(live.client, limits)
    ]
    engine = farm.replica.engine
    [lease] = (await engine.leases.acquire(["spare"], kind="upkeep", ttl_s=60.0)).granted
    assert await engine.retention.forget_caps(lease) == 1
    assert script_args.counter_name(Level.JOB, job) not in [
        name async for name, _ in live_reader.scan_hash(live.client, limits)
    ]
    assert not [line for line in (await audit(farm.books, show)).lines if line.problem]
