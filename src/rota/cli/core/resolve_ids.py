"""Resolves what people type (a name, an id or an id prefix) to an id."""

from __future__ import annotations

import difflib
import re
from typing import Final
from uuid import UUID

from rota.engine.queries.jobs import JobQueries
from rota.infra.postgres import Database, Query, query
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import JobId, LayerId, RunId, parse_id

JOBS_BY_PREFIX = query(__package__, "jobs_find")
RUNS_BY_PREFIX = query(__package__, "runs_find")
LAYERS_BY_PREFIX = query(__package__, "layers_find")
JOB_BY_NAME = query(__package__, "jobs_named")
LIVE_JOBS_BY_NAME = query(__package__, "jobs_named_live")

PREFIX_CHARS_MIN: Final = 4
SUGGESTION_JOBS_MAX: Final = 200
"""Most recent jobs whose names are candidates for "did you mean"."""
_PREFIX_PATTERN = re.compile(r"[0-9a-f-]{4,36}", re.ASCII)


async def find_job(jobs: JobQueries, text: str) -> JobId:
    """The job with this id prefix, or else the newest job with this name."""
    found = await _by_prefix(jobs.database, JOBS_BY_PREFIX, "jobs", text)
    if found is None:
        found = await jobs.database.value(JOB_BY_NAME, text)
    if found is None:
        near = difflib.get_close_matches(
            text, {line.name for line in (await jobs.list(most=SUGGESTION_JOBS_MAX)).items}, n=1
        )
        hint = f"did you mean {near[0]}?" if near else "see `rota jobs`."
        raise NotFound(f"There is no job with the id or name {text[:64]!r}, or it was deleted: {hint}")
    return JobId(found)


async def find_run(database: Database, text: str) -> RunId | None:
    """The workflow run with this id prefix. None when there is no such run, or when a job has that prefix."""
    if await _by_prefix(database, JOBS_BY_PREFIX, "jobs", text) is not None:
        return None
    found = await _by_prefix(database, RUNS_BY_PREFIX, "runs", text)
    return None if found is None else RunId(found)


async def require_run(database: Database, text: str) -> RunId:
    """The run with this id prefix."""
    found = await _by_prefix(database, RUNS_BY_PREFIX, "runs", text)
    if found is None:
        run = parse_id(RunId, text)
        raise NotFound(f"There is no run {run}, or it was deleted: see `rota workflow list`.")
    return RunId(found)


async def find_job_unambiguous(jobs: JobQueries, text: str) -> JobId:
    """For irreversible actions: by id prefix, or by a name that exactly one live job has, of any owner."""
    found = await _by_prefix(jobs.database, JOBS_BY_PREFIX, "jobs", text)
    if found is not None:
        return JobId(found)
    matches = [row["id"] for row in await jobs.database.rows(LIVE_JOBS_BY_NAME, text)]
    if len(matches) > 1:
        raise InvalidInput(f"Several live jobs have the name {text[:64]!r}: use the id of one ({_sample(matches)}).")
    if not matches:
        raise NotFound(f"There is no job with the id {text[:64]!r}, and no live job with that name: see `rota jobs`.")
    return JobId(matches[0])


def parse_full_id(text: str) -> UUID | None:
    """A full id is accepted even when its job has been deleted, because dead letters outlive their job."""
    try:
        return UUID(text.strip())
    except ValueError:
        return None


async def find_layer(database: Database, text: str) -> LayerId:
    """By id or id prefix only: a layer is named after its task, so names are ambiguous."""
    found = await _by_prefix(database, LAYERS_BY_PREFIX, "layers", text)
    if found is None:
        raise NotFound(f"There is no live layer with the id {text[:64]!r}: `rota job show JOB -o wide` lists them.")
    return LayerId(found)


async def _by_prefix(database: Database, which: Query, kind: str, text: str) -> UUID | None:
    text = text.strip().lower()
    digits = text.replace("-", "")
    if not _PREFIX_PATTERN.fullmatch(text) or not PREFIX_CHARS_MIN <= len(digits) <= 32:
        return None
    first, last = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    found: list[UUID] = [row["id"] for row in await database.rows(which, first, last)]
    if len(found) > 1:
        raise InvalidInput(f"Several {kind} have ids that begin with {text} ({_sample(found)}): type more characters.")
    return found[0] if found else None


def _sample(ids: list[UUID]) -> str:
    return ", ".join(map(str, ids[:3])) + (", ..." if len(ids) > 3 else "")
