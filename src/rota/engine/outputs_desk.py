"""What people do with outputs that the policy keeps back: look at them, release them, have them redacted.

Nothing runs again: a release lets out what the frame left. It is one transaction under the lock of the frame's end,
which also removes the scan, if there is one: a verdict that is under way finds it gone and is dropped. Who submitted
the job may not decide about its outputs, by key or by the actor that the submission names. Every act is in the audit
trail with its reason, and so is every look at what is kept back. Doing it again changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final, Literal

import msgspec

from rota.engine import outputs
from rota.engine.finish import Finisher, JobEnd, job_end
from rota.engine.outputs import Mark, Outputs
from rota.engine.outputs_scanner import COUNT, FREE, Left, replace
from rota.infra import audit, faults
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.store import Store
from rota.model.artifacts import parsed, word
from rota.model.errors import Forbidden, InvalidInput, NotFound, Refused
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.output import Check, Kept, OutputChanged, OutputLine, OutputMeta, OutputSays, OutputTold, OutputWord
from rota.policy.output.judging import Content, redact_all, within
from rota.queue import Queue
from rota.queue.dead_letters import DeadLetterFilter

LIST = query(__package__, "outputs_list")
GET = query(__package__, "outputs_get")
STOP = query(__package__, "outputs_stop")
RELEASE = query(__package__, "outputs_release")
LOCK = query(__package__, "outputs_lock")
LETTER = query(__package__, "outputs_letter")

REASON_MAX: Final = 500
REDACT_S: Final = 30.0
TOKEN_LAST: Final = 2**63 - 1
OutputState = Literal["held", "quarantined", "redacted", "released"]
_META = msgspec.msgpack.Decoder(OutputMeta)
_CHECKS = msgspec.json.Decoder(list[Check])


class Decider(msgspec.Struct, frozen=True):
    """Who decides: as the audit trail names them, and all that a submission may name them by."""

    audited: str
    names: tuple[str, ...]


class OutputDesk:
    def __init__(self, database: Database, store: Store, queue: Queue, finisher: Finisher | None = None) -> None:
        self.database = database
        self.store = store
        self.queue = queue
        self.finisher = finisher
        """Whose listeners hear of jobs that come into another state; None: nobody does."""

    async def page(
        self,
        *,
        shows: Collection[ShowId] | None = None,
        state: OutputState | None = None,
        job: JobId | None = None,
        after: int | None = None,
        most: int = 50,
    ) -> list[OutputLine]:
        """The newest first; `after` is the last one of the page before."""
        within_shows = None if shows is None else sorted(shows)
        before = TOKEN_LAST if after is None else after
        return [_line(row) for row in await self.database.rows(LIST, within_shows, state, job, before, most)]

    async def get(self, output: int) -> OutputTold:
        row = await self._row(output)
        checks = _CHECKS.decode(row["checks"]) if row["checks"] else []
        files = [name for _, name in map(parsed, row["artifacts"] or ())]
        return OutputTold(line=_line(row), checks=checks, artifacts=files)

    async def content(self, output: int, who: Decider, part: str = "value") -> bytes:
        """What the frame left, whatever readers get: its value as msgpack, or with `artifact:NAME` a file."""
        row = await self._row(output)
        words = _words(row)
        if part != "value" and part not in words:
            raise NotFound(
                f"Output {output} has no part {part[:64]!r}: it has value, and {', '.join(words) or 'no file'}."
            )
        detail = {"show": str(row["pk_show"]), "output": output, "part": part}
        entry = AuditEntry(who.audited, "output.read", f"job:{row['job']}", detail)
        async with self.database.transaction() as tx:
            await audit.append(tx, [entry])
        if part == "value" and part not in words:
            return row["value"] or msgspec.msgpack.encode(None)
        return await self.store.get(words[part])

    async def release(self, output: int, who: Decider, reason: str) -> OutputChanged:
        """Let it be read as the frame left it."""
        row = await self._decided(output, who, reason)
        ended: list[JobEnd] = []
        async with self.database.transaction() as tx:
            mode = await tx.value(STOP, output)
            faults.at("outputs.after_stop")
            now = await tx.row(LOCK, *_place(row))
            if now is None or now["output"] is None:
                return _changed(row, "released", changed=False)
            # What was redacted since the row was read is known by pointers that only the row of now has.
            fresh = await tx.row(GET, output) if now["output"] == Kept.REDACTED else None
            words = _words(fresh) if fresh is not None else None
            files = [word(at, name.removeprefix("artifact:")) for name, at in (words or {}).items() if name != "value"]
            check = _check(who, "RELEASED", reason)
            at = words.get("value") if words is not None else None
            await tx.run(RELEASE, *_place(row), at, words is not None, "\n".join(files), check)
            mark = _mark(row, "released", reason)
            await outputs.write_kept(tx, [mark], [row["ts_ended"]])
            ended = await self._settled(tx, row, now["state"])
            await self._finish(tx, row, who, "output.release", reason, held=mode is not None)
        self._tell(ended)
        return _changed(row, "released", changed=True)

    async def redact(self, output: int, who: Decider, reason: str, *, whole: bool = False) -> OutputChanged:
        """Let it be read without what scanners find in it; with `whole`, or if they find nothing, without any of it."""
        row = await self._decided(output, who, reason)
        if row["state"] == "released":
            raise Refused(f"Output {output} was released: it is for everybody to read already.")
        original = await self._original(row)
        redacted, findings = await asyncio.to_thread(redact_all, original, within(REDACT_S), whole=whole)
        found = OutputWord(says=OutputSays.REDACT, reason=reason, findings=tuple(findings))
        ended: list[JobEnd] = []
        async with self.database.transaction() as tx:
            mode = await tx.value(STOP, output)
            now = await tx.row(LOCK, *_place(row))
            if now is None or now["output"] not in (Kept.HELD, Kept.QUARANTINED):
                return _changed(row, "redacted", changed=False)
            left = Left(now["value"], now["value_at"], now["artifacts"])
            check = _recorded(who, found)
            words = await replace(tx, self.store, _place(row), left, original, redacted, check)
            mark = _mark(row, Kept.REDACTED, reason)._replace(original=words or "")
            await outputs.write_kept(tx, [mark], [row["ts_ended"]])
            ended = await self._settled(tx, row, now["state"])
            await self._finish(tx, row, who, "output.redact", reason, held=mode is not None)
        self._tell(ended)
        return _changed(row, "redacted", changed=True)

    async def _row(self, output: int) -> Record:
        row = await self.database.row(GET, output) if 0 <= output <= TOKEN_LAST else None
        if row is None:
            raise self.unknown(output)
        return row

    @staticmethod
    def unknown(output: int) -> NotFound:
        return NotFound(f"No output {output} is kept back, or it is not kept any more: see `rota outputs list`.")

    async def _decided(self, output: int, who: Decider, reason: str) -> Record:
        if not reason.strip() or len(reason) > REASON_MAX or "\0" in reason:
            raise InvalidInput(f"Say why, in 1 to {REASON_MAX} characters: it is kept in the audit trail.")
        row = await self._row(output)
        check_not_own(_META.decode(row["meta"]), who)
        return row

    async def _original(self, row: Record) -> Content:
        words = _words(row)
        value: bytes | None = row["value"]
        if "value" in words:
            value = await self.store.get(words["value"])
        names = [name for name in words if name != "value"]
        files = [(name.removeprefix("artifact:"), await self.store.get(words[name])) for name in names]
        return Content(value, tuple(files))

    async def _settled(self, tx: Transaction, row: Record, state: str) -> list[JobEnd]:
        """The frame succeeds again; its job, too, when it was the last that did not."""
        if state != "OUTPUT_QUARANTINED":
            return []
        rows = await tx.rows(COUNT, [row["pk_layer"]], [row["job"]], [-1], None)
        letters = [each["id"] for each in await tx.rows(LETTER, outputs.cause(row["id"]))]
        if letters:
            await self.queue.dead_letters.purge(DeadLetterFilter(ids=letters), on=tx)
        return [job_end(each) for each in rows]

    async def _finish(self, tx: Transaction, row: Record, who: Decider, act: str, reason: str, *, held: bool) -> None:
        if held:
            await tx.run(FREE, [row["job"]])
        detail = {"show": str(row["pk_show"]), "output": row["id"], "reason": reason, "was": row["state"]}
        await audit.append(tx, [AuditEntry(who.audited, act, f"job:{row['job']}", detail)])
        faults.at("outputs.before_release_commit")

    def _tell(self, ended: Sequence[JobEnd]) -> None:
        if ended and self.finisher is not None:
            for listener in self.finisher.listeners:
                listener(ended)


def check_not_own(meta: OutputMeta, who: Decider) -> None:
    own = {name for name in (meta.principal, meta.actor_id) if name}
    if not own.isdisjoint(who.names):
        raise Forbidden(
            "Who submitted a job may not decide about its outputs: have somebody else look at it.",
            reason="self_release",
        )


def _place(row: Record) -> tuple[LayerId, int, int, datetime]:
    return row["pk_layer"], row["frame"], row["id"], row["ts_ended"]


def _words(row: Record) -> dict[str, str]:
    """Pointers to what the frame left, by the name of the part; a small value has none, it lies in the row itself."""
    if row["original"]:
        return {name: pointer for pointer, name in map(parsed, row["original"])}
    words = {f"artifact:{name}": pointer for pointer, name in map(parsed, row["artifacts"] or ())}
    return {"value": row["value_at"], **words} if row["value_at"] else words


def _line(row: Record) -> OutputLine:
    meta = _META.decode(row["meta"])
    return OutputLine(
        id=row["id"],
        job=JobId(row["job"]),
        show=row["show"],
        topic=meta.topic,
        layer=meta.layer,
        frame=meta.number,
        attempt=meta.attempt,
        state=row["state"],
        severity=row["severity"],
        rule=row["rule"],
        reason=row["reason"],
        bytes=meta.bytes,
        at=row["at"],
    )


def _mark(row: Record, state: str, reason: str) -> Mark:
    word_said = OutputWord(says=OutputSays.ALLOW, rule=row["rule"], reason=reason, severity=row["severity"] or "medium")
    meta = _META.decode(row["meta"])
    return Mark(row["id"], row["pk_layer"], row["frame"], row["job"], row["pk_show"], state, word_said, meta)


def _check(who: Decider, says: str, reason: str) -> str:
    word_said = OutputWord(says=OutputSays.ALLOW, reason=reason)
    return msgspec.json.encode(msgspec.structs.replace(_recorded(who, word_said), says=says)).decode()


def _recorded(who: Decider, said: OutputWord) -> Check:
    return Outputs(lambda: None, who.audited).record("person", said)


def _changed(row: Record, state: str, *, changed: bool) -> OutputChanged:
    return OutputChanged(id=row["id"], job=JobId(row["job"]), state=state, changed=changed)
