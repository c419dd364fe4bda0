"""Smaller services of a replica on a real bus: submissions, the gate, dead letters, logs, pools file, limits."""

import asyncio
import json

import msgspec
import pytest

from rota import runtime
from rota.accounting.audit import audit
from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.engine.admission import controller, policy_call
from rota.engine.completion import report_consumer
from rota.engine.queries.logs import LogReader
from rota.engine.submission.bus_consumer import SUBMIT_CONSUMER_SPEC
from rota.engine.submission.submitter import Submitter
from rota.infra.nats import BusMessage, ConsumerSpec
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.protocol import RESULT_SUBJECT, SUBMIT_SUBJECT
from rota.model.quota import Level
from rota.model.settings import Settings
from rota.queue import DeadLetterFilter
from rota.runtime import Replica
from tests.integration.infra.nats_support import consumer_info, delete_stream
from tests.support.jobs import NO_EVENTS
from tests.support.kernels import TABLE, Table
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

STATES = sql("SELECT state FROM rota.job_done")


class DeferredGate:
    at_once = False

    def decide(self, _batch):
        raise AssertionError("the gate must not decide during submission")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        yield cluster
        await cluster.quiet()


async def test_bus_submission_runs_and_an_invalid_one_becomes_a_dead_letter(cluster):
    await cluster.worker()
    bus = cluster.replica.bus
    good = json.dumps({"show": "film", "layers": [{"task": "noop"}]}).encode()
    await bus.publish_many(
        [BusMessage(subject=SUBMIT_SUBJECT, data=data, msg_id=f"m{n}") for n, data in enumerate((good, b"x"))]
    )
    await until(lambda: cluster.database.rows(STATES), what="the end of the job")
    assert [row["state"] for row in await cluster.database.rows(STATES)] == ["SUCCEEDED"]
    dead_letters = cluster.replica.queue.dead_letters
    await until(lambda: dead_letters.count(DeadLetterFilter(kind="message")), what="a dead letter")
    [dead_letter] = await dead_letters.find(DeadLetterFilter())
    assert (dead_letter.reason, dead_letter.payload) == ("submission_refused", b"x")


async def test_deferred_job_is_decided_and_runs(cluster):
    await cluster.worker()
    submitter = Submitter(cluster.database, NO_EVENTS, gate=DeferredGate())
    [one] = await submitter.submit([Submission(show="film", layers=(LayerSpec(task="noop", frames=3),))])
    assert one.state == "PENDING"
    assert await cluster.ended(one.job) == "SUCCEEDED"


async def test_bus_submission_is_subject_to_the_configured_policy(
    database_url, redis_url, nats_url, bus_prefix, monkeypatch
):
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: Table(default=TABLE["deny"]))
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        data = json.dumps({"show": "film", "layers": [{"task": "noop"}]}).encode()
        await cluster.replica.bus.publish_many([BusMessage(subject=SUBMIT_SUBJECT, data=data, msg_id="m")])
        assert (await until(lambda: cluster.database.row(STATES), what="the end of the job"))["state"] == "DENIED"


async def test_message_given_up_by_nats_becomes_one_dead_letter(cluster):
    bus = cluster.replica.bus
    spec = ConsumerSpec(stream="SYS", durable="deaf", filter="sys.audit.x", ack_wait_s=0.25, max_deliver=1)
    spec = msgspec.structs.replace(spec, spare_deliveries=0)
    await bus.ensure([spec])
    dead_letters = cluster.replica.queue.dead_letters
    async with bus.consumer(spec) as consumer:
        receipt = await bus.publish(BusMessage(subject="sys.audit.x", data=b"unheard", msg_id="u"))
        assert await consumer.fetch(1, 5.0)
        await until(lambda: dead_letters.count(DeadLetterFilter(kind="message")), what="a dead letter")
    [dead_letter] = await dead_letters.find(DeadLetterFilter())
    assert (dead_letter.reason, dead_letter.payload) == ("deliveries_exhausted", b"unheard")
    stored = await bus.get_message("SYS", receipt.stream_seq)
    assert dead_letter.cause == f"SYS:{receipt.stream_seq}:{stored.stored_ns}"


async def test_same_sequence_number_before_and_after_a_stream_wipe_makes_two_dead_letters(cluster):
    bus, dead_letters = cluster.replica.bus, cluster.replica.queue.dead_letters
    for number, data in enumerate((b"before", b"after"), 1):
        await bus.publish(BusMessage(subject=RESULT_SUBJECT, data=data, msg_id=f"bad:{number}"))

        async def has_arrived(number=number):
            return await dead_letters.count(DeadLetterFilter(kind="message")) == number

        await until(has_arrived, what=f"the dead letter of the message {data.decode()} the wipe")
        await delete_stream(bus, "SYS")
    assert [dead_letter.payload for dead_letter in await dead_letters.find(DeadLetterFilter())] == [b"before", b"after"]


async def test_frame_output_is_stored_and_readable_after_its_end(cluster):
    await cluster.worker()
    layer = LayerSpec(argv=("sh", "-c", "echo out; echo err >&2"))
    [one] = await cluster.submitter.submit([Submission(show="film", layers=(layer,))])
    assert await cluster.ended(one.job) == "SUCCEEDED"
    logs = LogReader(cluster.database)

    async def both():
        chunks = await logs.read(one.job)
        return {chunk.stream: chunk.data for chunk in chunks if chunk.data} == {"stdout": b"out\n", "stderr": b"err\n"}

    await until(both, what="its output")


async def test_pools_file_routes_at_startup_and_every_replica_follows_its_changes(cluster, tmp_path):
    path = tmp_path / "pools.yaml"
    path.write_text("topics: {render: local}")
    routing = msgspec.structs.replace(cluster.settings.routing, pools_file=str(path), reload_interval=0.05)
    cluster.settings = msgspec.structs.replace(cluster.settings, routing=routing)
    async with Replica.open(cluster.settings, cluster.urls) as replica:
        assert replica.engine.registry.routes.topics == {"render": ("local",)}, (
            "routes are loaded before the services start"
        )
    await cluster.server()
    path.write_text("topics: {render: local, train: local}")
    registries = [each.engine.registry for each in cluster.replicas]
    await until(
        lambda: all("train" in each.routes.topics for each in registries), what="both replicas to follow the file"
    )


async def test_bus_consumers_use_the_configured_limits(database_url, redis_url, nats_url, bus_prefix):
    cluster = Farm(database_url, redis_url, nats_url, bus_prefix)
    nats = msgspec.structs.replace(cluster.settings.nats, job_ack_wait=7.0, max_deliver=9, max_ack_pending=77)
    cluster.settings = msgspec.structs.replace(cluster.settings, nats=nats)
    async with cluster:
        for spec in (report_consumer.CONSUMER_SPEC, controller.CONSUMER_SPEC, SUBMIT_CONSUMER_SPEC):
            config = (await consumer_info(cluster.replica.bus, spec))["config"]
            assert (config["ack_wait"], config["max_ack_pending"]) == (7 * 10**9, 77)
        for name in ("results_1", "results_2", "gate", "submits"):
            [service] = [each for each in cluster.replica.supervisor.services if each.name == name]
            consumer = service._run.__self__
            assert (consumer._spec.max_deliver, consumer._processor._dead_letter_retry_s) == (9, nats.nak_delay)


class SlowKernel(Table):
    """Answers after `take_s`."""

    take_s = 0.2

    async def check(self, questions):
        await asyncio.sleep(self.take_s)
        return await super().check(questions)


async def test_policy_call_may_take_as_long_as_the_safety_timeout(
    database_url, redis_url, nats_url, bus_prefix, monkeypatch
):
    kernel = SlowKernel()
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: kernel)
    monkeypatch.setattr(policy_call, "KERNEL_MARGIN_S", 0.0)
    for timeout_s, state in ((0.05, "PENDING"), (10.0, "SCHEDULED")):
        safety = msgspec.structs.replace(Settings().safety, timeout=timeout_s)
        async with Farm(database_url, redis_url, nats_url, bus_prefix, safety=safety) as cluster:
            if timeout_s < 1.0:
                await cluster.show()
            [submitted] = await cluster.replica.engine.submitter.submit(
                [Submission(show="film", layers=(LayerSpec(task="noop", frames=1),))]
            )
            assert submitted.state == state


async def test_caps_of_an_ended_job_are_deleted_from_postgres_and_redis(cluster):
    await cluster.worker()
    job = await cluster.submit("noop", frames=3, max_cores=2)
    assert await cluster.ended(job) == "SUCCEEDED"
    await cluster.quiet()
    [show] = await cluster.accounting.admin.shows()
    live = cluster.accounting.live
    limits = live.keys.show_keys(str(show.id)).limits
    assert script_args.counter_name(Level.JOB, job) in [
        name async for name, _ in live_reader.scan_hash(live.client, limits)
    ]
    engine = cluster.replica.engine
    [lease] = (await engine.leases.acquire(["spare"], kind="upkeep", ttl_s=60.0)).granted
    assert await engine.retention.forget_caps(lease) == 1
    assert script_args.counter_name(Level.JOB, job) not in [
        name async for name, _ in live_reader.scan_hash(live.client, limits)
    ]
    assert not [line for line in (await audit(cluster.accounting, show)).lines if line.problem]


RENEWED = sql("""
SELECT count(*) AS held, count(DISTINCT l.xmin::text) AS statements FROM rota.lease l
WHERE l.name IN ('accounting', 'queue:upkeep', 'rota:reconciler:default') AND l.expires_at > clock_timestamp()""")


async def test_leases_of_one_replica_are_renewed_in_one_statement(cluster):
    """Each renewal is a commit, and most services have a lease: an idle server would commit several times a second."""

    async def renewed_together():
        row = await cluster.database.row(RENEWED)
        return (row["held"], row["statements"]) == (3, 1)

    await until(renewed_together, what="one transaction that renews all of them")
