"""What a policy is asked about a job is the same before it is written and after, and the same for alike jobs."""

from uuid import uuid4

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.model.ids import JobId
from rota.model.jobs.submission import Budget, LayerSpec, Submission, decode_submission, encode_submission
from rota.model.jobs.validation import validate_submission
from rota.policy.request_builder import PolicyRequestBuilder, group_stored_jobs, input_of_submission, request_of_input

WORDS = st.sampled_from(["a", "b", "gpu", "Net", "x.y"])
TAGS = st.lists(WORDS, max_size=3).map(tuple)
TEXT = st.dictionaries(WORDS, st.text("abc", max_size=3), max_size=3)
ENV = st.dictionaries(st.sampled_from(["A", "B_1", "TOKEN"]), st.text("abc", max_size=3), max_size=3)
LAYERS = st.builds(
    lambda task, argv, **more: LayerSpec(**({"argv": (argv, "-x")} if task is None else {"task": task}), **more),
    st.none() | WORDS,
    WORDS,
    input=st.none() | st.integers(-9, 9) | st.text(max_size=300),
    frames=st.none() | st.integers(1, 5),
    cores=st.sampled_from([1, 2, 0.5]),
    gpus=st.integers(0, 2),
    requires=TAGS,
    env=ENV,
)
JOBS = st.builds(
    Submission,
    show=WORDS,
    layers=st.lists(LAYERS, min_size=1, max_size=3).map(
        lambda layers: tuple(msgspec.structs.replace(each, name=f"l{n}") for n, each in enumerate(layers))
    ),
    topic=WORDS,
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
def test_a_plan_that_stands_for_many_is_asked_about_like_the_same_plan_alone(given):
    one = validate_submission(given)
    alone = msgspec.structs.replace(one, like=None)
    job = a_job()
    [shared] = PolicyRequestBuilder().group_submissions([job], [one]).questions
    [single] = group_stored_jobs([job], [input_of_submission(alone)]).questions
    assert shared == single


@given(JOBS)
def test_all_that_rules_look_at_is_told(given):
    asked = request_of_input(input_of_submission(validate_submission(given)))
    assert (asked.show, asked.topic, asked.labels) == (given.show, given.topic, given.labels)
    assert set(asked.requires) == {
        word.lower() for word in (*given.requires, *(each for layer in given.layers for each in layer.requires))
    }
    assert set(asked.env_names) == {*given.env, *(name for layer in given.layers for name in layer.env)}
    assert set(asked.tasks) == {layer.task or layer.argv[0] for layer in given.layers}
    assert (asked.risk_tags, asked.capability, asked.actor_id) == (given.risk_tags, given.capability, given.actor_id)
    assert asked.frames == sum(layer.frames or 1 for layer in given.layers)
    assert (asked.deadline_ms, asked.principal) == (given.budget.deadline_ms, given.principal)


@given(st.lists(JOBS, min_size=1, max_size=8), st.integers(1, 3))
def test_jobs_are_grouped_by_all_that_rules_look_at_and_nothing_else(given, times):
    plans = [validate_submission(decode_submission(encode_submission(each))) for each in given for _ in range(times)]
    jobs = [a_job() for _ in plans]
    grouped = PolicyRequestBuilder().group_submissions(jobs, plans)
    assert sorted(job for each in grouped.questions for job in each.jobs) == sorted(jobs)
    for job, place, of in zip(jobs, grouped.places, plans, strict=True):
        assert job in grouped.questions[place].jobs
        assert grouped.questions[place].asked == request_of_input(input_of_submission(of))
    encoded = [msgspec.msgpack.Encoder(order="deterministic").encode(each.asked) for each in grouped.questions]
    assert len(set(encoded)) == len(encoded)
