"""Replicas answer with the same bytes, whatever order their sets have: two server processes with other hash seeds."""

import asyncio
import os
import socket
import subprocess
import sys

import httpx

from rota.infra.postgres import Database, PostgresTarget
from rota.model.access import GrantSpec, Role
from rota.server.access import ApiKeyStore
from tests.support.api import PREFIX
from tests.support.jobs import a_show
from tests.support.policy_kernel import ROTA
from tests.support.waiting import until

ORDER = "print(list(frozenset({'error', 'timeout'})))"
SEEDS = ("1", "2", "3", "4", "5", "6", "7", "8")
PATHS = ("/jobs/{job}", "/jobs", "/jobs/{job}/layers", "/shows", "/pools", "/workflows", "/dlq", "/openapi.json")
TYPES = ("application/json", "application/msgpack")


def two_seeds():
    """Two seeds by which the default of `retry.on` has another order."""
    by_order = {}
    for seed in SEEDS:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        shown = subprocess.run([sys.executable, "-c", ORDER], env=env, capture_output=True, check=True)
        by_order.setdefault(shown.stdout, seed)
    one, other = by_order.values()
    return one, other


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


async def test_servers_with_different_hash_seeds_answer_with_the_same_bytes(
    database_url, redis_url, nats_url, bus_prefix, spawn
):
    database = await Database.open(PostgresTarget(url=database_url))
    created = await ApiKeyStore(database).create("k", [GrantSpec(Role.ADMIN)], actor="test")
    await a_show(database, "film")
    await database.close()
    urls = []
    for seed in two_seeds():
        port = free_port()
        env = {
            "PYTHONHASHSEED": seed,
            "ROTA_POSTGRES_URL": database_url,
            "ROTA_REDIS_URL": redis_url,
            "ROTA_NATS_URL": nats_url,
            "ROTA_NATS_PREFIX": bus_prefix,
            "ROTA_LISTEN_PORT": str(port),
        }
        await spawn(None, argv=[ROTA, "server"], env=env, fork=False)
        urls.append(f"http://127.0.0.1:{port}")
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {created.plain.text}"}, timeout=20.0) as client:

        async def ready():
            try:
                answers = [await client.get(f"{url}/ready") for url in urls]
            except httpx.TransportError:
                return False
            return all(answer.status_code == 200 for answer in answers)

        await until(ready, within_s=60, what="two servers")
        first = urls[0] + PREFIX
        retry = {"most": 3, "on": ["error", "timeout"]}
        labels = {"a": "1", "b": "2", "c": "3"}
        run_at = "2099-01-01T00:00:00Z"  # so that nothing changes between two answers
        layer = {"task": "noop", "retries": retry, "env": labels}
        submission = {"show": "film", "run_at": run_at, "labels": labels, "layers": [layer]}
        submitted = await client.post(f"{first}/jobs", json=submission)
        assert submitted.status_code == 201, submitted.text
        job = submitted.json()["job"]
        for path in PATHS:
            for kind in TYPES:
                answers = await asyncio.gather(
                    *(client.get(url + PREFIX + path.format(job=job), headers={"Accept": kind}) for url in urls)
                )
                assert {answer.status_code for answer in answers} == {200}, (path, [each.text for each in answers])
                assert len({answer.content for answer in answers}) == 1, (path, [each.text for each in answers])
