"""The kernel as a process: policy file, snapshots, authentication; and clients when it is killed or stopped."""

import asyncio
import re
import signal
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from structlog.testing import capture_logs

from rota.infra.rpc.protobuf import ProtobufMessage, decode, encode, fields
from rota.infra.service import Supervisor
from rota.model.errors import InvalidInput, InvalidSetting, Unavailable
from rota.model.policy.decision import PolicyEffect, PolicyRequest
from rota.model.settings import Settings
from rota.policy.evaluate import RuleStatus
from rota.policy.factory import effective_fail_mode, has_policy, open_kernel, open_local_kernel
from rota.policy.file_watch import PolicyFile, PolicyWatch, request_reload
from rota.policy.grpc import messages, service
from rota.policy.grpc.client import RemoteKernel
from rota.policy.grpc.kernel_process import KernelProcess
from rota.policy.kernel import LocalKernel
from rota.policy.loader import snapshot_id
from rota.policy.signature import SignatureVerifier
from tests.support.policy_kernel import (
    ALLOWING,
    DENYING,
    client_settings,
    free_port,
    kernel_settings,
    question,
    replaced,
    serving,
    spawned,
)
from tests.support.waiting import until

SECRET = "s3cret-" * 4


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(ALLOWING)
    return path


@asynccontextmanager
async def client(settings, redis=None):
    kernel = RemoteKernel(settings, redis)
    try:
        yield kernel
    finally:
        await kernel.close()


@pytest.fixture
async def kernel_client(path):
    """A client of a kernel over gRPC."""
    async with serving(path) as process, client(client_settings(process.calls.port)) as kernel:
        yield kernel


async def test_killed_kernel_is_unavailable_and_answers_after_a_restart(spawn, path, redis):
    port = free_port()
    process = await spawned(spawn, path, port)
    async with client(client_settings(port, circuit_fail_budget=10**6), redis) as kernel:

        async def answers():
            try:
                return await kernel.check([question()])
            except Unavailable:
                return None

        [decision] = await until(answers)
        assert decision.says is PolicyEffect.ALLOW
        process.send(signal.SIGSTOP)  # so that the call is in flight when it is killed
        call = asyncio.create_task(kernel.check([question()]))
        assert await asyncio.wait({call}, timeout=0.1) == (set(), {call})
        process.send(signal.SIGKILL)
        with pytest.raises(Unavailable):
            await call
        await process.wait()
        path.write_text(DENYING)
        await spawned(spawn, path, port)
        [decision] = await until(answers, within_s=20)
        assert (decision.says, decision.rule) == (PolicyEffect.DENY, "b")


async def test_stopped_kernel_is_unavailable_and_answers_after_it_resumes(spawn, path):
    port = free_port()
    process = await spawned(spawn, path, port)
    async with client(client_settings(port, timeout=0.3, circuit_fail_budget=10**6)) as kernel:

        async def answers():
            try:
                return await kernel.check([question()])
            except Unavailable:
                return None

        await until(answers)
        process.send(signal.SIGSTOP)
        with pytest.raises(Unavailable):
            await kernel.check([question()])
        process.send(signal.SIGCONT)
        assert [decision.says for decision in await until(answers)] == [PolicyEffect.ALLOW]


async def test_kernel_process_serves_readiness_and_metrics(spawn, path):
    port, health_port = free_port(), free_port()
    process = await spawned(spawn, path, port, health_port)
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{health_port}") as http,
        client(client_settings(port)) as kernel,
    ):

        async def is_ready():
            try:
                return (await http.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await until(is_ready, within_s=20)
        await kernel.check([question(count=3)])
        metrics = (await http.get("/metrics")).text
    assert 'rota_policy_checks_total{says="ALLOW"} 3.0' in metrics
    assert "rota_policy_rules 1.0" in metrics
    process.send(signal.SIGTERM)
    assert await process.wait() == 0


async def test_kernel_without_a_valid_policy_does_not_start(spawn, path):
    path.write_text("rules:\n  - {id: a, decison: deny}\n")
    process = await spawned(spawn, path, 0)
    assert await process.wait() == 2
    assert f"{path}:2: a rule has no 'decison'; did you mean decision?" in await process.errors()
    with pytest.raises(InvalidSetting, match=r"policy\.file is not set"):
        KernelProcess(Settings(), None)


async def test_reload_is_atomic_for_concurrent_checks(kernel_client, path):
    """A decision names the snapshot that made it, and one batch is decided by one snapshot."""
    rules = {snapshot_id(ALLOWING): ("a", PolicyEffect.ALLOW), snapshot_id(DENYING): ("b", PolicyEffect.DENY)}
    seen = set()

    async def ask():
        while len(seen) < 2:
            decisions = await kernel_client.check([question(f"job.{n}") for n in range(20)])
            assert len({decision.snapshot for decision in decisions}) == 1
            assert {(decision.rule, decision.says) for decision in decisions} == {rules[decisions[0].snapshot]}
            seen.add(decisions[0].snapshot)

    async def change():
        for text in (DENYING, ALLOWING) * 10:
            path.write_text(text)
            assert await kernel_client.reload()

    await asyncio.gather(ask(), ask(), ask(), change())


async def test_invalid_file_leaves_the_old_policy_in_force(kernel_client, path):
    path.write_text("rules:\n  - {id: a, decision: deny}\n  - {id: b, decision: maybe}\n")
    with pytest.raises(InvalidInput, match=rf"{path}:3: decision is one of"):
        await kernel_client.reload()
    [decision] = await kernel_client.check([question()])
    assert (decision.says, decision.snapshot) == (PolicyEffect.ALLOW, snapshot_id(ALLOWING))
    path.write_text(DENYING)
    assert await kernel_client.reload()
    assert not await kernel_client.reload()
    assert [each.id for each in await kernel_client.list_snapshots()] == [snapshot_id(DENYING), snapshot_id(ALLOWING)]


async def test_last_ten_snapshots_are_kept(kernel_client, path):
    texts = [ALLOWING, *(f"{DENYING}# {n}\n" for n in range(12))]
    for text in texts[1:]:
        path.write_text(text)
        await kernel_client.reload()
    assert [each.id for each in await kernel_client.list_snapshots()] == [
        snapshot_id(text) for text in reversed(texts[3:])
    ]
    explained = await kernel_client.explain(question().asked, snapshot_id(texts[4])[:12])
    assert explained.word.snapshot == snapshot_id(texts[4])
    with pytest.raises(InvalidInput, match="No unique policy snapshot"):
        await kernel_client.explain(question().asked, snapshot_id(ALLOWING))


async def test_kernel_explains_a_job_and_simulates_another_policy(kernel_client, path):
    path.write_text("rules: [{id: a, decision: allow, match: {shows: [beta]}}, {id: b, decision: allow}]")
    await kernel_client.reload()
    found = await kernel_client.explain(question().asked)
    assert [(each.rule, each.fate, each.why) for each in found.findings] == [
        ("a", RuleStatus.UNMET, "shows"),
        ("b", RuleStatus.DECIDED, ""),
    ]
    decisions = await kernel_client.simulate(DENYING, [question(f"job.{n}").asked for n in range(600)])
    assert [decision.says for decision in decisions] == [PolicyEffect.DENY] * 600
    with pytest.raises(InvalidInput, match=r"policy:1: a policy has no 'ruls'"):
        await kernel_client.simulate("ruls: []", [question().asked])
    [decision] = await kernel_client.check([question()])
    assert decision.says is PolicyEffect.ALLOW


async def test_single_check_gives_the_same_decision(path):
    async with serving(path) as process, grpc.aio.insecure_channel(f"127.0.0.1:{process.calls.port}") as channel:
        check = channel.unary_unary("/rota.v1.SafetyKernel/Check")
        request = messages.CheckRequest(str(question().jobs[0]), messages.PolicyRequestMessage("alpha", "job.a"))
        decision = decode(await check(encode(request), timeout=5), messages.CheckReply).word
        assert (decision.decision, decision.rule_id) == (messages.DecisionCode.ALLOW, "a")
        for wrong in (
            messages.CheckRequest("nonsense", messages.PolicyRequestMessage("alpha", "job.a")),
            messages.CheckRequest(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await check(encode(wrong), timeout=5)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_velocity_rule_requires_the_job_id(path):
    path.write_text("rules: [{id: a, decision: deny, velocity: {max_requests: 1, window: 1h}}]")
    async with serving(path) as process, grpc.aio.insecure_channel(f"127.0.0.1:{process.calls.port}") as channel:
        check = channel.unary_unary("/rota.v1.SafetyKernel/Check")
        with pytest.raises(grpc.aio.AioRpcError, match="has no job id"):
            await check(encode(messages.CheckRequest(asked=messages.PolicyRequestMessage("alpha", "job.a"))), timeout=5)


async def test_output_check_without_a_handler_is_an_invalid_argument(path):
    class Echo:
        async def check_output(self, asked_json, content):
            return asked_json + content.decode()

    for outputs, status in ((Echo(), None), (None, grpc.StatusCode.INVALID_ARGUMENT)):
        process = KernelProcess(kernel_settings(path), None, outputs)
        async with (
            process.supervisor.running(),
            grpc.aio.insecure_channel(f"127.0.0.1:{process.calls.port}") as channel,
        ):
            check = channel.unary_unary("/rota.v1.OutputPolicyService/CheckOutput")
            call = check(encode(messages.CheckOutputRequest("a", b"b")), timeout=5)
            if status is None:
                assert decode(await call, messages.CheckOutputReply).word_json == "ab"
                continue
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is status


async def test_shared_secret_and_tls_protect_the_kernel(path, certificate):
    cert, key = certificate
    async with serving(path, shared_secret=SECRET, tls_cert=str(cert), tls_key=str(key)) as process:
        plain = client_settings(process.calls.port, circuit_fail_budget=10**6)
        good = replaced(plain, "safety_kernel", shared_secret=SECRET, tls_ca=str(cert))
        async with client(good) as kernel:
            assert [decision.says for decision in await kernel.check([question()])] == [PolicyEffect.ALLOW]
        for wrong in (
            replaced(good, "safety_kernel", shared_secret="an0ther-" * 4),
            replaced(good, "safety_kernel", shared_secret=None),
            replaced(plain, "safety_kernel", shared_secret=SECRET),
            replaced(plain, "safety_kernel", shared_secret=SECRET, tls_required=True),
        ):
            async with client(wrong) as kernel:
                with pytest.raises(Unavailable) as error:
                    await kernel.check([question()])
                assert SECRET not in error.value.sentence


def signed(path, folder):
    key, public = folder / "policy.key", folder / "policy.pub"
    if not key.exists():
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
        subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    sign = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", path, "-out", f"{path}.sig"]
    subprocess.run(sign, check=True, capture_output=True)
    return public


async def test_policy_must_be_signed_with_the_trusted_key(path, tmp_path):
    public = signed(path, tmp_path)
    watch = PolicyWatch(PolicyFile(path, SignatureVerifier(public, required=True)), 60)
    path.write_text(DENYING)
    with pytest.raises(InvalidInput, match="the signature does not match this file"):
        await watch.reload()
    assert watch.snapshots.current.snapshot == snapshot_id(ALLOWING)
    signed(path, tmp_path)
    assert await watch.reload()
    Path(f"{path}.sig").unlink()
    path.write_text(ALLOWING)
    with pytest.raises(InvalidInput, match="has no signature"):
        await watch.reload()
    assert PolicyFile(path, SignatureVerifier(public)).read() is not None
    Path(f"{path}.sig").write_text("nonsense")
    with pytest.raises(InvalidInput, match="the signature does not match"):
        PolicyFile(path, SignatureVerifier(public)).read()
    with pytest.raises(InvalidSetting):
        PolicyFile(path, SignatureVerifier(tmp_path / "nowhere")).read()


async def test_file_watch_applies_changes_and_logs_an_invalid_file_once(path):
    watch = PolicyWatch(PolicyFile(path), 0.01)
    supervisor = Supervisor(drain_budget_s=5)
    supervisor.add(*LocalKernel.from_watch(watch).services())
    with capture_logs() as logs:
        async with supervisor.running():
            path.write_text("rules: 3")
            await until(lambda: any(line["event"] == "policy_file_rejected" for line in logs))
            path.write_text(DENYING)
            await until(lambda: watch.snapshots.current.snapshot == snapshot_id(DENYING))
    assert [line["event"] for line in logs].count("policy_file_rejected") == 1


async def test_reload_request_makes_every_server_read_the_file(path, database):
    watch = PolicyWatch(PolicyFile(path), 3600)
    supervisor = Supervisor(drain_budget_s=5)
    supervisor.add(*LocalKernel.from_watch(watch).services(database))
    async with supervisor.running():
        path.write_text(DENYING)
        await request_reload(database, "ann")
        await until(lambda: watch.snapshots.current.snapshot == snapshot_id(DENYING))


@pytest.mark.parametrize(
    ("setting", "file", "means"),
    [(None, "", "closed"), (None, "open", "open"), ("closed", "open", "closed"), ("open", "closed", "open")],
)
def test_fail_mode_setting_takes_precedence_over_the_policy_file(path, setting, file, means):
    if file:
        path.write_text(f"input_policy: {{fail_mode: {file}}}\n")
    settings = replaced(kernel_settings(path), "input_policy", fail_mode=setting)
    assert effective_fail_mode(settings, open_local_kernel(settings, None)) == means


def test_settings_select_the_kernel(path):
    assert open_kernel(Settings(), None) is None
    assert not has_policy(Settings())
    assert isinstance(open_kernel(kernel_settings(path), None), LocalKernel)
    assert isinstance(
        open_kernel(replaced(kernel_settings(path), "safety_kernel", addr="127.0.0.1:1"), None), RemoteKernel
    )


RAW = {"SafetyKernel": {"CheckBatch": "CheckBatchRequest"}}
"""Received undecoded, and decoded once per kind of job."""
MESSAGES = {
    "PolicyRequestMessage": "Asked",
    "ConstraintsMessage": "Constraints",
    "RemediationMessage": "Remediation",
    "ApprovalTermsMessage": "ApprovalTerms",
    "DecisionOverrideMessage": "Apart",
    "PolicyDecisionMessage": "Word",
    "PolicyQuestionMessage": "Question",
    "RuleResultMessage": "Finding",
    "SnapshotMessage": "Snapshot",
    "DecisionCode": "Decision",
}
"""Classes named differently from their message in the proto file."""
KINDS = {"string": str, "bool": bool, "uint64": int, "double": float, "bytes": bytes}


def test_messages_match_the_proto_file():
    proto = Path(messages.__file__).with_name("safety.proto").read_text()
    known = {**KINDS, **{proto_name(each): each for each in vars(messages).values() if isinstance(each, type)}}
    declared = {
        name: {
            int(number): _declared(known, rule.strip(), kind, field)
            for rule, kind, field, number in re.findall(
                r"^  (optional |repeated )?([\w<>, ]+) (\w+) = (\d+);", body, re.MULTILINE
            )
        }
        for name, body in re.findall(r"^message (\w+) {(.*?)}", proto, re.DOTALL | re.MULTILINE)
    }
    ours = {
        proto_name(each): {
            number: (
                field.name,
                field.kind,
                field.optional and not issubclass(field.kind, ProtobufMessage),
                field.many,
                field.mapped,
            )
            for number, field in fields(each).items()
        }
        for each in vars(messages).values()
        if isinstance(each, type)
        and issubclass(each, ProtobufMessage)
        and each is not ProtobufMessage
        and "Raw" not in each.__name__
    }
    assert declared == ours
    [body] = re.findall(r"enum Decision {(.*?)}", proto, re.DOTALL)
    assert {name: int(number) for name, number in re.findall(r"(\w+) = (\d+);", body)} == {
        each.name: each.value for each in messages.DecisionCode
    }


def proto_name(kind):
    return MESSAGES.get(kind.__name__, kind.__name__)


def _declared(known, rule, kind, field):
    if kind == "map<string, string>":
        from rota.infra.rpc.protobuf import MapEntry

        return field, MapEntry, False, False, True
    return field, known[kind], rule == "optional", rule == "repeated", False


def test_rpc_methods_match_the_proto_file(path):
    proto = Path(messages.__file__).with_name("safety.proto").read_text()
    services = [service.SafetyKernelService(None), service.OutputPolicyService()]
    for name, body in re.findall(r"^service (\w+) {(.*?)^}", proto, re.DOTALL | re.MULTILINE):
        [ours] = [each for each in services if each.name == f"rota.v1.{name}"]
        calls = {method: call.request.__name__ for method, call in ours.methods().items()}
        assert dict(re.findall(r"rpc (\w+)\((\w+)\)", body)) == {**calls, **RAW.get(name, {})}


def test_policy_request_round_trips_through_its_message():
    bare = PolicyRequest(show="a", topic="b")
    full = PolicyRequest(
        show="s", topic="t", priority=0, folder="f", dept="d", capability="c", risk_tags=("r", "q"), requires=("x",),
        labels={"k": "v", "": ""}, actor_id="i", actor_type="human", tenant="n", principal="p", pack_id="pk",
        adapter_id="ad", workflow_id="w", tasks=("one", "two"), env_names=("E",), frames=10**6, cores=0.25, gpus=3,
        input_bytes=2**40, deadline_ms=99,
    )  # fmt: skip
    for request in (bare, full):
        assert (
            messages.request_of_message(
                decode(encode(messages.request_to_message(request)), messages.PolicyRequestMessage)
            )
            == request
        )
