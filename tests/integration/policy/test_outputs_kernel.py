"""Outputs looked into by a kernel elsewhere: what it says takes effect, what nobody knows keeps back."""

import msgspec
import pytest

from rota.infra.rpc.protobuf import encode
from rota.model.errors import Unavailable
from rota.model.policy.outputs import OutputEffect, OutputMeta
from rota.policy.file_watch import PolicyFile, PolicyWatch
from rota.policy.grpc import messages
from rota.policy.grpc.client import RemoteOutputKernel
from rota.policy.output.checker import FileOutputPolicySource, KernelContentChecker
from rota.policy.output.evaluate import OutputContent
from tests.support.outputs import SECRET
from tests.support.policy_kernel import Liar, asking, replaced, serving
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

META = OutputMeta(show="film", topic="default")
QUARANTINES = """
default_decision: allow
output_rules:
  - {id: secrets, match: {scanners: [secret]}, decision: quarantine, reason: A secret was found.}
"""
REDACTS = """
default_decision: allow
output_policy: {topics: {default: hold}}
output_rules:
  - {id: mail, match: {scanners: [pii]}, decision: redact}
"""
GIVEN = OutputContent(msgspec.msgpack.encode(f"ann@example.org {SECRET}"), (("a.txt", b"ann@example.org"),))
OUTPUTS = sql("SELECT output, value FROM rota.frame_end")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(QUARANTINES)
    return path


async def asked(port, content=GIVEN):
    checker = KernelContentChecker(RemoteOutputKernel(asking(port), None))
    try:
        return await checker.check(META, content, 5.0)
    finally:
        await checker.close()


async def test_a_kernel_says_the_same_as_rules_here(path):
    for text, says in ((QUARANTINES, OutputEffect.QUARANTINE), (REDACTS, OutputEffect.REDACT)):
        path.write_text(text)
        here = FileOutputPolicySource(PolicyWatch(PolicyFile(path), 60.0).snapshots)().check_content(
            META, GIVEN, float("inf")
        )
        async with serving(path) as process:
            there = await asked(process.calls.port)
        assert there == here
        assert there.word.says is says
    left = msgspec.msgpack.decode(there.redacted.value), there.redacted.artifacts
    assert left == (f"[REDACTED] {SECRET}", (("a.txt", b"[REDACTED]"),))


async def test_what_is_too_long_is_sent_in_part_and_known_to_be(path):
    path.write_text(REDACTS)
    long = OutputContent(None, (("a.txt", b"ann@example.org " + b"x" * 3 * 1024 * 1024),))
    async with serving(path) as process:
        assert (await asked(process.calls.port, long)).word.says is OutputEffect.QUARANTINE


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ('{"says": "MAYBE"}', OutputEffect.QUARANTINE),
        ('{"says": "REDACT", "redacted": {"value": null, "artifacts": []}}', OutputEffect.QUARANTINE),
        ('{"says": "ALLOW", "more": 1}', OutputEffect.ALLOW),
    ],
)
async def test_a_word_nobody_knows_keeps_the_output_back(told, says):
    async with Liar(lambda _data: encode(messages.CheckOutputReply(told))).serving() as port:
        assert (await asked(port)).word.says is says


@pytest.mark.parametrize("told", ["", "no json", "[]", '{"says": 5}', '{"says": "DENY", "rule": "\\u0000"}'])
async def test_what_cannot_be_read_is_no_word(told):
    async with Liar(lambda _data: encode(messages.CheckOutputReply(told))).serving() as port:
        with pytest.raises(Unavailable):
            await asked(port)


async def test_a_policy_file_that_changes_changes_what_outputs_are_looked_at_by(path):
    watch = PolicyWatch(PolicyFile(path), 60.0)
    source = FileOutputPolicySource(watch.snapshots)
    first = source()
    assert source() is first
    assert (first.mode("default"), first.snapshot) == ("pass", watch.snapshots.current.snapshot)
    path.write_text(REDACTS)
    assert await watch.reload()
    assert source().mode("default") == "hold"
    path.write_text("default_decision: allow\noutput_policy: {enabled: false}\n")
    assert await watch.reload()
    assert source() is None


async def ended_with(farm, job, states):
    async def reached():
        row = await farm.done(job)
        return row is not None and row["state"] in states

    await until(reached, what=f"job {job} in {states}")


async def test_servers_have_outputs_looked_into_elsewhere(path, database_url, redis_url, nats_url, bus_prefix):
    async with serving(path) as process:
        farm = Farm(database_url, redis_url, nats_url, bus_prefix)
        farm.settings = replaced(farm.settings, "output_policy", enabled=True, fail_mode="closed")
        farm.settings = replaced(farm.settings, "safety_kernel", addr=f"127.0.0.1:{process.calls.port}")
        async with farm:
            await farm.show()
            await farm.worker()
            await ended_with(farm, await farm.submit("echo", SECRET), ("OUTPUT_QUARANTINED",))
            assert (await farm.database.row(OUTPUTS))["output"] == "quarantined"


async def test_a_server_with_a_policy_file_looks_by_it(path, database_url, redis_url, nats_url, bus_prefix):
    path.write_text(REDACTS)
    farm = Farm(database_url, redis_url, nats_url, bus_prefix)
    farm.settings = replaced(farm.settings, "output_policy", enabled=True)
    farm.settings = replaced(farm.settings, "policy", file=str(path))
    async with farm:
        await farm.show()
        await farm.worker()
        await farm.submit("echo", "to ann@example.org")

        async def redacted():
            row = await farm.database.row(OUTPUTS)
            return row is not None and row["output"] == "redacted" and row["value"]

        assert msgspec.msgpack.decode(await until(redacted, what="the redaction")) == "to [REDACTED]"
