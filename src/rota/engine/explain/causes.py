"""Causes as sentences: who refuses, the amounts, who holds the resource, and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

from rota.accounting.ledger import DeclineReason
from rota.api.explanation import BlockingJob, Cause, Holder, LimitAmounts, QueuePosition, Refuser, RefuserKind
from rota.api.jobs import JobView, Layer
from rota.engine.dispatch.pending_queues import PendingPosition
from rota.engine.explain.cause import cause
from rota.engine.explain.placement_and_quota import PoolQuotaRefusal, RefusalUsage
from rota.engine.explain.policy_causes import approval_pending_cause, policy_pending_cause
from rota.infra.postgres import Record
from rota.model.approvals import Approval
from rota.model.job_states import JobState
from rota.model.quota import Level, Resource
from rota.model.reasons import Reason
from rota.model.units import Centicores, format_cores, humanize_duration
from rota.placement import PlacementExplanation, PlacementRequirements

REJECTED_WORKERS_SHOWN_MAX: Final = 3

_REFUSER_KINDS: Final[dict[Level, RefuserKind]] = {
    Level.SUBSCRIPTION: "subscription",
    Level.FOLDER: "folder",
    Level.JOB: "job",
    Level.LAYER: "layer",
    Level.POINT: "dept",
}


def job_causes(
    job: JobView,
    row: Record,
    holders: Sequence[Holder],
    before: tuple[Sequence[BlockingJob], int],
    approval: Approval | None,
    *,
    bus_connected: bool,
) -> Iterator[Cause]:
    """Causes that concern all layers of a job."""
    if row["ends_as"] is not None:
        sentence = f"It is being ended as {row['ends_as']}{_reason_suffix(job.reason)}: no more of its frames start."
        yield cause(Reason.ENDING, sentence, remedy=Reason.ENDING.remedy(job=str(job.id)))
        return
    if before[0]:
        yield _waiting_on_jobs(*before)
    elif job.state is JobState.APPROVAL_REQUIRED:
        yield approval_pending_cause(job, approval, row["now"])
    elif job.state is JobState.PENDING:
        yield policy_pending_cause(job, row["ts_ask_at"])
    elif row["jobs_before"] is not None and row["jobs_before"] >= row["jobs_max"]:
        yield _tenant_limit(job, row["jobs_before"], row["jobs_max"], holders)
    if row["dispatch_failures"]:
        times = "once" if row["dispatch_failures"] == 1 else f"{row['dispatch_failures']} times"
        sentence = f"Assigning it to a worker failed {times}{_reason_suffix(row['dispatch_error'])} and is retried."
        yield cause(
            Reason.DISPATCH_FAILED,
            sentence,
            next_at=row["ts_dispatch_retry"],
            next_try="after a pause that doubles with every failure",
        )
    if row["leader"] is None:
        yield cause(Reason.NO_SERVER, refuser=Refuser("server", "none is up"))
    elif not bus_connected:
        yield cause(Reason.BUS_UNAVAILABLE, refuser=Refuser("server", "NATS"))


def _reason_suffix(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _waiting_on_jobs(before: Sequence[BlockingJob], jobs: int) -> Cause:
    names = ", ".join(f"{each.name} ({each.state}{f', {each.reason}' if each.reason else ''})" for each in before)
    more = f", and {jobs - len(before)} more" if jobs > len(before) else ""
    return cause(
        Reason.WAITING_ON_JOB,
        f"It waits for {'another job' if jobs == 1 else f'{jobs} jobs'} to end: {names}{more}.",
        remedy=Reason.WAITING_ON_JOB.remedy(job=str(before[0].id)),
        refuser=Refuser("job", before[0].name),
        waits_for=before,
        next_try="when the last of them has ended",
    )


def _tenant_limit(job: JobView, have: int, limit: int, holders: Sequence[Holder]) -> Cause:
    return cause(
        Reason.TENANT_LIMIT,
        f"The show {job.show} runs {have} of at most {limit} concurrent {'job' if limit == 1 else 'jobs'}.",
        remedy=Reason.TENANT_LIMIT.remedy(show=job.show, n=str(have + 1)),
        refuser=Refuser("show", job.show),
        amounts=LimitAmounts("jobs", have, 1, limit),
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


def deferred(job: JobView, layer: Layer, frames: int, run_at: datetime, now: datetime) -> Cause:
    left_s = max(0.0, (run_at - now).total_seconds())
    who = "1 frame is deferred" if frames == 1 else f"{frames} frames are deferred"
    sentence = f"{who}, the first for {humanize_duration(left_s)} more (a delay, or the pause before a retry)."
    remedy = Reason.DEFERRED.remedy(job=str(job.id))
    return cause(Reason.DEFERRED, sentence, remedy=remedy, layer=layer, next_at=run_at, next_try="at that time")


def placement_cause(
    layer: Layer,
    requirements: PlacementRequirements,
    found: PlacementExplanation,
    pools: Sequence[str],
    *,
    knows: int,
    holders: Sequence[Holder],
) -> Cause:
    """`knows`: how many of the workers considered have the task."""
    assert found.reason is not None, "there is free capacity"
    task, pool = layer.work.task, pools[0] if pools else "POOL"
    if task and found.considered and not knows:
        who = "worker of its pools has" if found.considered == 1 else "workers of its pools has"
        return cause(
            Reason.UNKNOWN_TASK,
            f"None of the {found.considered} {who} the task {task}.",
            remedy=Reason.UNKNOWN_TASK.remedy(task=task),
            layer=layer,
            refuser=Refuser("pool", ", ".join(pools)),
            found=found,
        )
    passed = "; ".join(f"{each.name}: {each.why}" for each in found.passed[:REJECTED_WORKERS_SHOWN_MAX])
    more = (
        f"; and {len(found.passed) - REJECTED_WORKERS_SHOWN_MAX} more"
        if len(found.passed) > REJECTED_WORKERS_SHOWN_MAX
        else ""
    )
    return cause(
        found.reason,
        f"{found.sentence}{f' ({passed}{more})' if passed else ''}",
        remedy=found.reason.remedy(topic=requirements.topic, pool=pool),
        layer=layer,
        refuser=Refuser("pool", ", ".join(pools)) if pools else None,
        found=found,
        holders=holders,
    )


def quota_cause(
    job: JobView, layer: Layer, pool_refusal: PoolQuotaRefusal, usage: RefusalUsage, holders: Sequence[Holder]
) -> Cause:
    """A limit that refuses a frame now, or will once others have started."""
    refusal, pool, level = pool_refusal.refusal, pool_refusal.pool_name, pool_refusal.level
    code, cores = Reason.of_level(level), refusal.resource is Resource.CORES
    have, next_try = usage.counted, None
    amounts = LimitAmounts(
        "cores" if cores else "gpus", *(_display_amount(n, cores=cores) for n in (have, refusal.asked, refusal.limit))
    )
    if level is Level.SUBSCRIPTION and not usage.has_share:
        sentence = f"The show {job.show} has no share of the pool {pool}."
        remedy = f"`rota sub create {job.show} {pool} --size CORES --burst CORES` gives it one."
    else:
        unit, enough = ("cores" if cores else "GPUs"), refusal.current + refusal.asked
        used, limit, asked, n = (_format_amount(n, cores=cores) for n in (have, refusal.limit, refusal.asked, enough))
        sentence = (
            f"{_limit_subject(job, layer, pool, level)} uses {used} of {limit} {unit}, and a frame needs {asked}."
        )
        if refusal.current > have:
            sentence = f"{sentence[:-1]}: the limit is reached once some more frames have started."
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
        if excess := usage.excess(refusal):
            above, record = (_format_amount(n, cores=cores) for n in (excess, have - excess))
            sentence = (
                f"{_limit_subject(job, layer, pool, level)} uses {used} of {limit} {unit} by the live count, which is"
                f" {above} above the record of {record}: ended frames are still being released."
            )
            remedy = "Wait: servers compare the two after every death of a server, and release the rest within 5 s."
            next_try = "when the live count is repaired"
    refuser = Refuser(_REFUSER_KINDS[level], _limit_name(job, layer, pool, level))
    return cause(
        code,
        sentence,
        remedy=remedy,
        layer=layer,
        refuser=refuser,
        amounts=amounts,
        holders=holders,
        next_try=next_try,
    )


def accounting_unavailable(layer: Layer, why: DeclineReason | None) -> Cause:
    if why is DeclineReason.LOCKED:
        sentence = "Another session holds a lock of its show in PostgreSQL: its frames wait until that session ends."
        return cause(Reason.BOOKS_UNAVAILABLE, sentence, layer=layer, refuser=Refuser("server", "PostgreSQL"))
    seeding = "Redis is being seeded with the accounts of its show, which takes moments."
    sentence = (
        seeding if why is DeclineReason.UNSEEDED else "Redis, which has the accounts of its show, does not respond."
    )
    return cause(Reason.BOOKS_UNAVAILABLE, sentence, layer=layer, refuser=Refuser("server", "Redis"))


def order_causes(job: JobView, layer: Layer, position: QueuePosition, before: PendingPosition) -> Iterator[Cause]:
    """Work that is dispatched first, if any."""
    if before.by_share:
        who = "1 frame" if before.by_share == 1 else f"{before.by_share} frames"
        verb = "comes" if before.by_share == 1 else "come"
        sentence = f"{who} of other shows {verb} first, because these use less of their size."
        yield cause(Reason.FAIR_SHARE, sentence, remedy=Reason.FAIR_SHARE.remedy(show=job.show), layer=layer)
    ahead = (position.ahead or 0) + before.frames - before.by_share
    if ahead:
        who = "1 frame is" if ahead == 1 else f"{ahead} frames are"
        yield cause(Reason.BEHIND, f"{who} ahead of it, by minimum, priority and waiting time.", layer=layer)


def _display_amount(amount: int, *, cores: bool) -> float:
    return amount / 100 if cores else amount


def _format_amount(amount: int, *, cores: bool) -> str:
    return format_cores(Centicores(amount)) if cores else str(amount)


def _limit_subject(job: JobView, layer: Layer, pool: str, level: Level) -> str:
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


def _limit_name(job: JobView, layer: Layer, pool: str, level: Level) -> str:
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
