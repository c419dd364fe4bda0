"""Outputs checked by a remote kernel: its decision applies, and an unknown decision quarantines."""

import msgspec
import pytest

from rota.infra.rpc.protobuf import encode
from rota.model.errors import Unavailable
from rota.model.policy.outputs import OutputEffect, OutputMeta
from rota.policy.file_watch import PolicyFile, PolicyWatch
from rota.policy.grpc import messages
from rota.policy.grpc.client import RemoteOutputKernel
from rota.policy.output.checker import FileOutputPolicySource, KernelContentChecker
from rota.policy.output.evaluate import ContentResult
from rota.policy.output.parts import OutputContent
from tests.support.outputs import SECRET
from tests.support.policy_kernel import FaultyKernel, client_settings, replaced, serving
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


async def check_output(port, content=GIVEN):
    checker = KernelContentChecker(RemoteOutputKernel(client_settings(port), None))
    try:
        word, redacted = await checker.check(META, content.parts(), 5.0)
        return ContentResult(word, None if redacted is None else redacted.content())
    finally:
        await checker.close()


async def test_remote_kernel_decides_like_local_rules(path):
    for text, effect in ((QUARANTINES, OutputEffect.QUARANTINE), (REDACTS, OutputEffect.REDACT)):
        path.write_text(text)
        local = FileOutputPolicySource(PolicyWatch(PolicyFile(path), 60.0).snapshots)().check_content(
            META, GIVEN, float("inf")
        )
        async with serving(path) as process:
            remote = await check_output(process.calls.port)
        assert remote == local
        assert remote.word.says is effect
    redacted = msgspec.msgpack.decode(remote.redacted.value), remote.redacted.artifacts
    assert redacted == (f"[REDACTED] {SECRET}", (("a.txt", b"[REDACTED]"),))


async def test_long_content_is_sent_in_windows_and_quarantined_instead_of_redacted(path):
    path.write_text(REDACTS)
    filler = b"x " * (3 * 512 * 1024)
    async with serving(path) as process:
        for given in (b"ann@example.org " + filler, filler + b"ann@example.org", filler):
            expected = OutputEffect.ALLOW if given is filler else OutputEffect.QUARANTINE
            file = OutputContent(None, (("a.txt", given),))
            value = OutputContent(msgspec.msgpack.encode(given.decode()), (("a.txt", b"fine"),))
            assert (await check_output(process.calls.port, file)).word.says is expected
            assert (await check_output(process.calls.port, value)).word.says is expected


@pytest.mark.parametrize(
    ("reply", "effect"),
    [
        ('{"says": "MAYBE"}', OutputEffect.QUARANTINE),
        ('{"says": "REDACT", "redacted": {"value": null, "artifacts": []}}', OutputEffect.QUARANTINE),
        ('{"says": "ALLOW", "more": 1}', OutputEffect.ALLOW),
    ],
)
async def test_unusable_output_decision_quarantines_and_extra_fields_are_ignored(reply, effect):
    async with FaultyKernel(lambda _data: encode(messages.CheckOutputReply(reply))).serving() as port:
        assert (await check_output(port)).word.says is effect


@pytest.mark.parametrize("reply", ["", "no json", "[]", '{"says": 5}', '{"says": "DENY", "rule": "\\u0000"}'])
async def test_undecodable_output_decision_is_unavailable(reply):
    async with FaultyKernel(lambda _data: encode(messages.CheckOutputReply(reply))).serving() as port:
        with pytest.raises(Unavailable):
            await check_output(port)


async def test_changed_policy_file_changes_the_output_policy(path):
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


async def ended_with(cluster, job, states):
    async def reached():
        row = await cluster.done(job)
        return row is not None and row["state"] in states

    await until(reached, what=f"job {job} in {states}")


async def test_server_checks_outputs_with_a_remote_kernel(path, database_url, redis_url, nats_url, bus_prefix):
    async with serving(path) as process:
        cluster = Farm(database_url, redis_url, nats_url, bus_prefix)
        cluster.settings = replaced(cluster.settings, "output_policy", enabled=True, fail_mode="closed")
        cluster.settings = replaced(cluster.settings, "safety_kernel", addr=f"127.0.0.1:{process.calls.port}")
        async with cluster:
            await cluster.show()
            await cluster.worker()
            await ended_with(cluster, await cluster.submit("echo", SECRET), ("OUTPUT_QUARANTINED",))
            assert (await cluster.database.row(OUTPUTS))["output"] == "quarantined"


async def test_server_checks_outputs_with_its_policy_file(path, database_url, redis_url, nats_url, bus_prefix):
    path.write_text(REDACTS)
    cluster = Farm(database_url, redis_url, nats_url, bus_prefix)
    cluster.settings = replaced(cluster.settings, "output_policy", enabled=True)
    cluster.settings = replaced(cluster.settings, "policy", file=str(path))
    async with cluster:
        await cluster.show()
        await cluster.worker()
        await cluster.submit("echo", "to ann@example.org")

        async def redacted():
            row = await cluster.database.row(OUTPUTS)
            return row is not None and row["output"] == "redacted" and row["value"]

        assert msgspec.msgpack.decode(await until(redacted, what="the redaction")) == "to [REDACTED]"
