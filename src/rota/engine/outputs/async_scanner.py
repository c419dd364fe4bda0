"""Asynchronous output scans: checks the content of an output after its frame has ended.

Scans are rows, written by the transaction that ends the frame, so none is lost with a process. Any server claims due
scans for `LEASE_S` beyond its budget; an unsettled scan is claimed again after that. A verdict takes effect in one
transaction, which first deletes the scan under the number of its claim: of two scanners of the same output one finds it
gone, and so does a verdict that arrives after a person released the output. A verdict applies to a frame that
SUCCEEDED, and is dropped otherwise.

| verdict | the frame | its output |
|---|---|---|
| ALLOW | stays | is readable |
| QUARANTINE, DENY | OUTPUT_QUARANTINED, and its job with it if that had SUCCEEDED | is quarantined |
| REDACT | stays | is replaced; the original is kept for reviewers |
| none within the budget | as the mode of its topic says | passes; stays held, and is scanned again; is quarantined |

Crash cases:
- after the claim, or paused: the lease expires and the scan is claimed again;
- after a redacted file was stored: the file is unreferenced, and the store's retention removes it;
- a verdict cannot be written (a lock, an outage): the scan is due again at the next step, and the claim does not count;
- commit outcome unknown: if it committed, the scan is gone and is not repeated; events and wake-ups that are then
  missing are covered by polling.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
import structlog

from rota.engine.completion.job_ends import JobEnd, job_end
from rota.engine.completion.publisher import CompletionPublisher, DeadLetterNotice
from rota.engine.outputs import sync_check
from rota.engine.outputs.frame_end_lock import FrameEndKey, lock_frame_ends
from rota.engine.outputs.stored_parts import stored_parts
from rota.engine.outputs.sync_check import OutputStateChange, SyncOutputChecker
from rota.infra import failpoints
from rota.infra.blob_store import BlobStore
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.artifacts import format_artifact, parse_artifact
from rota.model.backoff import Backoff
from rota.model.errors import PostgresUnavailable, RotaError
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.policy.outputs import (
    OutputCheck,
    OutputEffect,
    OutputMeta,
    OutputPolicyDecision,
    OutputRestriction,
    OutputScanMode,
)
from rota.model.reasons import Reason
from rota.policy.output.checker import ContentChecker, LocalContentChecker
from rota.policy.output.evaluate import PartsResult
from rota.policy.output.parts import OutputParts
from rota.queue.dead_letters import DeadLetterQueue

CLAIM = query(__package__, "outputs_claim")
DELETE_CLAIMED_SCANS = query(__package__, "outputs_settle")
POSTPONE = query(__package__, "outputs_later")
ALLOW = query(__package__, "outputs_allow")
QUARANTINE = query(__package__, "outputs_quarantine")
REDACT = query(__package__, "outputs_redact")
COUNT_QUARANTINED = query(__package__, "outputs_count")
RELEASE_DEPENDENTS = query(__package__, "outputs_free")

log = structlog.get_logger(__name__)
BATCH: Final = 64
LEASE_S: Final = 15.0
POLL_INTERVAL_S: Final = 1.0
UNSETTLED_CLAIMS_MAX: Final = 3
"""After so many unsettled claims an output is no longer scanned."""
POISONED_RETRY_S: Final = 86_400.0
INLINE_BYTES_MAX: Final = 64 * 1024
RETRY_BACKOFF: Final = Backoff(1.0, 60.0)

TIMED_OUT = metrics.counter(
    "rota_output_policy_async_timeout", "Outputs that were not scanned in time.", labels=("topic",)
)
REDACTED = metrics.counter("rota_output_redactions", "Outputs that were redacted.", labels=("topic",))

_META = msgspec.msgpack.Decoder(OutputMeta)


class ClaimedScan(NamedTuple):
    """A scan that this process has claimed, until the lease expires."""

    token: int
    layer: LayerId
    frame: int
    job: JobId
    show: ShowId
    mode: OutputScanMode
    budget_s: float
    meta: OutputMeta
    tries: int
    unsettled: int
    ended: datetime
    age_s: float
    state: str | None
    """None: the frame's end is no longer retained."""
    value: bytes | None
    value_at: str | None
    artifacts: list[str] | None


class ScanVerdict(NamedTuple):
    """The outcome of one claim; `again_s`: scan again later."""

    claimed: ClaimedScan
    said: PartsResult
    check: OutputCheck
    parts: OutputParts | None = None
    again_s: float | None = None


class ScanBatchResult(msgspec.Struct):
    """Changes of a batch, to be published after the commit."""

    jobs: list[JobEnd] = []
    letters: list[DeadLetterNotice] = []


class OutputScanner:
    def __init__(
        self,
        database: Database,
        store: BlobStore,
        publisher: CompletionPublisher,
        parts: SyncOutputChecker,
        checker: ContentChecker | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.store = store
        self._publisher = publisher
        self._dead_letters = DeadLetterQueue(database)
        self.outputs = parts
        self.checker = checker or LocalContentChecker(parts.policy)
        self.listeners: list[Callable[[], None]] = []
        """Called after the commit: runs that wait for outputs may continue."""
        self._clock = clock or SystemClock()
        self._unapplied: Sequence[ScanVerdict] = ()
        """Verdicts whose transaction failed; the scans are still claimed."""

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            scan_loop = tasks.create_task(self._scan_loop(), name="outputs")
            life.ready()
            await life.until_draining()
            scan_loop.cancel()

    async def close(self) -> None:
        await self.checker.close()

    async def _scan_loop(self) -> None:
        while True:
            self.outputs.due.clear()
            try:
                if await self.scan_due():
                    continue
            except PostgresUnavailable as error:
                log.info("output_scans_deferred", reason=error.sentence)
            try:
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self.outputs.due.wait()
            except TimeoutError:
                continue

    async def scan_due(self, most: int = BATCH) -> int:
        """Scan what is due; returns the number of outputs claimed."""
        await self._settle_unapplied()
        lease_s = self.outputs.content_s + LEASE_S
        rows = await self.database.rows(CLAIM, most, lease_s)
        if not rows:
            return 0
        failpoints.hit("outputs.after_claim")
        until_s = self._clock.monotonic() + self.outputs.content_s
        verdicts = []
        for claimed in map(_claimed_scan, rows):
            if self._clock.monotonic() < until_s:
                verdicts.append(await self._scan(claimed))
            else:
                verdicts.append(_postponed(claimed, 0.0))
        failpoints.hit("outputs.after_look")
        self._unapplied = verdicts
        await self.apply(verdicts)
        self._unapplied = ()
        return len(rows)

    async def _settle_unapplied(self) -> None:
        """Postpone scans whose verdicts PostgreSQL did not take: they did not crash this process, so the claim must
        not count against them. A scan that was settled after all, or claimed by another server, is left alone."""
        if self._unapplied:
            await self._postpone([_postponed(each.claimed, each.again_s or 0.0) for each in self._unapplied])
            self._unapplied = ()

    async def _scan(self, claimed: ClaimedScan) -> ScanVerdict:
        began_s = time.perf_counter()
        if claimed.unsettled > UNSETTLED_CLAIMS_MAX:
            log.error("output_scan_abandoned", job=str(claimed.job), output=claimed.token, claims=claimed.unsettled)
            return self._verdict_without_answer(claimed, timed_out=False, dead=True)
        if self.outputs.policy() is None:
            # The policy was disabled after the scan was written; dependents wait until the scan is deleted.
            return self._verdict_without_answer(claimed, timed_out=True)
        try:
            async with asyncio.timeout(claimed.budget_s):
                parts = await self._load_parts(claimed)
                result = await self.checker.check(claimed.meta, parts, claimed.budget_s)
        except TimeoutError:
            log.warning("output_scan_timed_out", job=str(claimed.job), output=claimed.token, mode=claimed.mode)
            return self._verdict_without_answer(claimed, timed_out=True)
        except RotaError as error:
            log.warning("output_scan_failed", job=str(claimed.job), output=claimed.token, code=error.code)
            return self._verdict_without_answer(claimed, timed_out=False)
        except Exception as error:  # noqa: BLE001 - its text may contain a part of the output
            log.warning("output_scan_crashed", job=str(claimed.job), output=claimed.token, because=type(error).__name__)
            return self._verdict_without_answer(claimed, timed_out=False)
        sync_check.CHECKED.labels(claimed.meta.topic, "async").inc()
        sync_check.EVALUATIONS.labels("async").inc()
        sync_check.LATENCY.labels(claimed.meta.topic, "async").observe(time.perf_counter() - began_s)
        return self._verdict(claimed, result, parts)

    def _verdict(self, claimed: ClaimedScan, result: PartsResult, parts: OutputParts) -> ScanVerdict:
        if result.word.says is OutputEffect.REDACT and result.redacted is None:
            word = msgspec.structs.replace(result.word, says=OutputEffect.QUARANTINE)
            result = PartsResult(word)
        return ScanVerdict(claimed, result, self.outputs.check_record("async", result.word), parts)

    def _verdict_without_answer(self, claimed: ClaimedScan, *, timed_out: bool, dead: bool = False) -> ScanVerdict:
        """No verdict: retry within the budget, then apply the mode of the topic."""
        pause_s = RETRY_BACKOFF.pause_s(min(claimed.tries, 30), 0.5)
        in_time = claimed.age_s + pause_s < claimed.budget_s
        if claimed.mode is OutputScanMode.HOLD:
            return _postponed(claimed, POISONED_RETRY_S if dead else pause_s)
        if in_time and not dead and not timed_out:
            return _postponed(claimed, pause_s)
        TIMED_OUT.labels(claimed.meta.topic).inc()
        reason = "The output was not scanned in time."
        if claimed.mode is OutputScanMode.PASS:
            sync_check.SKIPPED.labels(claimed.meta.topic, "async").inc()
            word = OutputPolicyDecision(says=OutputEffect.ALLOW, reason=reason)
            return ScanVerdict(
                claimed, PartsResult(word), msgspec.structs.replace(self._check_record(word), says="SKIPPED")
            )
        word = OutputPolicyDecision(says=OutputEffect.QUARANTINE, reason=reason, severity="high")
        return ScanVerdict(claimed, PartsResult(word), self._check_record(word))

    def _check_record(self, word: OutputPolicyDecision) -> OutputCheck:
        return self.outputs.check_record("async", word)

    async def _load_parts(self, claimed: ClaimedScan) -> OutputParts:
        files = [(name, pointer) for pointer, name in map(parse_artifact, claimed.artifacts or ())]
        return await stored_parts(self.store, claimed.value, claimed.value_at, files)

    async def apply(self, verdicts: Sequence[ScanVerdict]) -> ScanBatchResult:
        """Apply the verdicts whose claims still hold."""
        postponed = [each for each in verdicts if each.again_s is not None]
        decided = [each for each in verdicts if each.again_s is None]
        if postponed:
            await self._postpone(postponed)
        batch = ScanBatchResult()
        if decided:
            async with self.database.transaction(idle_s=self.database.target.idle_in_transaction_s) as tx:
                batch = await self._apply(tx, decided)  # may write files
                failpoints.hit("outputs.before_commit")
            failpoints.hit("outputs.after_commit")
            self._notify(batch)
            for listener in self.listeners:
                listener()
        return batch

    async def _postpone(self, postponed: Sequence[ScanVerdict]) -> None:
        claims = [each.claimed for each in postponed]
        pauses = [each.again_s for each in postponed]
        await self.database.run(POSTPONE, [one.token for one in claims], [one.tries for one in claims], pauses)

    async def _apply(self, tx: Transaction, decided: Sequence[ScanVerdict]) -> ScanBatchResult:
        claims = [each.claimed for each in decided]
        rows = await tx.rows(DELETE_CLAIMED_SCANS, [one.token for one in claims], [one.tries for one in claims])
        ours = {row["token"] for row in rows}
        mine = [each for each in decided if each.claimed.token in ours and each.claimed.state is not None]
        await lock_frame_ends(tx, [_frame_key(each.claimed) for each in mine])
        by_says = {says: [each for each in mine if each.said.word.says is says] for says in OutputEffect}
        await self._allow(tx, by_says[OutputEffect.ALLOW])
        redacted = [
            change for each in by_says[OutputEffect.REDACT] if (change := await self._redact(tx, each)) is not None
        ]
        quarantined, jobs = await self._quarantine(tx, [*by_says[OutputEffect.QUARANTINE], *by_says[OutputEffect.DENY]])
        held = sorted({one.job for one in claims if one.mode.holds and one.token in ours})
        if held:
            await tx.run(RELEASE_DEPENDENTS, held)
        await sync_check.audit_state_changes(tx, [*redacted, *quarantined], "async")
        sync_check.count_quarantined(quarantined, "async")
        for change in redacted:
            REDACTED.labels(change.meta.topic).inc()
        dead_letters = [
            DeadLetterNotice(Reason.OUTPUT_QUARANTINED_ASYNC.value, one.show, one.job, "output") for one in quarantined
        ]
        return ScanBatchResult(jobs, dead_letters)

    async def _allow(self, tx: Transaction, allowed: Sequence[ScanVerdict]) -> None:
        if allowed:
            await tx.run(ALLOW, *_frame_keys(allowed), [_encode_check(each.check) for each in allowed])

    async def _quarantine(
        self, tx: Transaction, verdicts: Sequence[ScanVerdict]
    ) -> tuple[list[OutputStateChange], list[JobEnd]]:
        if not verdicts:
            return [], []
        whys = [each.said.word.reason for each in verdicts]
        checks = [_encode_check(each.check) for each in verdicts]
        moved = {row["token"] for row in await tx.rows(QUARANTINE, *_frame_keys(verdicts), whys, checks)}
        taken = [each for each in verdicts if each.claimed.token in moved]
        quarantined = [_state_change(each.claimed, OutputRestriction.QUARANTINED, each.said.word) for each in taken]
        if not quarantined:
            return [], []
        await sync_check.write_state_changes(tx, quarantined, [each.claimed.ended for each in taken])
        reason = Reason.OUTPUT_QUARANTINED_ASYNC
        rows = await tx.rows(
            COUNT_QUARANTINED,
            [one.layer for one in quarantined],
            [one.job for one in quarantined],
            [1] * len(quarantined),
            reason.value,
        )
        await self._dead_letters.add(sync_check.output_dead_letters(quarantined, reason), on=tx)
        return quarantined, [job_end(row) for row in rows]

    async def _redact(self, tx: Transaction, verdict: ScanVerdict) -> OutputStateChange | None:
        claimed, left = verdict.claimed, verdict.said.redacted
        assert left is not None
        assert verdict.parts is not None
        pointers = await replace_output(
            tx, self.store, _frame_key(claimed), stored_frame_output(claimed), verdict.parts, left, verdict.check
        )
        if pointers is None:
            return None
        change = _state_change(claimed, OutputRestriction.REDACTED, verdict.said.word)._replace(original=pointers)
        await sync_check.write_state_changes(tx, [change], [claimed.ended])
        return change

    def _notify(self, batch: ScanBatchResult) -> None:
        if batch.letters:
            self._publisher.events.dead_lettered(batch.letters)
        if batch.jobs:
            self._publisher.publish_ends(batch.jobs)


class StoredFrameOutput(NamedTuple):
    """The output as stored in the frame's end."""

    value: bytes | None
    value_at: str | None
    artifacts: list[str] | None


def stored_frame_output(claimed: ClaimedScan) -> StoredFrameOutput:
    return StoredFrameOutput(claimed.value, claimed.value_at, claimed.artifacts)


async def replace_output(
    tx: Transaction,
    store: BlobStore,
    place: FrameEndKey,
    left: StoredFrameOutput,
    original: OutputParts,
    redacted: OutputParts,
    check: OutputCheck,
) -> str | None:
    """Replace the original output by the redacted one; returns pointers to the original, a line each, or None if the
    frame's end has changed since.

    Blobs are stored first; one statement after that refers to them.
    """
    value, value_at = redacted.value, None
    if value is not None and len(value) > INLINE_BYTES_MAX:
        [value_at], value = await store.put([value], on=tx), None
    stored = {name: pointer for pointer, name in map(parse_artifact, left.artifacts or ())}
    files = []
    for before, file in zip(original.files, redacted.files, strict=True):
        pointer = stored[file.name] if file is before else await store.put_parts(file.chunks, on=tx)
        files.append(format_artifact(pointer, file.name))
    originals = []
    if original.value is not None:
        [at] = [left.value_at] if left.value_at is not None else await store.put([original.value], on=tx)
        originals.append(format_artifact(at or "", "value"))
    originals += [
        format_artifact(pointer, f"artifact:{name}") for pointer, name in map(parse_artifact, left.artifacts or ())
    ]
    failpoints.hit("outputs.after_redacted")
    done = await tx.run(REDACT, *place, value, value_at, "\n".join(files), _encode_check(check))
    return "\n".join(originals) if done else None


def _claimed_scan(row: Record) -> ClaimedScan:
    return ClaimedScan(
        token=row["token"],
        layer=row["pk_layer"],
        frame=row["frame"],
        job=row["pk_job"],
        show=row["pk_show"],
        mode=OutputScanMode(row["mode"]),
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


def _postponed(claimed: ClaimedScan, pause_s: float) -> ScanVerdict:
    word = OutputPolicyDecision(says=OutputEffect.ALLOW)
    return ScanVerdict(claimed, PartsResult(word), OutputCheck(phase="async", at_ms=0, by="", says=""), again_s=pause_s)


def _state_change(claimed: ClaimedScan, state: OutputRestriction, word: OutputPolicyDecision) -> OutputStateChange:
    return OutputStateChange(
        claimed.token, claimed.layer, claimed.frame, claimed.job, claimed.show, state, word, claimed.meta
    )


def _frame_key(claimed: ClaimedScan) -> FrameEndKey:
    return claimed.layer, claimed.frame, claimed.token, claimed.ended


def _frame_keys(verdicts: Sequence[ScanVerdict]) -> tuple[list[object], ...]:
    """The keys as columns."""
    return tuple(list(column) for column in zip(*(_frame_key(each.claimed) for each in verdicts), strict=True))


def _encode_check(check: OutputCheck) -> str:
    return msgspec.json.encode(check).decode()
