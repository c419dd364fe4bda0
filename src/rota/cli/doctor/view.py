"""Grades the facts that `rota doctor` collects: one sentence for each check, and a remedy for each problem. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from rota.cli.dlq.view import pluralize
from rota.model.units import humanize_duration

SKEW_WARN_S: Final = 0.5
SKEW_FAIL_S: Final = 5.0
DISK_FREE_WARN: Final = 0.10
DISK_FREE_FAIL: Final = 0.03
CONNECTIONS_WARN: Final = 0.8
OUTBOX_WARN_S: Final = 10.0
OUTBOX_FAIL_S: Final = 120.0
STUCK_AGE_S: Final = 60.0
POSTGRES_VERSION_MIN: Final = 140_000


class Grade(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"
    """Not run, because of a problem that another check reports."""


class DoctorCheck(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    grade: Grade
    sentence: str
    remedy: str = ""
    facts: dict[str, object] = {}


def ok(name: str, sentence: str, **facts: object) -> DoctorCheck:
    return DoctorCheck(name=name, grade=Grade.OK, sentence=sentence, facts=facts)


def warn(name: str, sentence: str, remedy: str, **facts: object) -> DoctorCheck:
    return DoctorCheck(name=name, grade=Grade.WARN, sentence=sentence, remedy=remedy, facts=facts)


def fail(name: str, sentence: str, remedy: str, **facts: object) -> DoctorCheck:
    return DoctorCheck(name=name, grade=Grade.FAIL, sentence=sentence, remedy=remedy, facts=facts)


def skipped(names: Sequence[str], why: str) -> list[DoctorCheck]:
    return [DoctorCheck(name=name, grade=Grade.SKIPPED, sentence=f"Skipped: {why}.") for name in names]


def clock_check(server: str, ahead_s: float, took_s: float) -> DoctorCheck:
    """`ahead_s`: how far the server's clock is ahead of ours; up to half of `took_s` may be network latency."""
    name, off_s = f"clock of {server}", max(0.0, abs(ahead_s) - took_s / 2)
    facts = {"ahead_ms": round(ahead_s * 1000, 1), "took_ms": round(took_s * 1000, 1)}
    if off_s < SKEW_WARN_S:
        return ok(
            name, f"It agrees with this machine's clock within {humanize_duration(max(off_s, took_s / 2))}.", **facts
        )
    text = f"It is {humanize_duration(off_s)} {'ahead of' if ahead_s > 0 else 'behind'} this machine's clock."
    remedy = "Synchronize both with NTP; until then, deadlines and ages are shown wrong."
    return (fail if off_s >= SKEW_FAIL_S else warn)(name, text, remedy, **facts)


def postgres_check(version: str, number: int) -> DoctorCheck:
    if number < POSTGRES_VERSION_MIN:
        return fail("PostgreSQL", f"It is version {version}.", "Rota needs PostgreSQL 14 or newer.", version=version)
    return ok("PostgreSQL", f"Version {version} answers.", version=version)


def connections_check(used: int, most: int) -> DoctorCheck:
    text, facts = f"{used} of {most} PostgreSQL connections are in use.", {"used": used, "most": most}
    if used < most * CONNECTIONS_WARN:
        return ok("connections", text, **facts)
    remedy = "Raise max_connections, lower postgres.pool_max of the servers, or use a connection pooler."
    return (fail if used >= most - 3 else warn)("connections", text, remedy, **facts)


def servers_check(leader: str | None, dispatchers: int) -> DoctorCheck:
    facts = {"leader": leader, "dispatchers": dispatchers}
    if leader is None and not dispatchers:
        return fail("servers", "No server is up, so nothing starts.", "Start `rota up` or `rota server`.", **facts)
    if leader is None or not dispatchers:
        what = "none is the leader" if leader is None else "none dispatches"
        return warn("servers", f"Servers are up, but {what}.", "Wait a moment, then check their logs.", **facts)
    verb = "dispatches" if dispatchers == 1 else "dispatch"
    return ok("servers", f"{pluralize(dispatchers, 'server')} {verb}, {leader} is the leader.", **facts)


def outbox_check(depth: int, oldest_s: float | None, parked: int) -> DoctorCheck:
    facts = {"waiting": depth, "oldest_s": oldest_s, "parked": parked}
    if parked:
        remedy = "See rota.outbox_parked for the reason of each; NATS limits are the usual cause."
        return warn("outbox", f"{pluralize(parked, 'message')} can never be published.", remedy, **facts)
    if oldest_s is None or oldest_s < OUTBOX_WARN_S:
        return ok("outbox", f"{pluralize(depth, 'message')} queued for NATS.", **facts)
    text = f"{pluralize(depth, 'message')} wait for NATS, the oldest for {humanize_duration(oldest_s)}."
    remedy = "Check that a server is up and NATS answers; the messages are then published automatically."
    return (fail if oldest_s >= OUTBOX_FAIL_S else warn)("outbox", text, remedy, **facts)


def jobs_check(ending: int, pending: int, orphans: int) -> DoctorCheck:
    facts = {"ending": ending, "pending": pending, "frames_without_worker": orphans}
    if orphans:
        text = f"{pluralize(orphans, 'frame')} are booked on workers that are not up."
        return fail("jobs", text, "The leader requeues them within seconds: see `servers` above.", **facts)
    late = [(ending, "terminating"), (pending, "waiting for the policy")]
    late_text = " and ".join(f"{pluralize(n, 'job')} {state}" for n, state in late if n)
    if late_text:
        text = f"For longer than {humanize_duration(STUCK_AGE_S)}: {late_text}."
        return warn("jobs", text, "See `rota jobs --state PENDING` and `rota explain JOB`.", **facts)
    return ok(
        "jobs",
        f"None is stuck: none has been terminating or undecided for longer than {humanize_duration(STUCK_AGE_S)}.",
        **facts,
    )


def workers_check(up: int, silent: Sequence[str], lost: int) -> DoctorCheck:
    facts = {"up": up, "silent": list(silent), "lost_within_an_hour": lost}
    if silent:
        text = f"{pluralize(len(silent), 'worker')} of {up} sent no heartbeat: {', '.join(silent[:5])}."
        return warn("workers", text, "Check these machines; their frames run elsewhere within seconds.", **facts)
    if lost:
        text = f"{pluralize(up, 'worker')} up, and {lost} lost within the last hour."
        return warn("workers", text, "`rota workers --all` lists them; check these machines.", **facts)
    if not up:
        return warn("workers", "No worker is up, so nothing runs.", "`rota worker` starts one.", **facts)
    return ok("workers", f"{pluralize(up, 'worker')} up, none silent, none lost within the last hour.", **facts)


def disk_check(name: str, path: str, free: int, total: int) -> DoctorCheck:
    free_ratio = free / total if total else 0.0
    text = f"{_gib(free)} of {_gib(total)} are free at {path}."
    facts: dict[str, object] = {"place": path, "free": free, "total": total}
    if free_ratio >= DISK_FREE_WARN:
        return ok(name, text, **facts)
    remedy = "Free disk space, or lower retention.jobs and the retention of results and logs."
    return (fail if free_ratio < DISK_FREE_FAIL else warn)(name, text, remedy, **facts)


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.1f} GiB"
