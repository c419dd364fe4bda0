"""The first page of a list of a million jobs, by HTTP: half of them live, half ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Final
from urllib.parse import quote

import msgspec

from bench.api.explain import p99
from bench.api.server import serving
from bench.api.submits import Client
from bench.e2e.setup import Ground
from bench.report import Figure
from bench.server import opened, statement
from rota.accounting.service import AccountingService
from rota.engine.events.sink import DiscardedEvents
from rota.engine.submission.submitter import Submitter
from rota.infra.postgres import migrate
from rota.model.access import GrantSpec, Role
from rota.model.jobs.submission import LayerSpec, Submission
from rota.server.access import ApiKeyStore

JOBS: Final = 1_000_000
ASKS: Final = 200
BAR_MS: Final = 50.0
NEWER: Final = "lpad(to_hex(i), 12, '0')"

LIVE = statement(
    f"""INSERT INTO rota.job (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, labels, request,
                              history)
        SELECT (left(j.pk_job::text, 24) || {NEWER})::uuid, j.pk_show, j.pk_folder, j.pk_dept, 'n' || i, j.topic,
               j.priority, j.state, jsonb_build_object('shot', (i % 5000)::text), j.request, j.history
        FROM (SELECT * FROM rota.job LIMIT 1) AS j, generate_series($1::int, $2::int) AS i"""
)
LAYERS = statement(
    f"""INSERT INTO rota.layer (pk_layer, pk_job, number, str_name, queue, work, input, frames)
        SELECT gen_random_uuid(), (left(l.pk_job::text, 24) || {NEWER})::uuid, 0, l.str_name, l.queue, l.work,
               l.input, 1
        FROM (SELECT * FROM rota.layer LIMIT 1) AS l, generate_series($1::int, $2::int) AS i"""
)
DONE = statement(
    f"""INSERT INTO rota.job_done (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, labels,
                                   ts_submitted, ts_finished, history, layers)
        SELECT (left(j.pk_job::text, 24) || {NEWER})::uuid, j.pk_show, j.pk_folder, j.pk_dept, 'n' || i, j.topic,
               j.priority, CASE WHEN i % 1000 = 0 THEN 'FAILED' ELSE 'SUCCEEDED' END,
               jsonb_build_object('shot', (i % 5000)::text), now(), now(), j.history, ARRAY[l]
        FROM (SELECT * FROM rota.job LIMIT 1) AS j, (SELECT l FROM rota.layer AS l LIMIT 1) AS l,
             generate_series($1::int, $2::int) AS i"""
)
ANALYSE = statement("ANALYZE")


class Samples(msgspec.Struct):
    jobs: int
    first_ms: list[float]
    filtered_ms: dict[str, list[float]]

    def figures(self) -> Iterator[Figure]:
        note = f"p99 of `GET /jobs`, {self.jobs:,} jobs, half of them live"
        yield Figure("list_first_page_ms_at_1m", [p99(self.first_ms)], bar=BAR_MS, note=note)
        for query, took_ms in self.filtered_ms.items():
            yield Figure(f"list_{query.partition(':')[0]}_ms_at_1m", [p99(took_ms)], note=f"the same with `{query}`")


async def lists(ground: Ground, *, jobs: int = JOBS, asks: int = ASKS) -> Samples:
    async with AsyncExitStack() as closing:
        url = await ground.postgres.create("lists")
        closing.push_async_callback(ground.postgres.drop, "lists")
        await migrate(url)
        key = await _filled(url, jobs)
        port = await closing.enter_async_context(serving(ground, url, f"L{time.monotonic_ns()}"))
        client = await Client.opened(port, closing)
        first = await _asked(client, key, "", asks)
        queries = ("show:film", "state:FAILED", "label:shot=77")
        return Samples(jobs, first, {query: await _asked(client, key, query, asks // 4) for query in queries})


async def _filled(url: str, jobs: int) -> str:
    async with opened(url) as database:
        admin = AccountingService(database, None).admin
        await admin.create_show("film", actor="bench")
        await admin.create_folder("film", "default", actor="bench")
        await admin.create_dept("default", actor="bench")
        await Submitter(database, DiscardedEvents()).submit([Submission(show="film", layers=(LayerSpec(task="noop"),))])
        for fill in (DONE, LIVE, LAYERS):
            first, last = (1, jobs // 2) if fill is DONE else (jobs // 2 + 1, jobs)
            await database.run(fill, first, last)
        await database.run(ANALYSE)
        made = await ApiKeyStore(database).create("bench", [GrantSpec(Role.VIEWER)], actor="bench")
        return made.plain.text


async def _asked(client: Client, key: str, query: str, asks: int) -> list[float]:
    path = f"/api/v1/jobs?q={quote(query)}" if query else "/api/v1/jobs"
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n\r\n".encode()
    took_ms = []
    for _ in range(asks + 10):
        began = time.perf_counter()
        page = msgspec.json.decode(await client.ask(request))
        took_ms.append((time.perf_counter() - began) * 1000)
        assert page["items"], page
    return took_ms[10:]  # the first warm connections and plans
