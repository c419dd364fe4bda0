"""Policy requests are equal before and after a job is stored, and equal for similar jobs."""

from uuid import uuid4

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.model.ids import JobId
from rota.model.jobs.submission import Budget, LayerSpec, Submission, decode_submission, encode_submission
from rota.model.jobs.validation import validate_submission
from rota.policy.request_builder import PolicyRequestBuilder, group_stored_jobs, input_of_submission, request_of_input

NAMES = st.sampled_from(["a", "b", "gpu", "Net", "x.y"])
TAGS = st.lists(NAMES, max_size=3).map(tuple)
TEXT = st.dictionaries(NAMES, st.text("abc", max_size=3), max_size=3)
ENV = st.dictionaries(st.sampled_from(["A", "B_1", "TOKEN"]), st.text("abc", max_size=3), max_size=3)
LAYERS = st.builds(
    lambda task, argv, **more: LayerSpec(**({"argv": (argv, "-x")} if task is None else {"task": task}), **more),
    st.none() | NAMES,
    NAMES,
    input=st.none() | st.integers(-9, 9) | st.text(max_size=300),
    frames=st.none() | st.integers(1, 5),
    cores=st.sampled_from([1, 2, 0.5]),
    gpus=st.integers(0, 2),
    requires=TAGS,
    env=ENV,
)
JOBS = st.builds(
    Submission,
    show=NAMES,
    layers=st.lists(LAYERS, min_size=1, max_size=3).map(
        lambda layers: tuple(msgspec.structs.replace(each, name=f"l{n}") for n, each in enumerate(layers))
    ),
    topic=NAMES,
    labels=TEXT,
    env=ENV,
    requires=TAGS,
    risk_tags=TAGS,
    capability=st.sampled_from(["", "pay"]),
    actor_id=st.sampled_from(["", "ann"]),
    principal=st.sampled_from(["", "key"]),
    budget=st.builds(Budget, deadline_ms=st.integers(0, 9)),
    idempotency_key=st.sampled_from(["", "k"]),
)


def a_job():
    return JobId(uuid4())


@settings(max_examples=200)
@given(JOBS)
def test_request_of_a_shared_plan_equals_that_of_the_plan_alone(submission):
    one = validate_submission(submission)
    alone = msgspec.structs.replace(one, like=None)
    job = a_job()
    [shared] = PolicyRequestBuilder().group_submissions([job], [one]).questions
    [single] = group_stored_jobs([job], [input_of_submission(alone)]).questions
    assert shared == single


@given(JOBS)
def test_policy_request_has_everything_that_rules_read(submission):
    request = request_of_input(input_of_submission(validate_submission(submission)))
    assert (request.show, request.topic, request.labels) == (submission.show, submission.topic, submission.labels)
    assert set(request.requires) == {
        capability.lower()
        for capability in (*submission.requires, *(each for layer in submission.layers for each in layer.requires))
    }
    assert set(request.env_names) == {*submission.env, *(name for layer in submission.layers for name in layer.env)}
    assert set(request.tasks) == {layer.task or layer.argv[0] for layer in submission.layers}
    assert (request.risk_tags, request.capability, request.actor_id) == (
        submission.risk_tags,
        submission.capability,
        submission.actor_id,
    )
    assert request.frames == sum(layer.frames or 1 for layer in submission.layers)
    assert (request.deadline_ms, request.principal) == (submission.budget.deadline_ms, submission.principal)


@given(st.lists(JOBS, min_size=1, max_size=8), st.integers(1, 3))
def test_jobs_are_grouped_by_exactly_what_rules_read(submissions, times):
    plans = [
        validate_submission(decode_submission(encode_submission(each))) for each in submissions for _ in range(times)
    ]
    jobs = [a_job() for _ in plans]
    grouped = PolicyRequestBuilder().group_submissions(jobs, plans)
    assert sorted(job for each in grouped.questions for job in each.jobs) == sorted(jobs)
    for job, index, plan in zip(jobs, grouped.places, plans, strict=True):
        assert job in grouped.questions[index].jobs
        assert grouped.questions[index].asked == request_of_input(input_of_submission(plan))
    encoded = [msgspec.msgpack.Encoder(order="deterministic").encode(each.asked) for each in grouped.questions]
    assert len(set(encoded)) == len(encoded)
