"""Contract of every ledger. A test module defines the fixtures `ledger` and `account` and inherits `LedgerSuite`.

`Books` is one show in PostgreSQL with a pool, a folder, a department, a job and a layer. If limits have to be published
after a change, `tell` does it.
"""

import asyncio
from itertools import count
from uuid import uuid4

import pytest

from rota.accounting.ledger import BookingGroup, BookingOutcome, Charge, DeclineReason
from rota.infra.postgres.sql import parse_query
from rota.model.errors import InvalidInput
from rota.model.quota import LEVELS, Level, Refusal, Resource, Usage
from rota.model.units import CENTICORES_MAX

# For few rows DELETE takes a tenth of the time of TRUNCATE, which creates new files.
EMPTY = (
    "DELETE FROM rota.proc; DELETE FROM rota.proc_grave; DELETE FROM rota.show; DELETE FROM rota.alloc;"
    " DELETE FROM rota.dept"
)
PLENTY = 1_000_000


def sql(text):
    return parse_query("test", f"-- Test.\n{text}")


MAKE_SHOW = sql("INSERT INTO rota.show (pk_show, str_name, b_scheduler_managed) VALUES ($1, $2, $3)")
MAKE_POOL = sql("INSERT INTO rota.alloc (pk_alloc, str_name) VALUES ($1, $2)")
MAKE_DEPT = sql("INSERT INTO rota.dept (pk_dept, str_name) VALUES ($1, $2)")
MAKE_SUB = sql(
    "INSERT INTO rota.subscription (pk_subscription, pk_show, pk_alloc, int_burst)"
    " VALUES (gen_random_uuid(), $1, $2, $3)"
)
MAKE_FOLDER = sql("INSERT INTO rota.folder (pk_folder, pk_show, str_name) VALUES ($1, $2, $3)")
MAKE_FOLDER_RESOURCE = sql("INSERT INTO rota.folder_resource (pk_folder, pk_show) VALUES ($1, $2)")
MAKE_POINT = sql("INSERT INTO rota.point (pk_show, pk_dept) VALUES ($1, $2)")
MAKE_JOB = sql("INSERT INTO rota.job_resource (pk_job, pk_show) VALUES ($1, $2)")
MAKE_LAYER = sql("INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show) VALUES ($1, $2, $3)")
LIMITS = {
    Level.SUBSCRIPTION: sql(
        "UPDATE rota.subscription SET int_burst = coalesce($3, int_burst), int_gpu_burst = coalesce($4, int_gpu_burst)"
        " WHERE pk_show = $1 AND pk_alloc = $2"
    ),
    **{
        level: sql(
            f"UPDATE rota.{table} SET int_max_cores = coalesce($3, int_max_cores),"
            f" int_max_gpus = coalesce($4, int_max_gpus) WHERE pk_show = $1 AND {key} = $2"
        )
        for level, table, key in (
            (Level.FOLDER, "folder_resource", "pk_folder"),
            (Level.JOB, "job_resource", "pk_job"),
            (Level.LAYER, "layer_resource", "pk_layer"),
            (Level.POINT, "point", "pk_dept"),
        )
    },
}
SUM = sql("SELECT coalesce(sum(int_cores_reserved), 0)::bigint FROM rota.proc WHERE pk_show = $1")
TOKENS = sql("SELECT token FROM rota.proc WHERE pk_show = $1 ORDER BY token")


class Books:
    """One show with one of everything that is charged."""

    def __init__(self, database, ledger, *, managed=False, tell=None):
        self.database = database
        self.ledger = ledger
        self.managed = managed
        self.tell = tell
        self.show, self.pool, self.folder, self.dept, self.job, self.layer, self.host = (uuid4() for _ in range(7))
        self.names = count(1)

    async def make(self, burst=PLENTY):
        async with self.database.transaction() as tx:
            await tx.run(MAKE_SHOW, self.show, f"show-{self.show}", self.managed)
            await tx.run(MAKE_POOL, self.pool, f"pool-{self.pool}")
            await tx.run(MAKE_DEPT, self.dept, f"dept-{self.dept}")
            await tx.run(MAKE_SUB, self.show, self.pool, burst)
            await tx.run(MAKE_FOLDER, self.folder, self.show, "shots")
            await tx.run(MAKE_FOLDER_RESOURCE, self.folder, self.show)
            await tx.run(MAKE_POINT, self.show, self.dept)
            await tx.run(MAKE_JOB, self.job, self.show)
            await tx.run(MAKE_LAYER, self.layer, self.job, self.show)
        await self.told()
        return self

    async def told(self):
        if self.tell is not None:
            await self.tell(self.show)

    async def another_pool(self, burst=PLENTY):
        pool = uuid4()
        await self.database.run(MAKE_POOL, pool, f"pool-{pool}")
        await self.database.run(MAKE_SUB, self.show, pool, burst)
        await self.told()
        return pool

    async def another_folder(self):
        folder = uuid4()
        await self.database.run(MAKE_FOLDER, folder, self.show, f"folder-{folder}")
        await self.database.run(MAKE_FOLDER_RESOURCE, folder, self.show)
        await self.told()
        return folder

    async def limit(self, level, cores=None, gpus=None):
        await self.database.run(LIMITS[level], self.show, self.charge().key(level), cores, gpus)
        await self.told()

    def charge(self, cores=100, gpus=0, **other):
        keys = {"alloc": self.pool, "folder": self.folder, "job": self.job, "layer": self.layer, "dept": self.dept}
        return Charge(**(keys | other), cores=cores, gpus=gpus)

    def group(self, tokens, cores=100, gpus=0, **other):
        return BookingGroup(self.charge(cores, gpus, **other), self.host, tokens)

    async def book(self, tokens, cores=100, gpus=0, *, force=False, **other):
        [outcome] = await self.ledger.book(self.show, [self.group(tokens, cores, gpus, **other)], force=force)
        return plain(outcome)

    async def counted(self):
        """Usage by level for the first keys of the show; 0 if absent."""
        counters = await self.ledger.counters(self.show)
        return {level: counters.get((level, self.charge().key(level)), Usage()) for level in LEVELS}

    async def tokens(self):
        return [row["token"] for row in await self.database.rows(TOKENS, self.show)]

    async def agree(self):
        """Asserts that the counters of every level equal the procs; returns the cores."""
        booked = await self.database.value(SUM, self.show)
        counters = await self.ledger.counters(self.show)
        for level in LEVELS:
            assert sum(usage.cores for (at, _), usage in counters.items() if at is level) == booked
        return booked


def outcome_of(booked=(), already=(), refused=(), declined=None, refusal=None):
    return plain(BookingOutcome(booked, already, refused, declined or {}, refusal))


def plain(outcome):
    """An outcome with token lists, so that ranges and lists compare equal."""
    tokens = (list(outcome.booked), list(outcome.already), list(outcome.refused))
    return BookingOutcome(*tokens, outcome.declined, outcome.refusal)


def everywhere(cores, gpus=0):
    return dict.fromkeys(LEVELS, Usage(cores, gpus))


class LedgerSuite:
    """Fixtures: `ledger`, and `account`, a new `Books` on it with a high burst."""

    async def test_booking_counts_at_all_five_levels_and_writes_its_rows(self, account):
        outcome = await account.book(range(10, 13), cores=150, gpus=2)
        assert outcome == outcome_of(booked=range(10, 13))
        assert await account.counted() == everywhere(450, 6)
        assert await account.tokens() == [10, 11, 12]

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("resource", Resource)
    async def test_frames_up_to_the_exact_limit_are_booked_and_the_next_is_refused(self, account, level, resource):
        cores = resource is Resource.CORES
        await account.limit(level, **{"cores": 300} if cores else {"gpus": 3})
        outcome = await account.book(range(5), cores=100, gpus=1)
        limit, asked = (300, 100) if cores else (3, 1)
        assert outcome == outcome_of(range(3), (), range(3, 5), {}, Refusal(level, resource, limit, limit, asked))
        assert await account.counted() == everywhere(300, 3)
        assert await account.tokens() == [0, 1, 2]

    async def test_refusal_writes_nothing(self, account):
        await account.limit(Level.POINT, cores=99)
        outcome = await account.book([7])
        assert outcome == outcome_of(refused=[7], refusal=Refusal(Level.POINT, Resource.CORES, 0, 99, 100))
        assert await account.counted() == everywhere(0)
        assert await account.tokens() == []

    async def test_burst_of_zero_refuses_everything(self, account):
        await account.limit(Level.SUBSCRIPTION, cores=0)
        outcome = await account.book([1], cores=1)
        assert outcome.refusal == Refusal(Level.SUBSCRIPTION, Resource.CORES, 0, 0, 1)

    async def test_missing_subscription_refuses_like_a_burst_of_zero(self, account):
        outcome = await account.book([1, 2], alloc=uuid4())
        assert outcome == outcome_of(refused=[1, 2], refusal=Refusal(Level.SUBSCRIPTION, Resource.CORES, 0, 0, 100))
        assert await account.tokens() == []

    @pytest.mark.parametrize("unlimited", [0, -1])
    async def test_zero_and_minus_one_are_unlimited_for_folder_job_layer_and_point(self, account, unlimited):
        for level in LEVELS[1:]:
            await account.limit(level, cores=unlimited, gpus=unlimited)
        outcome = await account.book(range(100), cores=10, gpus=1)
        assert outcome == outcome_of(booked=range(100))

    async def test_gpu_burst_of_minus_one_is_unlimited_and_of_zero_refuses(self, account):
        await account.limit(Level.SUBSCRIPTION, gpus=-1)
        assert (await account.book([1], gpus=8)).booked
        await account.limit(Level.SUBSCRIPTION, gpus=0)
        assert (await account.book([2], gpus=1)).refusal == Refusal(Level.SUBSCRIPTION, Resource.GPUS, 8, 0, 1)

    @pytest.mark.parametrize("level", LEVELS)
    async def test_exhausted_gpu_limit_does_not_affect_frames_without_gpus(self, account, level):
        await account.limit(level, gpus=1)
        assert (await account.book([1], gpus=1)).booked
        assert (await account.book([2], gpus=0)).booked

    async def test_exhausted_core_limit_does_not_affect_frames_without_cores(self, account):
        await account.limit(Level.FOLDER, cores=100)
        assert (await account.book([1], cores=100)).booked
        assert (await account.book([2], cores=0, gpus=1)).booked
        assert await account.counted() == everywhere(100, 1)

    async def test_refusal_names_the_first_limit_in_order_with_cores_before_gpus(self, account):
        for level in LEVELS:
            await account.limit(level, cores=100, gpus=1)
        assert (await account.book([1], gpus=1)).booked
        for level in LEVELS:
            assert (await account.book([2], gpus=1)).refusal == Refusal(level, Resource.CORES, 100, 100, 100)
            await account.limit(level, cores=PLENTY)
        for level in LEVELS:
            assert (await account.book([2], gpus=1)).refusal == Refusal(level, Resource.GPUS, 1, 1, 1)
            await account.limit(level, gpus=PLENTY)
        assert (await account.book([2], gpus=1)).booked

    async def test_fractional_cores_are_exact(self, account):
        await account.limit(Level.JOB, cores=120)
        outcome = await account.book(range(5), cores=50)
        assert (outcome.booked, outcome.refusal) == ([0, 1], Refusal(Level.JOB, Resource.CORES, 100, 120, 50))

    async def test_groups_of_one_batch_are_booked_in_order_and_see_each_other(self, account):
        await account.limit(Level.SUBSCRIPTION, cores=500)
        big, small, last = await account.ledger.book(
            account.show,
            [
                account.group(range(3), cores=150),
                account.group([10, 11], cores=40, job=uuid4(), layer=uuid4()),
                account.group([20], cores=20),
            ],
        )
        assert big.booked == range(3)
        assert (small.booked, small.refused) == ([10], [11])
        assert small.refusal == Refusal(Level.SUBSCRIPTION, Resource.CORES, 490, 500, 40)
        assert last.refusal == Refusal(Level.SUBSCRIPTION, Resource.CORES, 490, 500, 20)
        assert await account.agree() == 490

    async def test_repeated_booking_changes_nothing(self, account):
        await account.limit(Level.LAYER, cores=300)
        await account.book(range(3))
        again = await account.book(range(3))
        assert again == outcome_of(already=[0, 1, 2])
        assert again.all_booked == [0, 1, 2]
        assert await account.counted() == everywhere(300)

    async def test_partly_booked_batch_books_the_rest(self, account):
        await account.limit(Level.LAYER, cores=400)
        await account.book([1, 3])
        outcome = await account.book(range(6))
        assert (outcome.already, outcome.booked, outcome.refused) == ([1, 3], [0, 2], [4, 5])
        assert outcome.refusal == Refusal(Level.LAYER, Resource.CORES, 400, 400, 100)
        assert await account.tokens() == [0, 1, 2, 3]

    async def test_token_booked_with_another_charge_is_declined(self, account):
        await account.book([1], cores=100)
        outcome = await account.book([1, 2], cores=200)
        assert (outcome.declined, outcome.booked) == ({1: DeclineReason.DUPLICATE}, [2])
        assert await account.counted() == everywhere(300)

    async def test_tokens_may_come_in_any_order(self, account):
        await account.limit(Level.JOB, cores=300)
        outcome = await account.book([9, 4, 5, 1])
        assert (outcome.booked, outcome.refused) == ([9, 4, 5], [1])
        assert await account.tokens() == [4, 5, 9]

    async def test_repeated_release_returns_quota_once(self, account):
        await account.book(range(4), cores=100, gpus=1)
        [released] = await account.ledger.release(account.show, range(1, 3))
        assert (released.charge, list(released.tokens)) == (account.charge(100, 1), [1, 2])
        assert await account.counted() == everywhere(200, 2)
        assert await account.ledger.release(account.show, range(1, 3)) == []
        assert await account.counted() == everywhere(200, 2)
        assert await account.tokens() == [0, 3]

    async def test_release_of_several_charges_returns_each_its_own(self, account):
        pool, folder = await account.another_pool(), await account.another_folder()
        await account.ledger.book(
            account.show,
            [
                account.group([1, 2], cores=30),
                account.group([3], cores=7, alloc=pool),
                account.group([4], folder=folder),
            ],
        )
        released = await account.ledger.release(account.show, [4, 3, 1, 99])
        assert sorted(token for each in released for token in each.tokens) == [1, 3, 4]
        assert await account.agree() == 30

    async def test_released_token_is_not_booked_again(self, account):
        await account.book(range(4))
        await account.ledger.release(account.show, [1, 2])
        assert await account.book(range(6)) == outcome_of(
            already=[0, 3], booked=[4, 5], declined={1: DeclineReason.TOMBSTONED, 2: DeclineReason.TOMBSTONED}
        )
        assert (await account.book([2], cores=30, force=True)).declined == {2: DeclineReason.TOMBSTONED}
        assert await account.tokens() == [0, 3, 4, 5]
        assert await account.counted() == everywhere(400)

    async def test_released_quota_is_available_to_other_frames(self, account):
        await account.limit(Level.FOLDER, cores=200)
        await account.book(range(2))
        await account.ledger.release(account.show, [0])
        assert (await account.book([5, 6])).booked == [5]
        assert await account.counted() == everywhere(200)

    async def test_tokens_of_another_show_are_not_released(self, account):
        await account.book([1])
        assert await account.ledger.release(uuid4(), [1]) == []
        assert await account.tokens() == [1]

    async def test_forced_booking_ignores_limits_and_is_counted(self, account):
        await account.limit(Level.SUBSCRIPTION, cores=0)
        assert (await account.book([1, 2], force=True)).booked == [1, 2]
        assert await account.counted() == everywhere(200)

    async def test_limit_below_usage_admits_nothing_until_enough_is_released(self, account):
        await account.book(range(5))
        await account.limit(Level.FOLDER, cores=200)
        assert (await account.book([9])).refusal == Refusal(Level.FOLDER, Resource.CORES, 500, 200, 100)
        await account.ledger.release(account.show, range(3))
        assert (await account.book([9])).refused == [9]
        await account.ledger.release(account.show, [3])
        assert (await account.book([9])).booked == [9]

    async def test_empty_batch_changes_nothing(self, account):
        assert await account.ledger.book(account.show, []) == []
        assert await account.book([]) == outcome_of()
        assert await account.ledger.release(account.show, []) == []

    @pytest.mark.parametrize(
        ("tokens", "cores", "gpus", "message"),
        [
            ([1], -1, 0, "ask"),
            ([1], 0, -1, "ask"),
            ([1], 0, 0, "must ask"),
            ([1], CENTICORES_MAX + 1, 0, "ask"),
            ([1, 2, 1], 100, 0, "twice"),
            ([-1], 100, 0, "token"),
            ([2**53], 100, 0, "token"),
            (range(5000), 100, 0, "at most"),
        ],
    )
    async def test_invalid_booking_is_refused_with_nothing_written(self, account, tokens, cores, gpus, message):
        with pytest.raises(InvalidInput, match=message):
            await account.book(tokens, cores, gpus)
        assert await account.counted() == everywhere(0)

    async def test_unknown_show_is_declined(self, account):
        [outcome] = await account.ledger.book(uuid4(), [account.group([1])])
        assert outcome.all_booked == []
        assert await account.tokens() == []

    async def test_concurrent_bookings_fill_a_subscription_and_never_exceed_it(self, account):
        await account.limit(Level.SUBSCRIPTION, cores=10_030)
        numbers = count()

        async def booker():
            held = []
            while True:
                first = next(numbers) * 7
                outcome = await account.book(range(first, first + 7), cores=50, layer=uuid4(), job=uuid4())
                held += outcome.booked
                if outcome.refused:
                    return held

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            bookers = [group.create_task(booker()) for _ in range(8)]
        held = sorted(token for booker in bookers for token in booker.result())
        assert await account.tokens() == held
        assert await account.agree() == 10_000

    async def test_batches_over_the_same_keys_in_opposite_order_do_not_deadlock(self, account):
        pools = [account.pool, *[await account.another_pool() for _ in range(3)]]
        folders = [account.folder, *[await account.another_folder() for _ in range(3)]]
        jobs = [uuid4() for _ in range(4)]
        keys = list(zip(pools, folders, jobs, strict=True))

        async def worker(number):
            order = keys if number % 2 else keys[::-1]
            for iteration in range(6):
                start = (number * 100 + iteration) * 10
                groups = [
                    account.group([start + at], alloc=pool, folder=folder, job=job, layer=job)
                    for at, (pool, folder, job) in enumerate(order)
                ]
                outcomes = await account.ledger.book(account.show, groups)
                assert all(outcome.booked for outcome in outcomes)
                await account.ledger.release(account.show, [start + at for at in (3, 0)])

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(worker(number))
        assert await account.agree() == 8 * 6 * 2 * 100

    async def test_batches_of_different_pools_over_the_same_jobs_do_not_deadlock(self, account):
        pools, folders = (
            [await account.another_pool() for _ in range(6)],
            [await account.another_folder() for _ in range(6)],
        )
        jobs = [uuid4() for _ in range(6)]

        async def worker(number):
            order = jobs if number % 2 else jobs[::-1]
            keys = {"alloc": pools[number], "folder": folders[number]}
            for iteration in range(8):
                start = (number * 100 + iteration) * 10
                groups = [account.group([start + at], job=job, layer=job, **keys) for at, job in enumerate(order)]
                assert all(outcome.booked for outcome in await account.ledger.book(account.show, groups))
                await account.ledger.release(account.show, range(start, start + 5))

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(worker(number))
        assert await account.agree() == 6 * 8 * 100

    async def test_batch_sent_concurrently_by_many_is_booked_once(self, account):
        outcomes = await asyncio.gather(*(account.book(range(20)) for _ in range(6)))
        assert sorted(len(outcome.booked) for outcome in outcomes) == [0] * 5 + [20]
        assert all(sorted(outcome.all_booked) == list(range(20)) for outcome in outcomes)
        assert await account.counted() == everywhere(2000)

    async def test_tokens_released_concurrently_by_many_are_returned_once(self, account):
        await account.book(range(40))
        orders = [range(30), list(range(29, -1, -1)), range(10, 30), [5, 25, 15]]
        released = await asyncio.gather(*(account.ledger.release(account.show, tokens) for tokens in orders))
        tokens = [token for each in released for one in each for token in one.tokens]
        assert sorted(tokens) == list(range(30))
        assert await account.counted() == everywhere(1000)
