"""Outputs on their way out: the look inside, after the frame has ended.

Scans are rows, written by the transaction that ends the frame, so none is lost with a process. Any server claims those
that are due, for `LEASE_S` beyond its budget; what nobody settles by then is claimed again. A verdict takes effect in
one transaction, which first removes the scan under the number of its claim: of two who looked at the same output one
finds it gone, and so does a verdict that comes after somebody has released the output. It takes effect on a frame that
SUCCEEDED, and is dropped otherwise.

| what is said | the frame | its output |
|---|---|---|
| ALLOW | stays | is readable |
| QUARANTINE, DENY | OUTPUT_QUARANTINED, and its job with it if that had SUCCEEDED | is quarantined |
| REDACT | stays | is replaced; what it was is kept for those who may release it |
| nothing, in time | as the mode of its topic says | passes; stays held, and is looked at again; is quarantined |

If we die after the claim, or are paused, the lease runs out. If we die after a redacted file was stored, nobody names
it, and the store's retention removes it. If the reply of the commit is lost, the scan is gone and nobody repeats it;
what is not told then (events, those who wait) is found by whoever looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
import structlog

from rota.engine import outputs
from rota.engine.finish import Finisher, JobEnd, Letter, job_end
from rota.engine.outputs import Mark, Outputs
from rota.infra import faults
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.service import Lifecycle
from rota.infra.store import Store
from rota.infra.telemetry import metrics
from rota.model.artifacts import parsed, word
from rota.model.backoff import Backoff
from rota.model.errors import PostgresUnavailable, RotaError
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.output import Check, Kept, Mode, OutputMeta, OutputSays, OutputWord
from rota.model.reasons import Reason
from rota.policy.output.asking import Checker, InProcess
from rota.policy.output.judging import Content, Second

CLAIM = query(__package__, "outputs_claim")
SETTLE = query(__package__, "outputs_settle")
LATER = query(__package__, "outputs_later")
ALLOW = query(__package__, "outputs_allow")
QUARANTINE = query(__package__, "outputs_quarantine")
REDACT = query(__package__, "outputs_redact")
COUNT = query(__package__, "outputs_count")
FREE = query(__package__, "outputs_free")

log = structlog.get_logger(__name__)
BATCH: Final = 64
LEASE_S: Final = 15.0
LOOK_S: Final = 1.0
DEATHS_MAX: Final = 3
"""After so many claims that nobody settled it is not looked at any more."""
DEAD_PAUSE_S: Final = 86_400.0
INLINE_MAX: Final = 64 * 1024
PAUSES: Final = Backoff(1.0, 60.0)

TIMED_OUT = metrics.counter(
    "rota_output_policy_async_timeout", "Outputs that nobody could look into in time.", labels=("topic",)
)
REDACTED = metrics.counter("rota_output_redactions", "Outputs of which parts were taken out.", labels=("topic",))

_META = msgspec.msgpack.Decoder(OutputMeta)


class Claimed(NamedTuple):
    """An output that is ours to look at, until the lease ends."""

    token: int
    layer: LayerId
    frame: int
    job: JobId
    show: ShowId
    mode: Mode
    budget_s: float
    meta: OutputMeta
    tries: int
    unsettled: int
    ended: datetime
    age_s: float
    state: str | None
    """None: the end of its frame is not kept any more."""
    value: bytes | None
    value_at: str | None
    artifacts: list[str] | None


class Verdict(NamedTuple):
    """What becomes of one claim; `again_s`: nothing yet."""

    claimed: Claimed
    said: Second
    check: Check
    content: Content | None = None
    again_s: float | None = None


class Settled(msgspec.Struct):
    """What came of a batch, for whoever is told."""

    jobs: list[JobEnd] = []
    letters: list[Letter] = []


class Scanner:
    def __init__(
        self,
        database: Database,
        store: Store,
        finisher: Finisher,
        parts: Outputs,
        checker: Checker | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.store = store
        self.finisher = finisher
        self.outputs = parts
        self.checker = checker or InProcess(parts.policy)
        self.on_settled: Callable[[], None] = _ignore
        """Called after the commit: whoever waits for outputs to be looked at may go on."""
        self._clock = clock or SystemClock()

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._look_on(), name="outputs")
            life.ready()
            await life.until_draining()
            looking.cancel()

    async def close(self) -> None:
        await self.checker.close()

    async def _look_on(self) -> None:
        while True:
            self.outputs.due.clear()
            try:
                if await self.step():
                    continue
            except PostgresUnavailable as away:
                log.info("scans_wait", reason=away.sentence)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self.outputs.due.wait()
            except TimeoutError:
                continue

    async def step(self, most: int = BATCH) -> int:
        """Look at what is due; returns how many outputs were claimed."""
        lease_s = self.outputs.content_s + LEASE_S
        rows = await self.database.rows(CLAIM, most, lease_s)
        if not rows:
            return 0
        faults.at("outputs.after_claim")
        until_s = self._clock.monotonic() + self.outputs.content_s
        verdicts = []
        for claimed in map(_claimed, rows):
            if self._clock.monotonic() < until_s:
                verdicts.append(await self._look(claimed))
            else:
                verdicts.append(_later(claimed, 0.0))
        faults.at("outputs.after_look")
        await self.settle(verdicts)
        return len(rows)

    async def _look(self, claimed: Claimed) -> Verdict:
        began_s = time.perf_counter()
        if claimed.unsettled > DEATHS_MAX:
            log.error("scan_given_up", job=str(claimed.job), output=claimed.token, claims=claimed.unsettled)
            return self._silence(claimed, timed_out=False, dead=True)
        if self.outputs.policy() is None:
            return self._silence(claimed, timed_out=True)  # switched off since: others wait for the scan to be gone
        try:
            async with asyncio.timeout(claimed.budget_s):
                content = await self._content(claimed)
                said = await self.checker.check(claimed.meta, content, claimed.budget_s)
        except TimeoutError:
            log.warning("scan_timed_out", job=str(claimed.job), output=claimed.token, mode=claimed.mode)
            return self._silence(claimed, timed_out=True)
        except RotaError as error:
            log.warning("scan_failed", job=str(claimed.job), output=claimed.token, code=error.code)
            return self._silence(claimed, timed_out=False)
        except Exception as error:  # noqa: BLE001 - its text may hold a part of the output
            log.warning("scan_broke", job=str(claimed.job), output=claimed.token, because=type(error).__name__)
            return self._silence(claimed, timed_out=False)
        outputs.CHECKED.labels(claimed.meta.topic, "async").inc()
        outputs.EVALUATIONS.labels("async").inc()
        outputs.LATENCY.labels(claimed.meta.topic, "async").observe(time.perf_counter() - began_s)
        return self._verdict(claimed, said, content)

    def _verdict(self, claimed: Claimed, said: Second, content: Content) -> Verdict:
        if said.word.says is OutputSays.REDACT and said.redacted is None:
            word = msgspec.structs.replace(said.word, says=OutputSays.QUARANTINE)
            said = Second(word)
        return Verdict(claimed, said, self.outputs.record("async", said.word), content)

    def _silence(self, claimed: Claimed, *, timed_out: bool, dead: bool = False) -> Verdict:
        """Nobody could say: again while there is time, then as the mode says."""
        pause_s = PAUSES.pause_s(min(claimed.tries, 30), 0.5)
        in_time = claimed.age_s + pause_s < claimed.budget_s
        if claimed.mode is Mode.HOLD:
            return _later(claimed, DEAD_PAUSE_S if dead else pause_s)
        if in_time and not dead and not timed_out:
            return _later(claimed, pause_s)
        TIMED_OUT.labels(claimed.meta.topic).inc()
        reason = "The output could not be looked into in time."
        if claimed.mode is Mode.PASS:
            outputs.SKIPPED.labels(claimed.meta.topic, "async").inc()
            word = OutputWord(says=OutputSays.ALLOW, reason=reason)
            return Verdict(claimed, Second(word), msgspec.structs.replace(self._record(word), says="SKIPPED"))
        word = OutputWord(says=OutputSays.QUARANTINE, reason=reason, severity="high")
        return Verdict(claimed, Second(word), self._record(word))

    def _record(self, word: OutputWord) -> Check:
        return self.outputs.record("async", word)

    async def _content(self, claimed: Claimed) -> Content:
        value = claimed.value
        if value is None and claimed.value_at is not None:
            value = await self.store.get(claimed.value_at)
        files = [(name, await self.store.get(pointer)) for pointer, name in map(parsed, claimed.artifacts or ())]
        return Content(value, tuple(files))

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        """Have verdicts take effect, those that are still ours."""
        again = [each for each in verdicts if each.again_s is not None]
        decided = [each for each in verdicts if each.again_s is None]
        if again:
            claims = [each.claimed for each in again]
            pauses = [each.again_s for each in again]
            await self.database.run(LATER, [one.token for one in claims], [one.tries for one in claims], pauses)
        settled = Settled()
        if decided:
            async with self.database.transaction() as tx:
                settled = await self._settle(tx, decided)
                faults.at("outputs.before_commit")
            faults.at("outputs.after_commit")
            self._tell(settled)
            self.on_settled()
        return settled

    async def _settle(self, tx: Transaction, decided: Sequence[Verdict]) -> Settled:
        claims = [each.claimed for each in decided]
        rows = await tx.rows(SETTLE, [one.token for one in claims], [one.tries for one in claims])
        ours = {row["token"] for row in rows}
        mine = [each for each in decided if each.claimed.token in ours and each.claimed.state is not None]
        by_says = {says: [each for each in mine if each.said.word.says is says] for says in OutputSays}
        await self._allow(tx, by_says[OutputSays.ALLOW])
        redacted = [mark for each in by_says[OutputSays.REDACT] if (mark := await self._redact(tx, each)) is not None]
        kept, jobs = await self._quarantine(tx, [*by_says[OutputSays.QUARANTINE], *by_says[OutputSays.DENY]])
        held = sorted({one.job for one in claims if one.mode.holds and one.token in ours})
        if held:
            await tx.run(FREE, held)
        await outputs.audit_kept(tx, [*redacted, *kept], "async")
        outputs.count_kept(kept, "async")
        for mark in redacted:
            REDACTED.labels(mark.meta.topic).inc()
        letters = [Letter(Reason.OUTPUT_QUARANTINED_ASYNC.value, one.show, one.job, "output") for one in kept]
        return Settled(jobs, letters)

    async def _allow(self, tx: Transaction, allowed: Sequence[Verdict]) -> None:
        if allowed:
            await tx.run(ALLOW, *_places(allowed), [_json(each.check) for each in allowed])

    async def _quarantine(self, tx: Transaction, verdicts: Sequence[Verdict]) -> tuple[list[Mark], list[JobEnd]]:
        if not verdicts:
            return [], []
        whys = [each.said.word.reason for each in verdicts]
        checks = [_json(each.check) for each in verdicts]
        moved = {row["token"] for row in await tx.rows(QUARANTINE, *_places(verdicts), whys, checks)}
        taken = [each for each in verdicts if each.claimed.token in moved]
        kept = [_mark(each.claimed, Kept.QUARANTINED, each.said.word) for each in taken]
        if not kept:
            return [], []
        await outputs.write_kept(tx, kept, [each.claimed.ended for each in taken])
        reason = Reason.OUTPUT_QUARANTINED_ASYNC
        rows = await tx.rows(
            COUNT, [one.layer for one in kept], [one.job for one in kept], [1] * len(kept), reason.value
        )
        await self.finisher.queue.dead_letters.add(outputs.letters(kept, reason), on=tx)
        return kept, [job_end(row) for row in rows]

    async def _redact(self, tx: Transaction, verdict: Verdict) -> Mark | None:
        claimed, left = verdict.claimed, verdict.said.redacted
        assert left is not None
        assert verdict.content is not None
        place = (claimed.layer, claimed.frame, claimed.token, claimed.ended)
        words = await replace(tx, self.store, place, claimed_left(claimed), verdict.content, left, verdict.check)
        if words is None:
            return None
        mark = _mark(claimed, Kept.REDACTED, verdict.said.word)._replace(original=words)
        await outputs.write_kept(tx, [mark], [claimed.ended])
        return mark

    def _tell(self, settled: Settled) -> None:
        if settled.letters:
            self.finisher.on_letters(settled.letters)
        if settled.jobs:
            for listener in self.finisher.listeners:
                listener(settled.jobs)


class Left(NamedTuple):
    """What the end of a frame names of its output."""

    value: bytes | None
    value_at: str | None
    artifacts: list[str] | None


def claimed_left(claimed: Claimed) -> Left:
    return Left(claimed.value, claimed.value_at, claimed.artifacts)


async def replace(
    tx: Transaction,
    store: Store,
    place: tuple[LayerId, int, int, datetime],
    left: Left,
    original: Content,
    redacted: Content,
    check: Check,
) -> str | None:
    """Put the redacted output in the place of the original; pointers to that, a line each, or None if it has moved on.

    What is stored comes first, and what names it in one statement after it.
    """
    value, value_at = redacted.value, None
    if value is not None and len(value) > INLINE_MAX:
        [value_at], value = await store.put([value], on=tx), None
    put = await store.put([data for _, data in redacted.artifacts], on=tx)
    files = [word(pointer, name) for pointer, (name, _) in zip(put, redacted.artifacts, strict=True)]
    kept = []
    if original.value is not None:
        [at] = [left.value_at] if left.value_at is not None else await store.put([original.value], on=tx)
        kept.append(word(at or "", "value"))
    kept += [word(pointer, f"artifact:{name}") for pointer, name in map(parsed, left.artifacts or ())]
    faults.at("outputs.after_redacted")
    done = await tx.run(REDACT, *place, value, value_at, "\n".join(files), _json(check))
    return "\n".join(kept) if done else None


def _claimed(row: Record) -> Claimed:
    return Claimed(
        token=row["token"],
        layer=row["pk_layer"],
        frame=row["frame"],
        job=row["pk_job"],
        show=row["pk_show"],
        mode=Mode(row["mode"]),
        budget_s=row["budget_s"],
        meta=_META.decode(row["meta"]),
        tries=row["tries"],
        unsettled=row["unsettled"],
        ended=row["ts_ended"],
        age_s=row["age_s"],
        state=row["state"],
        value=row["value"],
        value_at=row["value_at"],
        artifacts=row["artifacts"],
    )


def _later(claimed: Claimed, pause_s: float) -> Verdict:
    word = OutputWord(says=OutputSays.ALLOW)
    return Verdict(claimed, Second(word), Check(phase="async", at_ms=0, by="", says=""), again_s=pause_s)


def _mark(claimed: Claimed, state: Kept, word: OutputWord) -> Mark:
    return Mark(claimed.token, claimed.layer, claimed.frame, claimed.job, claimed.show, state, word, claimed.meta)


def _places(verdicts: Sequence[Verdict]) -> tuple[list[object], ...]:
    claims = [each.claimed for each in verdicts]
    return (
        [one.layer for one in claims],
        [one.frame for one in claims],
        [one.token for one in claims],
        [one.ended for one in claims],
    )


def _json(check: Check) -> str:
    return msgspec.json.encode(check).decode()


def _ignore() -> None:
    return None
