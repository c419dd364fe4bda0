"""Causes in words: who refuses, with which numbers, who has it, and what to type. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

from rota.accounting.ledger import Why
from rota.accounting.standings import Standings
from rota.engine.board import Before
from rota.engine.explain_cause import cause
from rota.engine.explain_decide import Refused
from rota.engine.explain_policy import unapproved, undecided
from rota.engine.explain_told import Amounts, Cause, Holder, JobBefore, Position, Refuser, RefuserKind
from rota.engine.jobs import Job, Layer
from rota.infra.postgres import Record
from rota.model.approval import Approval
from rota.model.lifecycle import JobState
from rota.model.quota import Level, Resource
from rota.model.reasons import Reason
from rota.model.units import Centicores, format_cores, span
from rota.placement import Explanation, PlacementClass

PASSED_SHOWN: Final = 3

_KINDS: Final[dict[Level, RefuserKind]] = {
    Level.SUBSCRIPTION: "subscription",
    Level.FOLDER: "folder",
    Level.JOB: "job",
    Level.LAYER: "layer",
    Level.POINT: "dept",
}


def of_the_job(
    job: Job,
    row: Record,
    holders: Sequence[Holder],
    before: tuple[Sequence[JobBefore], int],
    approval: Approval | None,
    *,
    bus_is_there: bool,
) -> Iterator[Cause]:
    """What concerns all its layers."""
    if row["ends_as"] is not None:
        sentence = f"It is being ended as {row['ends_as']}{_because(job.reason)}: nothing of it starts any more."
        yield cause(Reason.ENDING, sentence, remedy=Reason.ENDING.remedy(job=str(job.id)))
        return
    if before[0]:
        yield _waiting_on(*before)
    elif job.state is JobState.APPROVAL_REQUIRED:
        yield unapproved(job, approval, row["now"])
    elif job.state is JobState.PENDING:
        yield undecided(job, row["ts_ask_at"])
    elif row["jobs_before"] is not None and row["jobs_before"] >= row["jobs_max"]:
        yield _tenant_limit(job, row["jobs_before"], row["jobs_max"], holders)
    if row["dispatch_failures"]:
        times = "once" if row["dispatch_failures"] == 1 else f"{row['dispatch_failures']} times"
        sentence = f"Handing it to a worker failed {times}{_because(job.reason)}, and is tried again."
        yield cause(Reason.DISPATCH_FAILED, sentence, next_try="after a pause that doubles with every failure")
    if row["leader"] is None:
        yield cause(Reason.NO_SERVER, refuser=Refuser("server", "none is up"))
    elif not bus_is_there:
        yield cause(Reason.BUS_UNAVAILABLE, refuser=Refuser("server", "NATS"))


def _because(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _waiting_on(before: Sequence[JobBefore], jobs: int) -> Cause:
    told = ", ".join(f"{each.name} ({each.state}{f', {each.reason}' if each.reason else ''})" for each in before)
    more = f", and {jobs - len(before)} more" if jobs > len(before) else ""
    return cause(
        Reason.WAITING_ON_JOB,
        f"It waits for {'another job' if jobs == 1 else f'{jobs} jobs'} to end: {told}{more}.",
        remedy=Reason.WAITING_ON_JOB.remedy(job=str(before[0].id)),
        refuser=Refuser("job", before[0].name),
        waits_for=before,
        next_try="when the last of them has ended",
    )


def _tenant_limit(job: Job, have: int, limit: int, holders: Sequence[Holder]) -> Cause:
    return cause(
        Reason.TENANT_LIMIT,
        f"The show {job.show} runs {have} of at most {limit} {'job' if limit == 1 else 'jobs'} at once.",
        remedy=Reason.TENANT_LIMIT.remedy(show=job.show, n=str(have + 1)),
        refuser=Refuser("show", job.show),
        amounts=Amounts("jobs", have, 1, limit),
        holders=holders,
        next_try="when a job of the show ends, or the limit changes",
    )


def paused(layer: Layer) -> Cause:
    return cause(
        Reason.PAUSED,
        f"Its queue {layer.queue} is paused.",
        remedy=Reason.PAUSED.remedy(queue=layer.queue),
        layer=layer,
        refuser=Refuser("queue", layer.queue),
        next_try="when the queue is resumed",
    )


def deferred(job: Job, layer: Layer, frames: int, run_at: datetime, now: datetime) -> Cause:
    left_s = max(0.0, (run_at - now).total_seconds())
    who = "1 frame waits for its time" if frames == 1 else f"{frames} frames wait for their time"
    sentence = f"{who}, the first for {span(left_s)} more (a delay, or the pause before another attempt)."
    remedy = Reason.DEFERRED.remedy(job=str(job.id))
    return cause(Reason.DEFERRED, sentence, remedy=remedy, layer=layer, next_at=run_at, next_try="at that time")


def of_placement(
    layer: Layer,
    wanted: PlacementClass,
    found: Explanation,
    pools: Sequence[str],
    *,
    knows: int,
    holders: Sequence[Holder],
) -> Cause:
    """`knows`: of the workers that were considered, how many know the task."""
    assert found.reason is not None, "there is room"
    task, pool = layer.work.task, pools[0] if pools else "POOL"
    if task and found.considered and not knows:
        who = "worker of its pools knows" if found.considered == 1 else "workers of its pools knows"
        return cause(
            Reason.UNKNOWN_TASK,
            f"None of the {found.considered} {who} the task {task}.",
            remedy=Reason.UNKNOWN_TASK.remedy(task=task),
            layer=layer,
            refuser=Refuser("pool", ", ".join(pools)),
            found=found,
        )
    passed = "; ".join(f"{each.name}: {each.why}" for each in found.passed[:PASSED_SHOWN])
    more = f"; and {len(found.passed) - PASSED_SHOWN} more" if len(found.passed) > PASSED_SHOWN else ""
    return cause(
        found.reason,
        f"{found.sentence}{f' ({passed}{more})' if passed else ''}",
        remedy=found.reason.remedy(topic=wanted.topic, pool=pool),
        layer=layer,
        refuser=Refuser("pool", ", ".join(pools)) if pools else None,
        found=found,
        holders=holders,
    )


def of_quota(job: Job, layer: Layer, refused: Refused, met: Standings, holders: Sequence[Holder]) -> Cause:
    """A limit that says no to some frame, and is perhaps not reached before others have started."""
    refusal, pool, level = refused.refusal, refused.pool_name, refused.level
    code, cores = Reason.of_level(level), refusal.resource is Resource.CORES
    have = met.used(level, refused.pool).of(refusal.resource)
    amounts = Amounts(
        "cores" if cores else "gpus", *(_shown(n, cores=cores) for n in (have, refusal.asked, refusal.limit))
    )
    if level is Level.SUBSCRIPTION and refused.pool not in met.shares:
        sentence = f"The show {job.show} has no share of the pool {pool}."
        remedy = f"`rota sub create {job.show} {pool} --size CORES --burst CORES` gives it one."
    else:
        unit, enough = ("cores" if cores else "GPUs"), refusal.current + refusal.asked
        used, limit, asked, n = (_text(n, cores=cores) for n in (have, refusal.limit, refusal.asked, enough))
        sentence = f"{_whose(job, layer, pool, level)} uses {used} of {limit} {unit}, and a frame needs {asked}."
        if refusal.current > have:
            sentence = f"{sentence[:-1]}: it is full when some more have started."
        remedy = code.remedy(
            show=job.show,
            pool=pool,
            folder=job.folder,
            dept=job.dept,
            job=str(job.id),
            layer=str(layer.id),
            burst="burst" if cores else "gpu-burst",
            what="cores" if cores else "gpus",
            n=n,
        )
    refuser = Refuser(_KINDS[level], _name(job, layer, pool, level))
    return cause(code, sentence, remedy=remedy, layer=layer, refuser=refuser, amounts=amounts, holders=holders)


def books_away(layer: Layer, why: Why | None) -> Cause:
    seeding = "Redis is being seeded with the books of its show, which takes moments."
    sentence = seeding if why is Why.UNSEEDED else "Redis, which keeps the books of its show, does not answer."
    return cause(Reason.BOOKS_UNAVAILABLE, sentence, layer=layer, refuser=Refuser("server", "Redis"))


def of_order(job: Job, layer: Layer, position: Position, before: Before) -> Iterator[Cause]:
    """What goes first, if anything does."""
    if before.by_share:
        sentence = f"{before.frames} frames of other queues come first, since their shows use less of their size."
        yield cause(Reason.FAIR_SHARE, sentence, remedy=Reason.FAIR_SHARE.remedy(show=job.show), layer=layer)
    ahead = (position.ahead or 0) + (0 if before.by_share else before.frames)
    if ahead:
        who = "1 frame goes" if ahead == 1 else f"{ahead} frames go"
        yield cause(Reason.BEHIND, f"{who} first, by priority and by how long they have waited.", layer=layer)


def _shown(amount: int, *, cores: bool) -> float:
    return amount / 100 if cores else amount


def _text(amount: int, *, cores: bool) -> str:
    return format_cores(Centicores(amount)) if cores else str(amount)


def _whose(job: Job, layer: Layer, pool: str, level: Level) -> str:
    match level:
        case Level.SUBSCRIPTION:
            return f"The show {job.show} in the pool {pool}"
        case Level.FOLDER:
            return f"The folder {job.folder}"
        case Level.JOB:
            return "The job"
        case Level.LAYER:
            return f"The layer {layer.name}"
        case Level.POINT:
            return f"The department {job.dept}"


def _name(job: Job, layer: Layer, pool: str, level: Level) -> str:
    match level:
        case Level.SUBSCRIPTION:
            return f"{job.show} in {pool}"
        case Level.FOLDER:
            return job.folder
        case Level.JOB:
            return job.name
        case Level.LAYER:
            return layer.name
        case Level.POINT:
            return job.dept
