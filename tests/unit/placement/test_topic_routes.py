"""Topics, pools, requirements and pools.yaml: which pools may run what. Needs no server."""

import pytest

from rota.model.errors import InvalidInput
from rota.model.quota import Level
from rota.model.reasons import MEANINGS, Reason
from rota.placement import PlacementRequirements, PoolSpec, PoolStatus, owning_replica, owns_worker, requirements_of
from rota.placement.explain import eligible_pools
from rota.placement.pools_file import parse_pools_file
from rota.placement.snapshot import capture
from tests.support.placement import Fleet, id_of, pool, routes

FARM, CLOUD, GPU, LOCAL = pool("farm"), pool("cloud"), pool("gpu", provides=("docker", "gpu")), pool("local")


def names(found):
    return [each.name for each in found]


def test_exact_topic_wins_over_globs_and_the_most_specific_glob_wins_over_others():
    given = routes(
        {"*": ("local",), "render.*": ("farm",), "render.*.big": ("gpu",), "render.a": ("cloud",)},
        *(FARM, CLOUD, GPU, LOCAL),
    )
    assert names(given.pools_for("render.a")) == ["cloud"]
    assert names(given.pools_for("render.b")) == ["farm"]
    assert names(given.pools_for("render.b.big")) == ["gpu"]
    assert names(given.pools_for("mail")) == ["local"]


def test_glob_dot_is_literal_and_star_matches_any_text():
    given = routes({"a.*": ("farm",)}, FARM)
    assert given.pools_for("ab") == ()
    assert names(given.pools_for("a.b.c")) == ["farm"]
    assert names(given.pools_for("a.\n")) == ["farm"]


def test_topics_without_any_route_go_to_the_pool_local():
    assert names(routes({}, LOCAL, FARM).pools_for("anything")) == ["local"]
    assert routes({}, LOCAL, FARM).uses_default_pool
    assert routes({}, FARM).pools_for("anything") == ()


def test_first_configured_topic_disables_the_default_pool():
    given = routes({"a": ("farm",)}, LOCAL, FARM)
    assert given.pools_for("b") == ()
    assert not given.uses_default_pool


@pytest.mark.parametrize(
    ("requirements", "reason", "message"),
    [
        (requirements_of("b"), Reason.NO_POOL_MAPPING, "No pool is mapped to the topic b"),
        (requirements_of("a", labels={"preferred_pool": "cloud"}), Reason.NO_POOL_MAPPING, "prefers the pool cloud"),
        (requirements_of("a", ["gpu", "tpu"]), Reason.NO_POOL_MAPPING, "requires gpu, tpu"),
        (requirements_of("d"), Reason.NO_WORKERS, "cloud is draining"),
    ],
)
def test_frame_that_no_pool_accepts_is_refused_with_reason_and_message(requirements, reason, message):
    drained = pool("cloud", status=PoolStatus.DRAINING)
    found = eligible_pools(requirements, routes({"a": ("farm", "gpu"), "d": ("cloud",)}, FARM, GPU, drained))
    assert found.reason is reason
    assert message in found.sentence
    assert not found.pools


def test_required_capabilities_match_pools_independent_of_case_and_spaces():
    given = routes({"a": ("farm", "gpu")}, FARM, GPU)
    assert names(eligible_pools(requirements_of("a", [" GPU "]), given).pools) == ["gpu"]
    assert names(eligible_pools(requirements_of("a"), given).pools) == ["farm", "gpu"]


def test_preferred_pool_restricts_placement_to_that_pool():
    given = routes({"a": ("farm", "gpu")}, FARM, GPU)
    assert names(eligible_pools(requirements_of("a", labels={"preferred_pool": "gpu"}), given).pools) == ["gpu"]


def test_requirements_include_only_placement_labels():
    unrelated = {"ticket": "7", "dept": "fx", "preferred": "x", "placementzone": "y"}
    hints = {"placement.zone": "b", "node.disk": "ssd", "constraint.docker": "true"}
    assert requirements_of("a", labels=unrelated) == requirements_of("a")
    found = requirements_of("a", labels={**unrelated, **hints, "preferred_worker_id": " w1 ", "preferred_pool": " "})
    assert dict(found.labels) == hints
    assert (found.preferred_worker, found.preferred_pool) == ("w1", None)


def test_requirements_digest_is_independent_of_notation():
    one = requirements_of("a", ["B", "a"], {"node.x": "1", "node.a": "2"}, cores=50, gpus=1, memory_mb=7)
    other = requirements_of(
        "a", [" a", "b", "A"], {"node.a": "2", "node.x": "1", "who": "me"}, cores=50, gpus=1, memory_mb=7
    )
    stored = PlacementRequirements.from_row(
        topic="a",
        requires=["a", "b"],
        labels={"node.x": "1", "node.a": "2"},
        preferred_pool=None,
        preferred_worker=None,
        cores=50,
        gpus=1,
        memory_mb=7,
    )
    assert one.digest() == other.digest() == stored.digest()
    assert one == other == stored
    assert one.digest().hex() == "7245ef2652a5940a599f88f5e0bde37b0046b81f139eab97da7f38d5dd2c5fd9"
    differing = {requirements_of("a").digest(), requirements_of("b").digest(), requirements_of("a", gpus=1).digest()}
    assert len(differing | {requirements_of("a", ["x"]).digest(), requirements_of("a", memory_mb=1).digest()}) == 5


def test_negative_resources_are_refused():
    with pytest.raises(InvalidInput, match="negative resources"):
        requirements_of("a", cores=-1)


def test_draining_pool_becomes_inactive_after_its_timeout():
    spec = PoolSpec(name="p", status=PoolStatus.DRAINING, drain_started_ms=1000, drain_timeout_s=10)
    assert spec.status_at(10_999) is PoolStatus.DRAINING
    assert spec.status_at(11_000) is PoolStatus.INACTIVE
    registry = Fleet(routes({}, pool("p", status=spec.status, drain_started_ms=1000, drain_timeout_s=10))).registry
    assert [capture(registry, "me", now_ms).pools["p"].status for now_ms in (10_999, 11_000)] == [
        "draining",
        "inactive",
    ]


def test_every_reason_has_a_meaning_and_every_level_a_reason():
    assert set(MEANINGS) == set(Reason)
    assert all(reason.meaning.endswith(".") for reason in Reason)
    assert [Reason.of_level(level) for level in Level] == [reason for reason in Reason if reason.startswith("quota_")]
    assert Reason.NO_WORKERS.waits
    assert not Reason.NO_POOL_MAPPING.waits


def test_pools_file_is_parsed_in_its_short_and_long_forms():
    text = """
    topics: {job.a: default, job.b: [p1, p2], "render.*": farm}
    pools:
      p1: {requires: [Docker, gpu ], description: the big ones}
      p2: {status: draining, drain_started_at: 2030-01-31T12:00:00Z, drain_timeout_seconds: 600}
      farm:
    """
    file = parse_pools_file(text)
    assert file.topics == {"job.a": ("default",), "job.b": ("p1", "p2"), "render.*": ("farm",)}
    assert file.pools["p1"] == PoolSpec(name="p1", provides=("docker", "gpu"), description="the big ones")
    assert file.pools["p2"].drain_started_ms == 1_896_091_200_000
    assert file.pools["p2"].drain_timeout_s == 600
    assert file.pools["farm"] == PoolSpec(name="farm")


def test_pools_file_words_and_numbers_are_read_as_text():
    file = parse_pools_file("topics: {yes: no, job.010: [on, 010, 12:30]}\npools: {no: {requires: [off, 1e3]}}")
    assert file.topics == {"yes": ("no",), "job.010": ("on", "010", "12:30")}
    assert file.pools["no"].provides == ("1e3", "off")


def test_pools_file_digest_ignores_comments_and_order():
    one = parse_pools_file("topics: {a: p, b: q}\npools: {p: {}, q: {requires: [x, y]}}")
    other = parse_pools_file("# hello\npools: {q: {requires: [y, X]}, p: }\ntopics: {b: q, a: [p]}")
    assert one.digest() == other.digest()
    assert parse_pools_file("topics: {a: [p, q]}").digest() != parse_pools_file("topics: {a: [q, p]}").digest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topics: {a: p}\nqueues: {}", "f:2: 'queues' is not a known key"),
        ("pools:\n  p:\n    provides: [x]", "f:3: 'provides' is not a property of a pool"),
        ("pools: {p: {status: asleep}}", "this is not a status: use one of active, draining, inactive"),
        ("pools: {p: {requires: gpu}}", "a list is required here"),
        ("pools: {p: {drain_timeout_seconds: 4000}}", "give 1 to 3600"),
        ("pools:\n  p:\n    drain_timeout_seconds: 010", "f:3: drain_timeout_seconds is a decimal number: give 1"),
        ("pools:\n  p:\n    drain_timeout_seconds: 0o10", "f:3: drain_timeout_seconds is a decimal number: give 1"),
        ("pools:\n  p: {status: no}", "f:2: this is not a status"),
        ("pools: {p: {drain_started_at: soon}}", "is not a time"),
        ("topics: {a: []}", "give 1 to 100"),
        ("topics: {a: [p, p]}", "distinct pools"),
        ("topics: {a: {b: c}}", "a text value is required here"),
        ("topics: {a: p}\ntopics: {b: q}", "f:2: 'topics' is given twice"),
        ("topics:\n  a: p\n  a: q", "f:3: 'a' is given twice"),
        ("pools:\n  p:\n    status: active\n    status: draining", "f:4: 'status' is given twice"),
        ("topics: {a b: p}", "is not a valid topic"),
        ("topics: [a]", "topics must be a mapping"),
        ("- a", "the file must be a mapping"),
        ("topics: {a: p", "this is not valid YAML"),
        ("topics: {a: p}\n---\ntopics: {}", "f:2: a second document begins here"),
        ("topics: " + "[" * 100_000, "f:1: this is nested deeper than 16"),
        ("\x00", "this is not valid YAML"),
        ("topics:\n  a: &x [*x]", "f:2: anchors and aliases are not supported"),
        ("topics:\n  a: [p, *x]", "f:2: anchors and aliases are not supported"),
        ("topics:\n  a: !!python/name:os.system p", "f:2: tags are not supported"),
    ],
)
def test_invalid_pools_file_is_refused_with_its_line(text, message):
    with pytest.raises(InvalidInput) as refused:
        parse_pools_file(text, "f")
    assert message in refused.value.sentence
    assert refused.value.sentence.endswith(".")


def test_empty_pools_file_configures_nothing():
    assert parse_pools_file("") == parse_pools_file("topics:\npools: ~") == parse_pools_file("# nothing yet")


def test_worker_has_one_owning_replica_and_only_the_workers_of_a_lost_replica_move():
    replicas, workers = ["a", "b", "c"], [id_of(str(number)) for number in range(300)]
    before = {worker: owning_replica(worker, replicas) for worker in workers}
    assert all(sum(owns_worker(replica, worker, replicas) for replica in replicas) == 1 for worker in workers)
    assert {worker: owning_replica(worker, reversed(replicas)) for worker in workers} == before
    after = {worker: owning_replica(worker, ["a", "c"]) for worker in workers}
    assert all(after[worker] == before[worker] for worker in workers if before[worker] != "b")
    shares = [sum(owner == replica for owner in before.values()) for replica in replicas]
    assert min(shares) > 60
    assert owning_replica(workers[0], []) is None
