"""`rota explain`: why a job is not running, as far as PostgreSQL knows.

Where a frame may run is decided by the functions that dispatch asks (`placement.explaining`), what it may use by the
rule that the books keep (`model.quota.fits`). What only servers know is not guessed at, and said to be unknown: which
show's turn it is, how busy machines are with other work, and what was booked in the last moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from typing import Final

import msgspec

from rota.cli import workers as working
from rota.cli.books_view import Page, cores
from rota.cli.dlq_view import several
from rota.cli.jobs import find
from rota.cli.jobs_view import counts_of, meaning, needs
from rota.cli.queue_view import span
from rota.cli.workers import Known
from rota.engine.board import CLASSES, class_of
from rota.engine.jobs import Job, Jobs, Layer
from rota.engine.recovery import LEASE
from rota.infra.postgres import Database, Record, query
from rota.model.lifecycle import FrameState, JobState
from rota.model.quota import Ask, Level, Limit, Refusal, Resource, Standing, Usage, fits
from rota.model.reasons import Reason
from rota.placement import PlacementClass, Routes
from rota.placement.explaining import eligible
from rota.placement.explaining import explain as explain_placement
from rota.placement.routing import Routing

JOB = query(__package__, "explain_job")
LAYER = query(__package__, "explain_layer")
LIMITS = query(__package__, "explain_limits")

PASSED_SHOWN: Final = 3
UNKNOWN: Final = (
    "whose turn it is among shows, and how busy machines are with other work, is known to the servers alone"
)


class Kind(IntEnum):
    """What stands in the way, the first to be mended first."""

    MISCONFIGURED = 0
    BLOCKED = 1
    QUOTA = 2
    CAPACITY = 3
    SYSTEM = 4


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    code: str
    sentence: str
    remedy: str = ""
    layer: str | None = None
    facts: Mapping[str, object] = {}


async def explained(jobs: Jobs, prefix: str) -> Page:
    job = await jobs.get(await find(jobs, prefix))
    if job.state.terminal:
        return _page(job, [], [_how_it_ended(job)])
    findings = await findings_of(jobs.database, job)
    return _page(job, sorted(findings, key=lambda finding: finding.kind), [])


async def findings_of(database: Database, job: Job) -> list[Finding]:
    row = await database.row(JOB, job.id, LEASE)
    found = [] if row is None else [*_of_job(job, row)]
    if row is None or row["ends_as"] is not None:
        return found
    routes, workers = await Routing(database).read(), await working.known(database)
    for layer in job.layers:
        if layer.counts.get(FrameState.WAITING):
            found += await _of_layer(database, job, layer, routes, workers)
    return found


def _of_job(job: Job, row: Record) -> Iterator[Finding]:
    if row["ends_as"] is not None:
        yield _finding(Kind.BLOCKED, job.reason or "ending", f"It is being ended as {row['ends_as']}: nothing starts.")
    elif job.state in (JobState.PENDING, JobState.APPROVAL_REQUIRED):
        code = job.reason or job.state.lower()
        yield _finding(Kind.BLOCKED, code, meaning(code) or "It was not admitted to the queue yet.")
    elif row["jobs_before"] is not None and row["jobs_before"] >= row["jobs_max"]:
        yield _finding(
            Kind.QUOTA,
            Reason.TENANT_LIMIT,
            f"The show {job.show} runs {row['jobs_before']} of at most {several(row['jobs_max'], 'job')} at once.",
            f"`rota show set {job.show} --max-jobs N` raises that; a job that ends makes room.",
            facts={"used": row["jobs_before"], "limit": row["jobs_max"]},
        )
    if row["dispatch_failures"]:
        yield _finding(
            Kind.SYSTEM,
            Reason.DISPATCH_FAILED,
            f"Handing it to a worker failed {several(row['dispatch_failures'], 'time')}, and is tried again later.",
        )
    if row["leader"] is None:
        yield _finding(
            Kind.SYSTEM, "no_server", "No server is up, so nothing is started.", "Start `rota up` or `rota server`."
        )


async def _of_layer(
    database: Database, job: Job, layer: Layer, routes: Routes, workers: Sequence[Known]
) -> list[Finding]:
    row = await database.row(LAYER, layer.id)
    [place] = await database.rows(CLASSES, [layer.queue])
    wanted = class_of(place)
    found = [] if row is None else [*_in_the_queue(layer, row)]
    placing = [*_of_placement(layer, wanted, routes, workers)]
    misconfigured = [finding for finding in placing if finding.kind is Kind.MISCONFIGURED]
    if row is not None and row["deferred"] >= layer.counts.get(FrameState.WAITING, 0):
        return found + misconfigured  # whether there is room matters when their time has come
    if not misconfigured:
        found += _of_quota(job, layer, wanted, routes, await database.rows(LIMITS, layer.id))
    return found + placing


def _in_the_queue(layer: Layer, row: Record) -> Iterator[Finding]:
    if row["paused"]:
        remedy = f"`rota queue resume {layer.queue}` opens it."
        yield _finding(Kind.BLOCKED, Reason.PAUSED, f"Its queue {layer.queue} is paused.", remedy, layer)
    if row["deferred"]:
        left_s = max(0.0, (row["run_at"] - datetime.now(UTC)).total_seconds())
        what = f"{several(row['deferred'], 'frame')} wait for their time, the first for {span(left_s)} more"
        yield _finding(Kind.BLOCKED, "deferred", f"{what} (a delay, or the pause before another attempt).", "", layer)


def _of_placement(layer: Layer, wanted: PlacementClass, routes: Routes, workers: Sequence[Known]) -> Iterator[Finding]:
    task = layer.work.task
    pools = {pool.name for pool in eligible(wanted, routes).pools}
    able = [worker for worker in workers if worker.pool in pools]
    if task and able and not any(task in worker.hello.tasks for worker in able):
        sentence = f"None of the {several(len(able), 'worker')} of its pools knows the task {task}."
        yield _finding(Kind.MISCONFIGURED, "unknown_task", sentence, "Start one with `rota worker APP`.", layer)
        return
    found = explain_placement(wanted, routes, [worker.placed() for worker in workers])
    if found.reason is not None:
        kind = Kind.MISCONFIGURED if found.reason is Reason.NO_POOL_MAPPING else Kind.CAPACITY
        passed = "; ".join(f"{each.name}: {each.why}" for each in found.passed[:PASSED_SHOWN])
        more = f"; and {len(found.passed) - PASSED_SHOWN} more" if len(found.passed) > PASSED_SHOWN else ""
        sentence = f"{found.sentence}{f' ({passed}{more})' if passed else ''}"
        facts = {"considered": found.considered, "passed": found.passed}
        yield _finding(kind, found.reason, sentence, _placement_remedy(found.reason, wanted), layer, facts)


def _placement_remedy(reason: Reason, wanted: PlacementClass) -> str:
    match reason:
        case Reason.NO_POOL_MAPPING:
            return f"`rota pool map {wanted.topic} POOL` maps one."
        case Reason.POOL_OVERLOADED:
            return "It starts when frames there end, or another worker comes."
        case _:
            return ""


def _of_quota(
    job: Job, layer: Layer, wanted: PlacementClass, routes: Routes, rows: Sequence[Record]
) -> Iterator[Finding]:
    """Of the pools that may run it, each with its own subscription: refused when none of them has room."""
    others = {Level(row["level"]): row for row in rows if row["level"] != Level.SUBSCRIPTION}
    shares = {row["name"]: row for row in rows if row["level"] == Level.SUBSCRIPTION}
    ask = Ask(wanted.cores, wanted.gpus)
    refused = []
    for pool in eligible(wanted, routes).pools:
        met = others | ({Level.SUBSCRIPTION: shares[pool.name]} if pool.name in shares else {})
        fit = fits({level: _standing(row) for level, row in met.items()}, ask, 1)
        if fit.refusal is None:
            return
        refused.append((pool.name, fit.refusal))
    for pool_name, refusal in refused:
        yield _over_quota(job, layer, pool_name, refusal, has_share=pool_name in shares)


def _over_quota(job: Job, layer: Layer, pool: str, refusal: Refusal, *, has_share: bool) -> Finding:
    level, is_cores = refusal.table, refusal.resource is Resource.CORES
    code = Reason.of_level(level)
    unit = "cores" if is_cores else "GPUs"
    used, limit, asked = (cores(n) if is_cores else str(n) for n in (refusal.current, refusal.limit, refusal.asked))
    facts = {"resource": refusal.resource, "used": used, "limit": limit, "asked": asked, "pool": pool}
    if level is Level.SUBSCRIPTION and not has_share:
        sentence = f"The show {job.show} has no share of the pool {pool}."
        remedy = f"`rota sub create {job.show} {pool} --size CORES --burst CORES` gives it one."
        return _finding(Kind.QUOTA, code, sentence, remedy, layer, facts)
    whose, remedy = _whose(job, layer, pool, level, "cores" if is_cores else "gpus")
    sentence = f"{whose} uses {used} of {limit} {unit}, and a frame needs {asked}."
    return _finding(Kind.QUOTA, code, sentence, f"{remedy} raises that; frames that end make room.", layer, facts)


def _whose(job: Job, layer: Layer, pool: str, level: Level, what: str) -> tuple[str, str]:
    match level:
        case Level.SUBSCRIPTION:
            option = "burst" if what == "cores" else "gpu-burst"
            return f"The show {job.show} in the pool {pool}", f"`rota sub set {job.show} {pool} --{option} N`"
        case Level.FOLDER:
            return f"The folder {job.folder}", f"`rota folder set {job.show} {job.folder} --max-{what} N`"
        case Level.JOB:
            return "The job", f"`rota job set {job.show} {job.id} --max-{what} N`"
        case Level.LAYER:
            return f"The layer {layer.name}", f"`rota layer set {job.show} {layer.id} --max-{what} N`"
        case Level.POINT:
            return f"The department {job.dept}", f"`rota dept set {job.show} {job.dept} --max-{what} N`"


def _standing(row: Record) -> Standing:
    return Standing(Limit(row["cores_max"], row["gpus_max"]), Usage(row["cores"], row["gpus"]))


def _finding(
    kind: Kind,
    code: str,
    sentence: str,
    remedy: str = "",
    layer: Layer | None = None,
    facts: Mapping[str, object] | None = None,
) -> Finding:
    name = None if layer is None else layer.name
    return Finding(kind=kind, code=str(code), sentence=sentence, remedy=remedy, layer=name, facts=facts or {})


def _how_it_ended(job: Job) -> str:
    why = f": {meaning(job.reason) or job.reason}" if job.reason else "."
    return f"It has ended as {job.state}{why}"


def _page(job: Job, findings: Sequence[Finding], said: list[str]) -> Page:
    counts = counts_of(job)
    waiting, held = counts.get(FrameState.WAITING, 0), counts.get(FrameState.DISPATCHED, 0)
    data = {
        "job": job.id,
        "state": job.state,
        "reason": job.reason,
        "waiting": waiting,
        "on_workers": held,
        "reasons": [_finding_data(finding) for finding in findings],
        "not_known": None if job.state.terminal else UNKNOWN,
    }
    head = f"{job.name} {job.id}: {job.state}"
    if job.state.terminal:
        return Page(data, [head, *said])
    lines = [f"{head}, {several(waiting, 'frame')} waiting, {held} on workers ({_needs(job)})."]
    for finding in findings:
        where = f"{finding.layer}: " if finding.layer and len(job.layers) > 1 else ""
        lines += [
            f"  {finding.code}: {where}{finding.sentence}",
            *([f"    {finding.remedy}"] if finding.remedy else []),
        ]
    if waiting and not findings:
        lines.append("  Nothing in PostgreSQL holds it back: it should start within moments.")
    if not waiting:
        lines.append("  Nothing of it waits.")
    elif findings == [] or findings[0].kind > Kind.BLOCKED:
        lines.append(f"  (Not known here: {UNKNOWN}.)")
    return Page(data, lines)


def _needs(job: Job) -> str:
    return "; ".join(f"{needs(layer)} per frame" for layer in job.layers)


def _finding_data(finding: Finding) -> dict[str, object]:
    return msgspec.structs.asdict(finding) | {"kind": finding.kind.name.lower()}
