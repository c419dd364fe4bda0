"""C1: after any sequence of operations the exact counts equal the rows and a plain model."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from uuid import UUID

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from rota.infra.postgres import Database, PostgresTarget
from rota.queue import DeadLetterFilter, FailedFilter, FrameFailure, Queue, storage
from tests.support.harness.effort import effort
from tests.support.queue import EMPTY, Dispatcher, agreed, entry, sql

CLEAR = [sql(statement) for statement in EMPTY.split("; ")]
QUEUES = ("film", "short")
HELD = 100
"""Jobs from this number on are queued by a producer that keeps its transaction open."""
POISON = sql("UPDATE rota.queue_terminal_live_counts SET completed = completed + 5, waiting = waiting - 1")
DISTRUST = sql("UPDATE rota.queue_storage SET counters_trusted = false")
SMALL = st.integers(0, 7)
SHARE = st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans())
"""A selection: start, length, and whether to take only every second item."""
ENDS = ("complete", "give_back", "retry", "defer", "fail", "cancel_running", "park")
MOVES = ("failed_retry", "failed_dead_letter", "failed_discard", "failed_expire", "dead_retry", "dead_purge")
MAINTENANCE = ("promote", "promote", "fold", "fold_pinned", "rotate", "prune", "carry", "shed", "rebuild")
ENQUEUE = st.tuples(
    st.just("enqueue"), st.lists(st.tuples(SMALL, st.sampled_from([1, 1, 3, 20, 600])), min_size=1, max_size=4)
)
STEP = st.one_of(
    ENQUEUE,
    ENQUEUE,
    st.tuples(st.just("claim"), st.sampled_from([1, 3, 8, 40, 700])),
    st.tuples(st.just("claim"), st.sampled_from([1, 3, 8, 40, 700])),
    st.tuples(st.just("claim_each"), st.sampled_from([1, 3, 8, 40, 700])),
    st.tuples(st.just("claim_each"), st.sampled_from([1, 3, 8, 40, 700])),
    st.tuples(st.sampled_from(ENDS), SHARE),
    st.tuples(st.sampled_from(ENDS), SHARE),
    st.tuples(st.just("finish")),
    st.tuples(st.just("finish")),
    st.tuples(st.sampled_from(MOVES), SHARE),
    st.tuples(st.just("cancel_waiting"), SMALL, st.integers(0, 30), st.integers(1, 30)),
    st.tuples(st.just("park_rest"), SMALL),
    st.tuples(st.just("unpark"), SMALL, st.integers(1, 30)),
    st.tuples(st.sampled_from(MAINTENANCE)),
    st.tuples(st.sampled_from(MAINTENANCE)),
    st.tuples(st.just("rotate_and_prune")),
    st.tuples(st.just("hold"), SMALL, st.sampled_from([1, 20])),
    st.tuples(st.just("let_go"), st.booleans()),
)
STEPS = st.lists(st.tuples(STEP, st.sampled_from([True, True, True, True, False])), min_size=15, max_size=45)


class FrameModel:
    """Expected states of all frames, and their tokens."""

    def __init__(self):
        self.state = {}
        """(job, frame) -> waiting, running, deferred, completed, failed, cancelled, dead or gone"""
        self.parked = set()
        self.tokens = {}
        """token -> frame, for every token ever claimed"""
        self.running = {}
        """frame -> its token"""
        self.failed = {}

    def add(self, number, frames):
        """Adds frames to job `number`, which also determines the queue."""
        job = UUID(int=1 + number)
        first = sum(1 for known, _ in self.state if known == job)
        self.state |= dict.fromkeys(((job, first + at) for at in range(frames)), "waiting")
        return entry(QUEUES[number % 2], job=job, layer=job, frame=first, frames=frames, priority=1 + number % 3 * 4)

    def forget(self, removed):
        for at in range(removed.frames):
            del self.state[removed.job, removed.frame + at]

    def counts(self):
        counts = {}
        for (job, _), state in self.state.items():
            if state != "gone":
                counts.setdefault(QUEUES[(job.int - 1) % 2], Counter())[state] += 1
        return counts

    def in_state(self, *states):
        return [frame for frame, state in sorted(self.state.items()) if state in states]


def select(things, selection):
    start, number, every_second = selection
    chosen = things[start % max(1, len(things)) :][: number * (2 if every_second else 1)]
    return chosen[::2] if every_second else chosen


class Driver:
    """Runs each step in the database and in the model. A step with keep=False is rolled back."""

    def __init__(self, database, others, dispatcher):
        self.database = database
        self.others = others
        self.queue = Queue(database)
        self.dispatcher = dispatcher
        self.model = FrameModel()
        self.held = None

    @asynccontextmanager
    async def transaction(self, *, keep):
        try:
            async with self.database.transaction() as tx:
                yield tx
                if not keep:
                    raise LookupError
        except LookupError:
            assert not keep

    async def run_step(self, step, *, keep):
        name, *arguments = step
        event(name)
        if name in ENDS:
            await self.end(name, *arguments, keep=keep)
        elif name in MOVES:
            await self.move(name, *arguments, keep=keep)
        elif name in MAINTENANCE:
            async with self.transaction(keep=keep) as tx:
                await self.maintain(name, tx, keep=keep)
        else:
            await getattr(self, name)(*arguments, keep=keep)

    async def enqueue(self, drawn, *, keep):
        entries = [self.model.add(number, frames) for number, frames in drawn]
        async with self.transaction(keep=keep) as tx:
            await self.queue.enqueue(entries, on=tx)
        if not keep:
            for each in reversed(entries):
                self.model.forget(each)

    async def hold(self, number, frames, *, keep):
        """A producer that keeps its transaction open."""
        if self.held is None:
            pending = self.model.add(HELD + number, frames)
            self.model.forget(pending)
            context = self.others.transaction()
            tx = await context.__aenter__()
            await self.queue.enqueue([pending], on=tx)
            self.held = (context, pending)

    async def let_go(self, commit, *, keep):
        if self.held is not None:
            (context, pending), self.held = self.held, None
            failed = None if commit else LookupError()
            assert not await context.__aexit__(failed and LookupError, failed, None)
            if commit:
                self.model.state |= {(pending.job, pending.frame + at): "waiting" for at in range(pending.frames)}

    async def claim(self, want, *, keep):
        self.claimed(await self.dispatcher.pieces(want))

    async def claim_each(self, want, *, keep):
        """From every lane, in one call."""
        for result in await self.dispatcher.claim_each(want):
            assert result.frames <= want
            self.claimed([piece for claim in result.claims for piece in claim.ranges()])

    def claimed(self, pieces):
        for claimed in pieces:
            for token, number in zip(claimed.tokens, claimed.frames, strict=True):
                frame = (claimed.job, number)
                assert self.model.state[frame] == "waiting"
                assert frame not in self.model.parked
                assert token not in self.model.tokens
                self.model.state[frame] = "running"
                self.model.tokens[token] = frame
                self.model.running[frame] = token

    async def finish(self, *, keep):
        """Completes everything that can be claimed, so that slots can be pruned."""
        await self.claim(4000, keep=True)
        await self.end_these("complete", sorted(self.model.running.values())[:4000], keep=keep)

    async def rotate_and_prune(self, *, keep):
        for name in ("rotate", "prune"):
            async with self.transaction(keep=keep) as tx:
                await self.maintain(name, tx, keep=keep)

    async def end(self, name, selection, *, keep):
        """Ends some of all tokens ever claimed: those that no longer run must be refused."""
        await self.end_these(name, select(sorted(self.model.tokens), selection), keep=keep)

    async def end_these(self, name, tokens, *, keep):
        model = self.model
        live = {token for token in tokens if model.running.get(model.tokens[token]) == token}
        async with self.transaction(keep=keep) as tx:
            ended = await self.call(name, tokens, tx)
            assert ended.refused == set(tokens) - live
        if keep:
            became = {"complete": "completed", "give_back": "waiting", "park": "waiting", "retry": "deferred"}
            became |= {"defer": "deferred", "fail": "failed", "cancel_running": "cancelled"}
            for token in live:
                frame = model.tokens[token]
                del model.running[frame]
                model.state[frame] = became[name]
                if name == "fail":
                    model.failed[token] = frame
                if name == "park":
                    model.parked.add(frame)

    async def call(self, name, tokens, tx):
        match name:
            case "fail":
                return await self.queue.fail([FrameFailure(token, "exception", "it broke") for token in tokens], on=tx)
            case "retry" | "defer":
                return await getattr(self.queue, name)(tokens, 0.0, on=tx)
            case "park":
                # All parked under one job id; the queue does not check it.
                return await self.queue.park(tokens, UUID(int=1), on=tx)
            case _:
                return await getattr(self.queue, name)(tokens, on=tx)

    async def move(self, name, selection, *, keep):
        model = self.model
        async with self.transaction(keep=keep) as tx:
            if name.startswith("failed"):
                tokens = select(sorted(model.failed), selection)
                which = FailedFilter(tokens=tokens)
                match name:
                    case "failed_retry":
                        done, state = await self.queue.failed.retry(which, on=tx), "deferred"
                    case "failed_dead_letter":
                        done, state = await self.queue.failed.move_to_dead_letters(which, on=tx), "dead"
                    case "failed_discard":
                        done, state = await self.queue.failed.discard(which, on=tx), "gone"
                    case _:
                        tokens = sorted(model.failed)
                        done = await self.queue.failed.expire(0.0, on=tx)
                        state = "failed"
                assert done == tokens
                frames = [model.failed[token] for token in tokens]
            else:
                letters = select(
                    await self.queue.dead_letters.find(DeadLetterFilter(kind="frame"), most=1000), selection
                )
                which = DeadLetterFilter(ids=[letter.id for letter in letters])
                act = self.queue.dead_letters.retry if name == "dead_retry" else self.queue.dead_letters.purge
                assert await act(which, on=tx) == which.ids
                state = "deferred" if name == "dead_retry" else "gone"
                frames = [(letter.job, letter.frame) for letter in letters]
        if keep:
            model.state |= dict.fromkeys(frames, state)
            model.failed = {token: frame for token, frame in model.failed.items() if frame not in frames}

    async def cancel_waiting(self, number, first, frames, *, keep):
        job, requested = UUID(int=1 + number), range(first, first + frames)
        open_ = [
            frame for frame in self.model.in_state("waiting", "deferred") if frame[0] == job and frame[1] in requested
        ]
        async with self.transaction(keep=keep) as tx:
            assert await self.queue.cancel_waiting(job, frames=requested, on=tx) == len(open_)
        if keep:
            self.model.state |= dict.fromkeys(open_, "cancelled")
            self.model.parked -= set(open_)

    async def park_rest(self, number, *, keep):
        """Parks what the job has at the head of its lanes, and reads back which frames those are."""
        job = UUID(int=1 + number)
        lanes = [candidate.lane for candidate in await self.queue.candidates()]
        async with self.transaction(keep=keep) as tx:
            await self.queue.park([], job, rest_of=lanes, on=tx)
            parked = await tx.rows(PARKED, job)
        if keep:
            frames = {(row["job_id"], f) for row in parked for f in range(row["frame"], row["frame"] + row["n"])}
            assert all(self.model.state[frame] == "waiting" for frame in frames)
            self.model.parked |= frames

    async def unpark(self, number, most, *, keep):
        job = UUID(int=1 + number)
        async with self.transaction(keep=keep) as tx:
            before = sum(row["n"] for row in await tx.rows(PARKED, job))
            freed = await self.queue.unpark(job, most, on=tx)
            assert freed == min(before, most)
            parked = await tx.rows(PARKED, None)
        if keep:
            remaining = {(row["job_id"], f) for row in parked for f in range(row["frame"], row["frame"] + row["n"])}
            self.model.parked &= remaining

    async def maintain(self, name, tx, *, keep):
        match name:
            case "promote":
                await self.promote(tx, keep=keep)
            case "fold" | "fold_pinned":
                await storage.fold(tx, pinned=name == "fold_pinned")
            case "rotate":
                event(f"rotate: {await storage.rotate(tx, slot_bytes=1)}")
            case "prune":
                for slot in range(storage.RING_SLOTS):
                    event(f"prune: {await storage.prune(tx, slot)}")
            case "carry":
                event(f"carry: {await tx.value(storage.CARRY_OVER, 50, 2)}")
            case "shed":
                await storage.purge_carried(tx)
                await storage.purge_oldest(tx)
            case "rebuild" if self.held is None:
                for statement in (POISON, DISTRUST, REBUILD):
                    await tx.run(statement)

    async def promote(self, tx, *, keep):
        deferred = self.model.in_state("deferred")
        assert await storage.promote(tx, 50) <= len(deferred)
        rows = await tx.rows(DEFERRED)
        remaining = {(row["job_id"], f) for row in rows for f in range(row["frame"], row["frame"] + row["n"])}
        if keep:
            self.model.state |= dict.fromkeys(set(deferred) - remaining, "waiting")


PARKED = sql(
    "SELECT e.job_id, (e.frame + greatest(r.first_seq, e.lane_seq) - e.lane_seq)::int AS frame,"
    " (least(r.first_seq + r.n, e.lane_seq + e.n) - greatest(r.first_seq, e.lane_seq))::int AS n"
    " FROM rota.queue_returned r JOIN rota.ready_entries e ON e.ready_slot = r.ready_slot AND e.lane_id = r.lane_id"
    " AND e.lane_seq < r.first_seq + r.n AND e.lane_seq + e.n > r.first_seq"
    " WHERE r.parked_job IS NOT NULL AND r.parked_job = coalesce($1::uuid, r.parked_job)"
)
DEFERRED = sql("SELECT job_id, frame, n FROM rota.deferred_jobs")
SET_GENERATION = sql("UPDATE rota.queue_ring_rotations SET generation = $1")
REBUILD = sql("SELECT rota.queue_rebuild_counts(NULL)")


# No shrinking: it takes minutes, and the steps of a failure say enough.
@settings(
    max_examples=effort(15, 40),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(generation=st.integers(7, 13), steps=STEPS)
async def test_exact_counts_equal_the_rows_and_the_model(database, generation, steps):
    others = await Database.open(PostgresTarget(url=database.target.url))
    try:
        await run_steps(database, others, generation, steps)
    finally:
        await others.close()


async def run_steps(database, others, generation, steps):
    for statement in CLEAR:
        await database.run(statement)
    await database.run(SET_GENERATION, generation)
    driver = Driver(database, others, await Dispatcher(database).enlisted())
    try:
        for step, keep in steps:
            await driver.run_step(step, keep=keep)
            assert await agreed(database) == expected(driver.model)
    finally:
        await driver.let_go(False, keep=True)
    await drain(driver)


async def drain(driver):
    """In the end every waiting frame can be claimed and completed: none is lost."""
    model = driver.model
    for number in range(8):
        await driver.unpark(number, 100_000, keep=True)
    async with asyncio.timeout(20):
        while model.in_state("waiting", "deferred"):
            async with driver.transaction(keep=True) as tx:
                await driver.maintain("promote", tx, keep=True)
            await driver.claim(4000, keep=True)
        while model.running:
            await driver.finish(keep=True)
    assert await agreed(driver.database) == expected(model)


def expected(model):
    fields = ("waiting", "running", "deferred", "completed", "failed", "cancelled", "dead")
    return {queue: {field: counts[field] for field in fields} for queue, counts in model.counts().items()}
