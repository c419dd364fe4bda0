"""Validation of submissions before anything is written: what is refused, and with which message."""

import json
import math
from datetime import UTC, datetime
from uuid import uuid4

import msgspec
import pytest

from rota.model.errors import InvalidInput
from rota.model.jobs import validation
from rota.model.jobs.submission import (
    SUBMISSION_BYTES_MAX,
    Budget,
    Compensation,
    ContextHints,
    LayerSpec,
    LimitSpec,
    RetrySpec,
    Submission,
    decode_details,
    decode_submission,
    encode_submission,
)
from rota.model.jobs.validation import DEPTH_MAX, ENTRIES_MAX, LAYERS_MAX, ResourceCaps, validate_submission
from rota.model.jobs.work import ProcessLimits, Retries, Work

LAYER = LayerSpec(task="render")


def job(*layers, **more):
    return Submission(show="film", layers=layers or (LAYER,), **more)


def validated(submission, **more):
    return validate_submission(decode_submission(encode_submission(submission)), **more)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


REFUSED = {
    "no layer": (Submission(show="film", layers=()), "at least one layer"),
    "too many layers": (job(*(LayerSpec(task=f"t{n}") for n in range(LAYERS_MAX + 1))), "101 layers"),
    "duplicate layer name": (job(LayerSpec(name="a", task="x"), LayerSpec(name="a", task="y")), "have the name 'a'"),
    "a time before 1970": (job(LayerSpec(task="a"), run_at=datetime(1, 1, 1, tzinfo=UTC)), "out of range"),
    "a time after 2999": (job(LayerSpec(task="a"), run_at=datetime(3000, 1, 1, tzinfo=UTC)), "out of range"),
    "nothing to run": (job(LayerSpec()), "either a task or an argv"),
    "task and argv": (job(LayerSpec(task="a", argv=("b",))), "either a task or an argv"),
    "an empty program": (job(LayerSpec(argv=("", "x"))), "begins with an empty argument"),
    "NUL in argv": (job(LayerSpec(argv=("a", "b\0c"))), "argv of layer a cannot be run"),
    "too long an argv": (job(LayerSpec(argv=("a",) * 1001)), "at most 1000 arguments"),
    "frames and items": (job(LayerSpec(task="a", frames=3, items=[1])), "both frames and items"),
    "no items": (job(LayerSpec(task="a", items=[])), "0 is not a valid number of frames"),
    "no frames": (job(LayerSpec(task="a", frames=0)), "0 is not a valid number of frames"),
    "too many frames": (job(LayerSpec(task="a", frames=10_000_001)), "10000001 is not a valid number of frames"),
    "too many frames together": (
        job(LayerSpec(task="a", frames=9_000_000), LayerSpec(task="b", frames=2_000_000)),
        "11000000 frames",
    ),
    "too many items": (
        job(LayerSpec(task="a", items=[0] * ENTRIES_MAX), LayerSpec(task="b")),
        "10001 items and ranges",
    ),
    "a large item": (job(LayerSpec(task="a", items=["x" * 70_000])), "70005 bytes, at most 65536"),
    "a bad frame spec": (job(LayerSpec(task="a", frames="1-")), "not a valid frame spec"),
    "negative cores": (job(LayerSpec(task="a", cores=-1)), "not a valid amount of cores"),
    "NaN cores": (job(LayerSpec(task="a", cores=math.nan)), "not a valid amount of cores"),
    "too precise cores": (job(LayerSpec(task="a", cores=0.123)), "too precise"),
    "too many cores": (job(LayerSpec(task="a", cores=1e300)), "too many"),
    "negative GPUs": (job(LayerSpec(task="a", gpus=-1)), "-1 GPUs per frame"),
    "memory without a unit": (job(LayerSpec(task="a", memory="4")), "not a valid amount of memory"),
    "a negative timeout": (job(LayerSpec(task="a", timeout_s=-1)), "timeout_s of layer a"),
    "NaN timeout": (job(LayerSpec(task="a", timeout_s=math.nan)), "timeout_s of layer a"),
    "infinite timeout": (job(LayerSpec(task="a", timeout_s=math.inf)), "timeout_s of layer a"),
    "negative retries": (job(LayerSpec(task="a", retries=-1)), "retries of layer a"),
    "infinite backoff": (job(LayerSpec(task="a", retries=RetrySpec(first_s=math.inf))), "first_s of retries"),
    "negative lost workers": (job(LayerSpec(task="a", retries=RetrySpec(lost=-2))), "lost of retries of layer a"),
    "limits of a task": (job(LayerSpec(task="a", limits=LimitSpec(cpu_s=1))), "they apply to commands only"),
    "negative CPU time": (job(LayerSpec(argv=("a",), limits=LimitSpec(cpu_s=-1))), "cpu_s of limits"),
    "a file size without a unit": (job(LayerSpec(argv=("a",), limits=LimitSpec(file_size="4"))), "amount of memory"),
    "an artifact outside the directory": (
        job(LayerSpec(argv=("a",), artifacts=("../x",))),
        "not a valid artifact pattern for layer a",
    ),
    "an artifact at the root": (
        job(LayerSpec(argv=("a",), artifacts=("/etc/*",))),
        "not a valid artifact pattern for layer a",
    ),
    "a malformed artifact pattern": (
        job(LayerSpec(argv=("a",), artifacts=("a**b/c",))),
        "not a valid artifact pattern",
    ),
    "too many artifacts": (job(LayerSpec(argv=("a",), artifacts=("x",) * 33)), "Layer a has 33 artifact patterns"),
    "a frame above the job's cap": (
        job(LayerSpec(task="a", cores=4), max_cores=2),
        "the cap of the job is 2: raise the cap",
    ),
    "a frame above the layer's cap": (job(LayerSpec(task="a", gpus=2, max_gpus=1)), "the cap of the layer a is 1"),
    "a negative cap": (job(max_cores=-2), "not a valid limit in cores"),
    "a negative GPU cap": (job(max_gpus=-2), "not a valid GPU limit for the job"),
    "an empty show": (Submission(show="", layers=(LAYER,)), "is not a valid show"),
    "a NUL in the name": (job(name="a\0b"), "is not a valid name of the job"),
    "a long name": (job(name="x" * 201), "is not a valid name of the job"),
    "a newline in a layer's name": (job(LayerSpec(name="a\nb", task="x")), "name of layer 0"),
    "an empty topic": (job(topic=""), "is not a valid topic"),
    "a topic with wildcards": (job(topic="job.>"), "is not a valid topic"),
    "priority 0": (job(priority=0), "0 is not a valid priority"),
    "priority 10": (job(priority=10), "10 is not a valid priority"),
    "an unknown priority": (job(priority="URGENT"), "'URGENT' is not a valid priority"),
    "CRITICAL without the operator role": (job(priority="CRITICAL"), "requires the operator role"),
    "priority 9 without the operator role": (job(priority=9), "requires the operator role"),
    **{
        f"the label {label}, which is reserved": (job(labels={label: "x"}), "is reserved for Rota")
        for label in ("approval_granted", "Approval_By", "retry_of", "agent", "remediation_of", "saga_workflow_id")
    },
    "a compensation with a reserved label": (
        job(compensation=Compensation(topic="undo", labels={"approval_granted": "true"})),
        "is reserved for Rota",
    ),
    "too many labels": (job(labels={f"k{n}": "" for n in range(65)}), "65 labels"),
    "a label without a name": (job(labels={"": "x"}), "is not a valid label name"),
    "a label with a NUL": (job(labels={"a": "\0"}), "label a"),
    "a long label": (job(labels={"a": "x" * 1001}), "1001 characters"),
    "a variable with =": (job(env={"A=B": "x"}), "is not a valid name of an environment variable"),
    "a variable with NUL": (job(env={"A": "\0"}), "environment variable A"),
    "too many variables": (job(env={f"K{n}": "" for n in range(257)}), "257 environment variables"),
    "a layer's bad variable": (
        job(LayerSpec(task="a", env={"1": ""})),
        "is not a valid name of an environment variable",
    ),
    "tenants that differ": (job(tenant="a", env={"tenant_id": "b"}), "tenant"),
    "a negative deadline": (job(budget=Budget(deadline_ms=-1)), "deadline_ms of budget"),
    "a huge deadline": (job(budget=Budget(deadline_ms=2**62)), "deadline_ms of budget"),
    "a negative budget": (job(budget=Budget(max_total_tokens=-5)), "max_total_tokens of budget"),
    "a negative step": (job(step_index=-1), "step_index"),
    "an infinite wait": (job(max_wait_s=math.inf), "max_wait_s"),
    "a malformed capability": (job(requires=("g p u",)), "a valid entry of requires"),
    "too many risk tags": (job(risk_tags=tuple(f"t{n}" for n in range(65))), "too many risk_tags"),
    "an empty capability of a layer": (job(LayerSpec(task="a", requires=("",))), "a valid entry of requires"),
    "a long key": (job(idempotency_key="k" * 201), "idempotency_key"),
    "a deep context": (job(context=nested(DEPTH_MAX + 1)), "context is nested"),
    "a deep input": (job(LayerSpec(task="a", input={"x": nested(DEPTH_MAX)})), "nested more than 32 levels"),
    "a deep item": (job(LayerSpec(task="a", items=[nested(DEPTH_MAX + 1)])), "item of layer a is nested"),
    "a compensation without a topic": (job(compensation=Compensation(topic="")), "is not a valid topic"),
    "a compensation with task and argv": (job(compensation=Compensation(topic="t", task="a", argv=("b",))), "both"),
    "hints below zero": (job(context_hints=ContextHints(max_input_tokens=-1)), "context_hints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_submission_is_refused_with_a_reason(case):
    submission, message = REFUSED[case]
    with pytest.raises(InvalidInput) as refused:
        validated(submission)
    assert message in refused.value.sentence
    assert refused.value.sentence.endswith(".")
    assert len(refused.value.sentence) < 400


BYTES = {
    "nothing": (b"", "not a valid submission"),
    "a number": (b"\x01", "not a valid submission"),
    "a list": (b"[]", "not a valid submission"),
    "a truncated message": (encode_submission(job())[:-1], "not a valid submission"),
    "trailing bytes": (encode_submission(job()) + b"\x00", "not a valid submission"),
    "not UTF-8": (b"\x81\xa4show\xa2\xff\xfe", "not a valid submission"),
    "truncated JSON": (b'{"show": "film"', "not a valid submission"),
    "an unknown field": (b'{"show": "film", "layers": [{"task": "a"}], "prio": 3}', "unknown field `prio`"),
    "an unknown field of a layer": (b'{"show": "f", "layers": [{"task": "a", "core": 3}]}', "unknown field `core`"),
    "no show": (b'{"layers": [{"task": "a"}]}', "`show`"),
    "no layers": (b'{"show": "film"}', "`layers`"),
    "a wrong type": (b'{"show": 5, "layers": []}', "Expected `str`"),
    "true for a number": (b'{"show": "f", "layers": [{"task": "a", "gpus": true}]}', "Expected `int`"),
    "a time without a zone": (b'{"show": "f", "layers": [{"task": "a"}], "run_at": "2030-01-01T00:00:00"}', "run_at"),
    "a huge number": (b'{"show": "f", "layers": [{"task": "a", "input": %s}]}' % (b"9" * 400), "cannot be stored"),
    "a huge count": (b'{"show": "f", "layers": [{"task": "a", "frames": %s}]}' % (b"9" * 60), "not a valid "),
    "deep JSON": (b'{"show": "f", "layers": [{"task": "a", "input": %s}]}' % (b"[" * 50_000), "not a valid submission"),
    "deep msgpack": (b"\x82\xa4show\xa1f\xa6layers\x91\x81\xa5input" + b"\x91" * 50_000, "not a valid submission"),
    "too large": (b" " * (SUBMISSION_BYTES_MAX + 1), "bytes, at most"),
}


@pytest.mark.parametrize("case", BYTES)
def test_malformed_submission_bytes_are_refused_with_a_reason(case):
    data, message = BYTES[case]
    with pytest.raises(InvalidInput) as refused:
        validate_submission(decode_submission(data))
    assert message in refused.value.sentence
    assert len(refused.value.sentence) < 500


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, object(), "\ud800", nested(100_000), {1: {2: print}}])
def test_values_that_cannot_be_encoded_are_refused(value):
    with pytest.raises(InvalidInput, match="cannot be encoded"):
        encode_submission(job(LayerSpec(task="a", input=value)))


def test_types_are_validated_at_runtime():
    with pytest.raises(InvalidInput, match="Expected `str`"):
        validated(job(name=5))
    with pytest.raises(InvalidInput, match="Expected `object`"):
        validated(Submission(show="film", layers=("render",)))


def test_submission_in_json_and_in_msgpack_is_equal():
    whole = {
        "show": "film",
        "layers": [{"task": "render", "frames": "1-100x2", "cores": 0.5, "input": {"shot": "a01"}}],
        "priority": "BATCH",
        "labels": {"placement.zone": "b"},
    }
    assert validate_submission(decode_submission(json.dumps(whole).encode())) == validate_submission(
        decode_submission(msgspec.msgpack.encode(whole))
    )


def test_nan_inside_an_input_is_kept():
    [layer] = validated(job(LayerSpec(task="a", input=[math.nan]))).layers
    assert math.isnan(msgspec.msgpack.decode(layer.input)[0])


def test_validated_submission_has_the_work_of_every_layer():
    submission = validated(
        job(
            LayerSpec(
                task="render", frames="1-100x2", cores=0.5, memory="4GiB", retries=3, env={"A": "2"}, timeout_s=60
            ),
            LayerSpec(argv=("/bin/echo", "hello"), gpus=1, max_cores=8, requires=("CUDA",), input="own"),
            context={"shot": "a01"},
            env={"A": "1", "B": "1"},
            requires=("Linux", "cuda"),
            labels={"node.rack": "7", "team": "fx", "preferred_pool": "gpu"},
            priority="BATCH",
        )
    )
    render, echo = submission.layers
    assert msgspec.msgpack.decode(render.work, type=Work) == Work(
        task="render",
        env={"A": "2", "B": "1"},
        timeout_s=60,
        cores=50,
        memory_mb=4096,
        retries=Retries(most=3),
    )
    assert (render.frames.count, msgspec.msgpack.decode(render.input)) == (50, {"shot": "a01"})
    assert msgspec.msgpack.decode(echo.work, type=Work).argv == ("/bin/echo", "hello")
    assert (echo.name, echo.caps, msgspec.msgpack.decode(echo.input)) == ("echo-1", ResourceCaps(800, -1), "own")
    assert echo.place.requires == ("cuda", "linux")
    assert (echo.place.labels, echo.place.preferred_pool) == ((("node.rack", "7"),), "gpu")
    assert (submission.name, submission.priority, json.loads(submission.labels)["team"]) == ("render", 1, "fx")


STORED = (
    b"\x9d\xa1t\x90\x80"
    + bytes.fromhex("cb0000000000000000 cb4014000000000000 64 00 00 95 00 cb3ff0000000000000 cb4072c00000000000 92")
    + b"\xa5error\xa7timeout"
    + bytes.fromhex("ff 94 00 00 00 00 90 00 c2")
)
"""All fields of a task without options, as earlier versions stored them."""


def test_defaults_of_work_are_not_stored_and_never_change():
    [layer] = validated(job(LayerSpec(task="t"))).layers
    assert layer.work == msgspec.msgpack.encode(["t"])
    assert msgspec.msgpack.decode(layer.work, type=Work) == msgspec.msgpack.decode(STORED, type=Work) == Work(task="t")


@pytest.mark.parametrize(
    ("spec", "work", "fields"),
    [
        (LayerSpec(argv=("a",)), Work(argv=("a",)), 2),
        (LayerSpec(task="t", env={"A": "1"}), Work(task="t", env={"A": "1"}), 3),
        (LayerSpec(task="t", timeout_s=2), Work(task="t", timeout_s=2), 4),
        (LayerSpec(task="t", kill_after_s=0), Work(task="t", kill_after_s=0), 5),
        (LayerSpec(task="t", cores=2), Work(task="t", cores=200), 6),
        (LayerSpec(task="t", memory="1GiB"), Work(task="t", memory_mb=1024), 8),
        (LayerSpec(task="t", retries=2), Work(task="t", retries=Retries(most=2)), 9),
        (LayerSpec(task="t", fail_fast=True), Work(task="t", fail_fast=True), 13),
    ],
)
def test_work_is_stored_up_to_its_last_field_without_the_default(spec, work, fields):
    [layer] = validated(job(spec)).layers
    assert msgspec.msgpack.decode(layer.work, type=Work) == work
    assert len(msgspec.msgpack.decode(layer.work)) == fields


def test_process_limits_of_a_command_are_part_of_its_work():
    limits = LimitSpec(cpu_s=90, address="8GiB", open_files=64, file_size="1GiB")
    [layer] = validated(job(LayerSpec(argv=("a",), limits=limits))).layers
    assert msgspec.msgpack.decode(layer.work, type=Work).limits == ProcessLimits(90, 8192, 64, 1024)


@pytest.mark.parametrize(
    ("requested", "maximum", "effective"),
    [
        (ProcessLimits(), ProcessLimits(), ProcessLimits()),
        (ProcessLimits(1, 2, 3, 4), ProcessLimits(), ProcessLimits(1, 2, 3, 4)),
        (ProcessLimits(), ProcessLimits(1, 2, 3, 4), ProcessLimits(1, 2, 3, 4)),
        (ProcessLimits(9, 1, 0, 4), ProcessLimits(1, 9, 3, 0), ProcessLimits(1, 1, 3, 4)),
    ],
)
def test_lower_of_two_process_limits_applies(requested, maximum, effective):
    assert requested.within(maximum) == effective


def test_remaining_fields_of_a_submission_are_kept_in_its_details():
    parent = uuid4()
    fields = {
        "capability": "write",
        "risk_tags": ("prod",),
        "actor_id": "ann",
        "actor_type": "human",
        "tenant": "acme",
        "principal": "key1",
        "step_index": 3,
        "parent_job_id": parent,
        "memory_id": "m",
        "adapter_id": "ad",
        "pack_id": "p",
        "context_hints": ContextHints(allow_retrieval=True, tags=("a",)),
        "compensation": Compensation(topic="undo", task="undo", context={"x": 1}, priority=9),
        "budget": Budget(max_total_tokens=5, deadline_ms=1500),
        "requires": ("linux",),
        "env": {"A": "1"},
        "idempotency_key": "k",
    }
    submission = validated(job(**fields, workflow_id="w", max_wait_s=2.5, run_at=datetime(2030, 1, 1, tzinfo=UTC)))
    details = decode_details(submission.details)
    assert {name: getattr(details, name) for name in fields} == fields
    assert (submission.workflow_id, submission.deadline_ms, submission.max_wait_s) == ("w", 1500, 2.5)
    assert (submission.key, len(submission.digest)) == ("k", 32)


def test_plain_submission_has_no_details():
    assert validated(job(LayerSpec(task="a", input=1))).details is None


def test_submissions_that_differ_only_in_input_validate_to_equal_plans_without_input():
    plans = [validated(job(LayerSpec(task="a", input=n))) for n in range(3)]
    assert [msgspec.msgpack.decode(each.layers[0].input) for each in plans] == [0, 1, 2]
    bare = [
        msgspec.structs.replace(each, layers=(msgspec.structs.replace(each.layers[0], input=None),)) for each in plans
    ]
    assert bare[0] == bare[1] == bare[2]


def test_permission_for_critical_is_not_cached_across_callers():
    submission = job(LayerSpec(task="a", input=1), priority="critical")
    assert validated(submission, may_be_critical=True).priority == 9
    with pytest.raises(InvalidInput, match="requires the operator role"):
        validated(submission)


def test_digest_covers_the_whole_submission_independent_of_map_order():
    def digest(**more):
        return validated(job(idempotency_key="k", **more)).digest

    assert digest(labels={"a": "1", "b": "2"}) == digest(labels={"b": "2", "a": "1"})
    assert digest(context={"a": [1, {"x": 1, "y": 2}]}) == digest(context={"a": [1, {"y": 2, "x": 1}]})
    assert digest(labels={"a": "1"}) != digest(labels={"a": "2"}) != digest()


def test_layers_with_equal_requirements_share_a_placement_spec():
    def place(**more):
        return validated(job(LayerSpec(task="a", **more))).layers[0].place

    assert place() == place(input=3, name="other", timeout_s=5, retries=2)
    assert len({place(), place(cores=2), place(gpus=1), place(memory="1GiB"), place(requires=("x",))}) == 5


def test_submissions_that_share_a_validation_keep_their_own_name_key_and_input():
    def submission(**own):
        number = own.pop("number")
        layer = LayerSpec(task="render", input={"args": [number], "kwargs": {}}, cores=0.5)
        return Submission(show="film", layers=(layer,), **own)

    given = [
        submission(number=1),
        submission(number=2, name="two"),
        submission(number=3, idempotency_key="three"),
        submission(number=3, idempotency_key="also three"),
    ]
    found = [validate_submission(each) for each in given]
    assert [(each.name, each.key) for each in found] == [
        ("render", None),
        ("two", None),
        ("render", "three"),
        ("render", "also three"),
    ]
    for each, alone in zip(found, [validation._validate(each, False, frozenset()) for each in given], strict=True):
        assert msgspec.structs.replace(each, like=None) == alone
    with pytest.raises(InvalidInput, match="idempotency_key"):
        validate_submission(submission(number=4, idempotency_key="k" * 1000))
