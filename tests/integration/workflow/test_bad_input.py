"""Invalid definitions and inputs: the same sentence and code by HTTP and from a file, and nothing is written."""

import json
import time

import pytest

from rota.model.access import Role
from rota.model.errors import InvalidInput
from rota.server import services
from rota.workflow.yaml_loader import parse
from tests.support.api import Api, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

WRITTEN = sql("""
SELECT (SELECT count(*) FROM rota.workflow) + (SELECT count(*) FROM rota.workflow_run)
     + (SELECT count(*) FROM rota.job)""")


def flow(*steps, **more):
    return {"name": "flow", "show": "film", "steps": list(steps), **more}


def job(name, *before, **more):
    return {"id": name, "task": "noop", "depends_on": list(before), **more}


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


BAD = {
    "a cycle": flow(job("a", "c"), job("b", "a"), job("c", "b")),
    "an unknown step": flow(job("a", "nobody")),
    "a duplicate step id": flow(job("a"), job("a")),
    "a colon in a name": flow(job("a:b")),
    "non-ASCII letters in a name": flow(job("été")),
    "a colon in the name of the workflow": {**flow(job("a")), "name": "a:b"},
    "an unknown field": flow(job("a", tusk="noop")),
    "an undeclared input": flow(job("a", input={"x": "${input.m}"}), inputs={"n": 1}),
    "a time without UTC offset": flow({"id": "a", "type": "delay", "delay_until": "2026-01-01T00:00:00"}),
    "a negative delay": flow({"id": "a", "type": "delay", "delay_sec": -1}),
    "a delay of centuries": flow({"id": "a", "type": "delay", "delay_sec": 1e300}),
    "an expression that loops": flow(job("a", when="[1].all(x, [2].all(y, true))")),
    "ten thousand items and one": flow(job("a", for_each=[0] * 10_001)),
    "too many steps": flow(*(job(f"s{number}") for number in range(1001))),
    "too deep": flow(job("a", input={"x": deep(40)})),
    "an unknown trigger": flow(job("a"), rollback_on=["sometimes"]),
}


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.worker()
        yield api


async def test_invalid_definition_is_refused_alike_by_http_and_file(api):
    client = await api.client(Role.OPERATOR)
    for what, definition in BAD.items():
        answer = await client.post("/workflows", json=definition)
        problem(answer, 400, "invalid_input")
        with pytest.raises(InvalidInput) as refused:
            parse(json.dumps(definition), "flow.json")
        sentence = refused.value.sentence.partition(": ")[2]
        if what not in (
            "too deep",
            "an unknown field",
            "an unknown trigger",
        ):  # worded by the decoder of files or bodies
            assert answer.json()["detail"].lower() == sentence.lower(), what
    assert await api.farm.database.value(WRITTEN) == 0


BODIES = {
    "not JSON": b"{",
    "a list": b"[]",
    "nested beyond any stack": b'{"name": "f", "steps": [{"id": "a", "task": "x", "input": {"x": '
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}}]}",
    "not a number": b'{"name": "f", "timeout_s": NaN, "steps": [{"id": "a", "task": "x"}]}',
    "not UTF-8": b'{"name": "\xff", "steps": []}',
    "a lone surrogate": b'{"name": "f", "steps": [{"id": "a", "task": "\\ud800"}]}',
}


async def test_malformed_body_or_input_is_refused_and_nothing_is_written(api):
    client = await api.client(Role.OPERATOR)
    headers = {"content-type": "application/json"}
    for body in BODIES.values():
        problem(await client.post("/workflows", content=body, headers=headers), 400, "invalid_input")
    assert await api.farm.database.value(WRITTEN) == 0
    made = await client.post("/workflows", json=flow(job("a"), inputs={"n": {"required": True}, "m": 1}))
    assert made.status_code == 201
    nested = b'{"input": {"n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    wrong = [b"{", b'{"input": []}', b'{"input": {}}', b'{"input": {"n": 1, "o": 2}}', nested, b'{"inputs": {}}']
    wrong.append(json.dumps({"input": {"n": "x" * 300_000}}).encode())
    for body in wrong:
        answer = await client.post("/workflows/film/flow/runs", content=body, headers=headers)
        problem(answer, 400, "invalid_input")
    assert await api.farm.database.value(WRITTEN) == 1


async def test_too_many_items_or_too_large_values_fail_their_step_promptly(api):
    client = await api.client(Role.OPERATOR)
    many = flow(
        job("a", on_error="b", for_each="${input.items}"),
        job("b", on_error="c", for_each="${input.text}"),
        {**job("c", on_error="d", for_each=[1, 2]), "input": {"all": ["${input.items}"] * 3}},
        job("d", when="input.items.map(x, x * 2).size() > 0"),
    )
    await client.post("/workflows", json=many)
    began = time.monotonic()
    given = {"items": [1] * 100_000, "text": "no list"}
    run = (await client.post("/workflows/film/flow/runs", json={"input": given})).json()["run"]

    async def over():
        found = (await client.get(f"/runs/{run}")).json()
        return found if found["ended_at"] else None

    found = await until(over, what="the end of the run")
    assert time.monotonic() - began < 10
    reasons = {step["id"]: step["reason"] for step in found["steps"]}
    assert reasons["a"] == "Step a has 100000 items, at most 10000 are allowed."
    assert reasons["b"] == "The items of step b must be a list, not a str."
    assert "input of step c has" in reasons["c"]
    assert "a list of 100000" in reasons["d"]
    assert found["state"] == "FAILED"
