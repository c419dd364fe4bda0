"""The approval hash changes exactly when the submission does, and survives storage."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.engine.admission.approval_requests import approvable_jobs
from rota.engine.admission.decision import DeferAll
from rota.engine.submission.submitter import Submitter
from rota.model.jobs.submission import Budget, Compensation, LayerSpec, Submission, canonical_bytes
from rota.policy.approval_hash import job_hash
from tests.property.test_policy_request_builder import JOBS
from tests.support.jobs import NO_EVENTS, a_show
from tests.support.queue import sql

CHANGES = st.sampled_from(
    [
        {},
        {"topic": "changed"},
        {"labels": {"changed": "1"}},
        {"env": {"CHANGED": "1"}},
        {"risk_tags": ("changed",)},
        {"capability": "changed"},
        {"actor_id": "changed"},
        {"budget": Budget(deadline_ms=77)},
        {"requires": ("changed",)},
        {"context": {"changed": 1}},
        {"folder": "shots"},
        {"dept": "fx"},
        {"priority": 3},
        {"workflow_id": "changed"},
        {"compensation": Compensation(topic="changed")},
        {"max_wait_s": 7.0},
        {"layers": (LayerSpec(name="l0", task="changed", input=1),)},
        {"layers": (LayerSpec(name="l0", task="t", items=[1, 2, 3]),)},
        {"layers": (LayerSpec(name="l0", task="t", items=[1, 2, 4]),)},
        {"layers": (LayerSpec(name="l0", task="t", input="x" * 70_000),)},
        {"layers": (LayerSpec(name="l0", task="t", input="y" * 70_000),)},
        {"layers": (LayerSpec(name="l0", argv=("rm", "-rf", "/")),)},
        {"layers": (LayerSpec(name="l0", argv=("rm", "-rf", "/tmp")),)},
        {"layers": (LayerSpec(name="l0", task="t", frames="1-10x3"),)},
        {"layers": (LayerSpec(name="l0", task="t", frames="1-10x4"),)},
        {"layers": (LayerSpec(name="l0", task="t", timeout_s=7.0),)},
        {"layers": (LayerSpec(name="l0", task="t", memory="1GiB"),)},
        {"layers": (LayerSpec(name="l0", task="t", requires=("changed",)),)},
    ]
)


def examples(most):
    """Pairs of submissions, the second differing from the first in one field or none; the same in every run."""
    pairs = []

    @settings(max_examples=most, database=None, derandomize=True)
    @given(JOBS, CHANGES, CHANGES)
    def collect(job, one, two):
        job = msgspec.structs.replace(job, show="film", idempotency_key="")
        pairs.append(tuple(msgspec.structs.replace(job, **change) for change in (one, two)))

    collect()
    return pairs


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Submitter(database, NO_EVENTS, gate=DeferAll())


async def hashes(submitter, submissions):
    jobs = [one.job for one in await submitter.submit(submissions)]
    found = await approvable_jobs(submitter.database, jobs)
    return [found[job].hash for job in jobs]


async def test_approval_hash_changes_exactly_when_the_payload_does(submitter):
    pairs = examples(250)
    one = await hashes(submitter, [first for first, _ in pairs])
    two = await hashes(submitter, [second for _, second in pairs])
    assert {a == b for a, b in zip(one, two, strict=True)} == {True, False}
    for (first, second), a, b in zip(pairs, one, two, strict=True):
        assert (a == b) == (canonical_bytes(first) == canonical_bytes(second)), (first, second)


async def test_approval_hash_is_independent_of_time_and_job_state(submitter, database):
    [[first, _]] = examples(1)[:1]
    [before] = await hashes(submitter, [first])
    await database.run(sql("UPDATE rota.show SET str_name = 'renamed'"))
    await database.run(
        sql("""UPDATE rota.job SET state = 'APPROVAL_REQUIRED', reason = 'approval_required', ts_updated = now(),
               word = 7, asks = 3, history = '[]',
               labels = coalesce(labels, '{}') || '{"approval_by": "ann", "Approval_x": "1"}'""")
    )
    [job] = [row["pk_job"] for row in await database.rows(sql("SELECT pk_job FROM rota.job"))]
    assert (await approvable_jobs(database, [job]))[job].hash == before


async def test_approval_hash_ignores_the_trace_and_covers_fields_of_later_versions(submitter, database):
    [[first, _]] = examples(1)[:1]
    [before] = await hashes(submitter, [first])
    [row] = await database.rows(sql("SELECT pk_job, request FROM rota.job"))
    details = msgspec.msgpack.decode(row["request"]) if row["request"] else {}
    for more, same in (({"trace": "00-1-2-01"}, True), ({"unheard_of": 1}, False)):
        packed = msgspec.msgpack.encode({**details, **more})
        await database.run(sql("UPDATE rota.job SET request = $1"), packed)
        assert ((await approvable_jobs(database, [row["pk_job"]]))[row["pk_job"]].hash == before) is same


STORED = [
    *(f"UPDATE rota.job SET {name} = gen_random_uuid()" for name in ("pk_show", "pk_folder", "pk_dept")),
    *(f"UPDATE rota.job SET {name} = 'changed'" for name in ("str_name", "topic", "workflow_id")),
    "UPDATE rota.job SET priority = 8",
    "UPDATE rota.job SET ts_run_at = now()",
    """UPDATE rota.job SET labels = '{"a": "other"}'""",
    "UPDATE rota.job SET request = NULL",
    *(f"UPDATE rota.layer SET {name} = '\\x2a'" for name in ("work", "input")),
    *(f"UPDATE rota.layer SET {name} = 'changed'" for name in ("str_name", "input_at")),
    *(f"UPDATE rota.layer SET {name} = 7" for name in ("number", "first_frame", "frame_step")),
    "UPDATE rota.layer SET frames = 77",
    "UPDATE rota.layer SET ranges = '{1,2}'",
    "UPDATE rota.layer SET items = ARRAY['\\x2b'::bytea]",
    "UPDATE rota.placement_class SET digest = '\\x00'",
    "UPDATE rota.layer SET queue = 'another'",
]


@pytest.mark.parametrize("change", STORED)
async def test_change_of_any_stored_field_changes_the_approval_hash(submitter, database, change):
    layer = LayerSpec(name="l0", task="t", items=[1])
    [before] = await hashes(submitter, [Submission(show="film", layers=(layer,), labels={"a": "1"}, env={"A": "1"})])
    await database.run(sql(change))
    [row] = await database.rows(sql("SELECT pk_job FROM rota.job"))
    assert (await approvable_jobs(database, [row["pk_job"]]))[row["pk_job"]].hash != before


def test_empty_payload_has_no_approval_hash():
    with pytest.raises(AssertionError):
        job_hash({}, [])
