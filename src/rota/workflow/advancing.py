"""One transaction that advances runs: news and timers, decisions, next jobs, state and history.

Everything of a batch is one commit. Who dies before it has done nothing, who dies after it has nothing left to do. A
submission that is refused undoes the whole batch; the next try is made run by run, each behind a savepoint, so that a
bad one fails alone (`alone=True`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final
from uuid import UUID

import asyncpg
import msgspec
import structlog

from rota.engine.finish import END_AS
from rota.engine.submit import Submitter
from rota.infra import faults, outbox
from rota.infra.nats import Message
from rota.infra.postgres import Record, Transaction, query
from rota.infra.postgres.failures import FAILURES
from rota.infra.telemetry import metrics
from rota.model.approval import Approval
from rota.model.errors import NotFound, RotaError, StaleFence, Unavailable
from rota.model.ids import ENTROPY_BYTES, RunId, uuid7
from rota.model.job import Submitted
from rota.model.job_plan import Plan
from rota.model.lifecycle import JobState
from rota.model.reasons import Reason
from rota.model.saga import undone_by
from rota.model.workflow_advance import new
from rota.model.workflow_check import Flow
from rota.model.workflow_run import DEPTH_MAX, Began, Undo
from rota.workflow.approving import StepApprovals
from rota.workflow.definitions import Definitions, Version
from rota.workflow.sagas import Sagas, Undone, joined
from rota.workflow.turns import Turn, columns, mapped_of, plain, taken

TAKE = query(__package__, "take")
WRITE = query(__package__, "write")
VALUES = query(__package__, "values")
MAPPED = query(__package__, "mapped")
PARTLY = query(__package__, "partly")
OUTPUTS = query(__package__, "outputs")
START = query(__package__, "start")
CANCEL = query(__package__, "cancel")
CALLED = query(__package__, "called")

log = structlog.get_logger(__name__)
BATCH: Final = 256
STALE: Final = "RT001"
GIVEN_UP: Final = "A defect of Rota keeps this run from going on: its server's log has the trace."
NOTIFY: Final = "sys.workflow.notify"
_pack = msgspec.msgpack.Encoder().encode

ENDED = metrics.counter("rota_workflow_runs_ended", "Runs of workflows that ended, by how.", labels=("state",))
STEPS = metrics.counter("rota_workflow_steps_started", "Jobs and runs that steps of workflows have started.")
BATCHES = metrics.histogram(
    "rota_workflow_batch_runs", "Runs advanced by one transaction.", buckets=(1, 4, 16, 64, 128, 256, 512)
)


Flows = dict[int, tuple[int, Flow]]


class Done(msgspec.Struct):
    """What came of a batch, for whoever tells others once it is committed."""

    turns: list[Turn] = []
    plans: list[Plan] = []
    submitted: list[Submitted] = []
    stops: list[UUID] = []
    timers: int = 0
    first: int | None = None
    """The least number of the news that was taken up."""
    asked: list[Approval] = []

    def add(self, more: Done) -> None:
        self.turns += more.turns
        self.plans += more.plans
        self.submitted += more.submitted
        self.stops += more.stops
        self.timers += more.timers
        self.asked += more.asked

    def tell(self) -> None:
        STEPS.inc(sum(len(turn.moves.starts) + len(turn.moves.children) for turn in self.turns))
        for state, runs in Counter(turn.state for turn in self.turns if turn.state.ended).items():
            ENDED.labels(state.value).inc(runs)
        BATCHES.observe(len(self.turns))


class Advancing:
    def __init__(self, submitter: Submitter, definitions: Definitions, sagas: Sagas) -> None:
        self.submitter = submitter
        self.definitions = definitions
        self.sagas = sagas
        self.approving = StepApprovals(definitions)

    async def take(self, tx: Transaction, most: int = BATCH, *, since: int = 0, alone: bool = False) -> Done:
        """Advance runs that have something to hear, by news from number `since` on."""
        rows = await tx.rows(TAKE, most, since)
        if not rows:
            return Done()
        faults.at("workflow.after_take")
        if alone:
            done = await self._one_by_one(tx, rows)
        else:
            done = await self.advance(tx, await self._read(tx, rows))
        done.first = min((row["news_id"] for row in rows if row["news_id"] is not None), default=None)
        return done

    async def advance(self, tx: Transaction, turns: Sequence[Turn], *, alone: bool = False) -> Done:
        """Decide about runs that are locked, and write it."""
        done = Done()
        wave = list(turns)
        for _ in range(DEPTH_MAX + 1):
            if not wave:
                break
            wave = await self._wave(tx, wave, done, alone=alone)
        done.timers = sum(len(turn.moves.timers) for turn in done.turns)
        await self._write(tx, done.turns)
        done.asked = await self.approving.carry_out(tx, done.turns)
        faults.at("workflow.before_commit")
        return done

    async def _one_by_one(self, tx: Transaction, rows: Sequence[Record]) -> Done:
        """Each run behind a savepoint: what cannot be read, decided or written of one keeps no other from going on."""
        done = Done()
        for _, told in groupby(rows, itemgetter("pk_run")):
            news = list(told)
            try:
                async with tx.savepoint():
                    done.add(await self.advance(tx, await self._read(tx, news), alone=True))
            except Exception as error:
                if _may_pass(error):
                    raise
                log.exception("run_cannot_be_advanced", run=str(news[0]["pk_run"]))
                turn = Turn.of(news[0])
                turn.give_up(GIVEN_UP)
                await self._write(tx, [turn])
                done.turns.append(turn)
        return done

    async def begun(
        self, tx: Transaction, given: Sequence[tuple[Version, RunId, dict[str, object], str | None]], actor: str
    ) -> list[Turn | None]:
        """New runs, not advanced yet; None for one whose key was used before. `actor` submits all that they do."""
        return await self._begin(tx, [(*each, Parent(actor)) for each in given])

    async def _read(self, tx: Transaction, rows: Sequence[Record]) -> list[Turn]:
        layers = [row["pk_layer"] for row in rows if row["kind"] == "job" and (row["frames"] or 0) > 1]
        children = [row["pk_job"] for row in rows if row["kind"] == "run"]
        mapped = mapped_of(await tx.rows(MAPPED, layers)) if layers else {}
        partly = await _partly(tx, rows) if layers else frozenset()
        outputs = {row["pk_run"]: row["output"] for row in await tx.rows(OUTPUTS, children)} if children else {}
        turns = taken(rows, mapped, outputs, partly)
        await self.sagas.record(tx, _joined(turns, rows))
        return turns

    async def _wave(self, tx: Transaction, turns: list[Turn], done: Done, *, alone: bool) -> list[Turn]:
        """Decide about these; returns the runs that they start."""
        flows = await self.definitions.many({turn.workflow for turn in turns}, tx)
        await self._read_values(tx, [turn for turn in turns if flows[turn.workflow][1].reads])
        await self._call(tx, turns)
        for turn in turns:
            version, flow = flows[turn.workflow]
            try:
                turn.decide(flow, version)
            except Exception:
                if not alone:
                    raise
                log.exception("run_cannot_be_advanced", run=str(turn.run))
                turn.give_up(GIVEN_UP)
        children = await self._children(tx, turns, flows)
        await self._undo(tx, turns, flows)
        await self._stop(tx, turns, done)
        if alone:
            for turn in turns:
                children = await self._submit_alone(tx, turn, flows, done, children)
            await self._stop(tx, turns, done)
        else:
            await self._submit(tx, turns, flows, done)
        for turn in turns:
            turn.asks(flows[turn.workflow][1])
        done.turns += turns
        await self._notify(tx, turns, flows)
        return await self._start(tx, [birth for birth in children if birth.is_wanted], flows)

    async def _undo(self, tx: Transaction, turns: Sequence[Turn], flows: Flows) -> None:
        """Record what undoes the steps that have succeeded; runs that fail and want it undone go on until it is."""
        await self.sagas.record(tx, [_undone(turn, flows, undo) for turn in turns for undo in turn.moves.undos])
        for turn in [each for each in turns if each.wants_rollback(flows[each.workflow][1].spec)]:
            if await self.sagas.roll_back(tx, [(turn.show, str(turn.run))], plain(turn.now.error)):
                turn.compensates()

    async def _read_values(self, tx: Transaction, turns: Sequence[Turn]) -> None:
        by_run = {turn.run: turn for turn in turns if turn.fence > 0}
        for row in await tx.rows(VALUES, list(by_run)) if by_run else ():
            by_run[row["pk_run"]].values[row["place"]] = msgspec.msgpack.decode(row["value"])

    async def _call(self, tx: Transaction, turns: Sequence[Turn]) -> None:
        """Shows by the names that they have now; of one that is gone nothing has the name."""
        names = {row["pk_show"]: row["str_name"] for row in await tx.rows(CALLED, list({turn.show for turn in turns}))}
        for turn in turns:
            turn.called = names.get(turn.show) or str(turn.show)

    async def _submit(self, tx: Transaction, turns: Sequence[Turn], flows: Flows, done: Done) -> None:
        starts = [(turn, start) for turn in turns for start in turn.moves.starts]
        if not starts:
            return
        plans = [start.plan for _, start in starts]
        submitted = await self.submitter.write(plans, on=tx)
        for (turn, start), one in zip(starts, submitted, strict=True):
            turn.began(flows[turn.workflow][1], start.place, one.job)
        done.plans += plans
        done.submitted += submitted

    async def _submit_alone(
        self, tx: Transaction, turn: Turn, flows: Flows, done: Done, children: list[Birth]
    ) -> list[Birth]:
        """A run whose steps are refused goes on without them: they fail, and say why. Returns the runs to start."""
        for _ in range(len(turn.now.steps) + 1):
            try:
                async with tx.savepoint():
                    await self._submit(tx, [turn], flows, done)
            except Unavailable:
                raise
            except RotaError as refused:
                turn.refused |= {start.place: refused.sentence for start in turn.moves.starts}
                version, flow = flows[turn.workflow]
                turn.decide(flow, version)
                others = [birth for birth in children if birth.turn is not turn]
                children = [*others, *await self._children(tx, [turn], flows)]
                await self._undo(tx, [turn], flows)
            else:
                break
        return children

    async def _stop(self, tx: Transaction, turns: Sequence[Turn], done: Done) -> None:
        """Jobs first, since whoever submits locks queues after jobs."""
        stops = sorted({job for turn in turns for job in turn.moves.stops})
        for job in stops:
            await tx.row(END_AS, job, JobState.CANCELLED.value, Reason.CANCELLED.value)
        done.stops += stops
        if runs := sorted({run for turn in turns for run in turn.moves.stop_runs}):
            await tx.run(CANCEL, runs)

    async def _children(self, tx: Transaction, turns: Sequence[Turn], flows: Flows) -> list[Birth]:
        """What steps start, by name; one that cannot be started fails."""
        births: list[Birth] = []
        for turn in turns:
            if not turn.moves.children:
                continue
            version, flow = flows[turn.workflow]
            found: list[Birth] = []
            for _ in range(len(turn.now.steps) + 1):
                found, faults_ = await self._births(tx, turn)
                if not faults_:
                    break
                turn.refused |= faults_
                turn.decide(flow, version)
            births += found
        return births

    async def _births(self, tx: Transaction, turn: Turn) -> tuple[list[Birth], dict[int, str]]:
        births: list[Birth] = []
        wrong: dict[int, str] = {}
        for child in turn.moves.children:
            try:
                if turn.depth >= DEPTH_MAX:
                    raise NotFound(f"Runs inside runs are {DEPTH_MAX} deep: does {child.workflow} start itself?")
                version = await self.definitions.find(turn.called, child.workflow, on=tx)
                births.append(Birth(turn, child.place, version, version.flow.inputs(child.input)))
            except Unavailable:
                raise
            except RotaError as refused:
                wrong[child.place] = refused.sentence
        return births, wrong

    async def _start(self, tx: Transaction, births: Sequence[Birth], flows: Flows) -> list[Turn]:
        if not births:
            return []
        given = []
        for birth in births:
            run = new_run(birth.turn.now_ms)
            birth.turn.began(flows[birth.turn.workflow][1], birth.place, run)
            parent = birth.turn
            given.append(
                (birth.version, run, birth.input, None, Parent(parent.actor, parent.run, parent.root, parent.depth))
            )
        return [turn for turn in await self._begin(tx, given) if turn is not None]

    async def _begin(
        self,
        tx: Transaction,
        given: Sequence[tuple[Version, RunId, dict[str, object], str | None, Parent]],
    ) -> list[Turn | None]:
        steps = [_pack(new(version.flow)) for version, *_ in given]
        inputs = [_pack(values) for _, _, values, *_ in given]
        rows = await tx.rows(
            START,
            [run for _, run, *_ in given],
            [version.show for version, *_ in given],
            [version.id for version, *_ in given],
            steps,
            inputs,
            [key for *_, key, _ in given],
            [parent.run for *_, parent in given],
            [parent.root or run for _, run, *_, parent in given],
            [parent.depth + 1 for *_, parent in given],
            [parent.actor for *_, parent in given],
        )
        turns: list[Turn | None] = []
        for row, (version, run, *_, parent), now, values in zip(rows, given, steps, inputs, strict=True):
            depth, root = parent.depth + 1, parent.root or run
            turn = Turn(run, version.show, version.id, now, 0, values, row["now_ms"], depth, root, actor=parent.actor)
            turn.news = [Began()]
            turns.append(turn if row["made"] else None)
        return turns

    async def _notify(self, tx: Transaction, turns: Sequence[Turn], flows: Flows) -> None:
        notes = [(turn, place, text) for turn in turns for place, text in turn.moves.notes]
        if notes:
            await outbox.add(
                tx, [_note(turn, flows[turn.workflow][1].steps[place].id, text) for turn, place, text in notes]
            )

    async def _write(self, tx: Transaction, turns: Sequence[Turn]) -> None:
        if not turns:
            return
        try:
            await tx.rows(WRITE, *columns(turns))
        except asyncpg.PostgresError as error:
            if error.sqlstate != STALE:
                raise
            raise StaleFence(
                "A run was advanced by somebody else meanwhile: nothing was written, look again."
            ) from error


class Parent(msgspec.Struct, frozen=True):
    """What starts a run: somebody, by a run of theirs or without one."""

    actor: str
    run: RunId | None = None
    root: RunId | None = None
    depth: int = -1


class Birth(msgspec.Struct, frozen=True):
    """A run that a step is to start."""

    turn: Turn
    place: int
    version: Version
    input: dict[str, object]

    @property
    def is_wanted(self) -> bool:
        """Whether what was decided about its parent since then still starts it."""
        return any(child.place == self.place for child in self.turn.moves.children)


def _may_pass(error: Exception) -> bool:
    """Whether trying again later may help: the server was away, busy or in the way of itself."""
    if isinstance(error, (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError)):
        return False
    return isinstance(error, (Unavailable, StaleFence, *FAILURES))


def new_run(now_ms: int) -> RunId:
    return RunId(uuid7(now_ms, secrets.token_bytes(ENTROPY_BYTES)))


def _undone(turn: Turn, flows: Flows, undo: Undo) -> Undone:
    """What a step has done, with what undoes it; it belongs to the saga of the run that all of it began with."""
    step = flows[turn.workflow][1].steps[undo.place]
    by = undone_by(step, undo)
    name = f"{step.id}" if turn.depth == 0 else f"{turn.run}/{step.id}"
    return Undone(show=turn.show, saga=str(turn.root), job=undo.job, by=by, step=name, error=plain(undo.error))


async def _partly(tx: Transaction, rows: Sequence[Record]) -> frozenset[UUID]:
    """Jobs of several frames that did not succeed, and some frames of which have."""
    failed = [
        row["pk_job"]
        for row in rows
        if row["kind"] == "job" and (row["frames"] or 1) > 1 and row["ended_as"] != JobState.SUCCEEDED.value
    ]
    return frozenset(row["pk_job"] for row in await tx.rows(PARTLY, failed)) if failed else frozenset()


def _joined(turns: Sequence[Turn], rows: Sequence[Record]) -> list[Undone]:
    """Jobs that are no steps, and have named the run as theirs."""
    by_run = {turn.run: turn for turn in turns}
    found = []
    for row in rows:
        if row["kind"] == "job" and row["request"] is not None:
            turn = by_run[row["pk_run"]]
            if not turn.has_run(row["pk_job"]):
                found.append(joined(row["ended_as"], row["request"], turn.show, str(turn.root), row["pk_job"]))
    return [each for each in found if each is not None]


def _note(turn: Turn, step: str, text: str) -> Message:
    told = {"run": str(turn.run), "step": step, "text": text}
    return Message(subject=NOTIFY, data=msgspec.json.encode(told), msg_id=f"workflow:{turn.run}:{step}:{turn.fence}")
