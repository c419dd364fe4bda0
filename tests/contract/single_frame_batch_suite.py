"""Contract of every ledger for single-frame batches: equal to their frames as groups. Fixtures as in `LedgerSuite`."""

from uuid import uuid4

import pytest

from rota.accounting.ledger import NIL_UUID, DeclineReason, SingleFrameBatch
from rota.model.errors import InvalidInput
from rota.model.quota import Level, Refusal, Resource, Usage
from tests.contract.ledger_suite import LIMITS, MAKE_JOB, MAKE_LAYER, everywhere, outcome_of, plain

SHARED = (Level.SUBSCRIPTION, Level.FOLDER, Level.POINT)


def single_frames(account, tokens, cores=100, gpus=0, *, jobs=None, layers=None, **other):
    """A batch with a job and a layer of its own for each token."""
    jobs = [uuid4() for _ in tokens] if jobs is None else jobs
    layers = [uuid4() for _ in tokens] if layers is None else layers
    charge = account.charge(cores, gpus, **{"job": NIL_UUID, "layer": NIL_UUID} | other)
    return SingleFrameBatch(charge, account.host, tokens, jobs, layers)


async def book(account, *batch, force=False):
    return [plain(outcome) for outcome in await account.ledger.book(account.show, batch, force=force)]


async def create_capped_job(account, level, cores):
    """A job and its layer, one of which has a cap."""
    job, layer = uuid4(), uuid4()
    await account.database.run(MAKE_JOB, job, account.show)
    await account.database.run(MAKE_LAYER, layer, job, account.show)
    await account.database.run(LIMITS[level], account.show, job if level is Level.JOB else layer, cores, None)
    await account.told()
    return job, layer


async def job_cores(account, *jobs):
    counters = await account.ledger.counters(account.show)
    return [counters.get((Level.JOB, job), Usage()).cores for job in jobs]


class SingleFrameBatchSuite:
    async def test_single_frame_batch_counts_at_every_level_with_a_row_per_frame(self, account):
        jobs = [uuid4() for _ in range(3)]
        [outcome] = await book(account, single_frames(account, [10, 300, 11], 150, 2, jobs=jobs))
        assert outcome == outcome_of(booked=[10, 300, 11])
        assert await account.tokens() == [10, 11, 300]
        found = await account.counted()
        assert [found[level] for level in SHARED] == [Usage(450, 6)] * 3
        assert await job_cores(account, *jobs) == [150, 150, 150]
        assert await account.agree() == 450

    @pytest.mark.parametrize("level", SHARED)
    @pytest.mark.parametrize("resource", Resource)
    async def test_single_frame_batch_over_a_limit_books_its_first_frames_and_refuses_the_rest(
        self, account, level, resource
    ):
        cores = resource is Resource.CORES
        await account.limit(level, **{"cores": 200} if cores else {"gpus": 2})
        [outcome] = await book(account, single_frames(account, [9, 4, 5, 1], 100, 1))
        limit, asked = (200, 100) if cores else (2, 1)
        assert outcome == outcome_of([9, 4], (), [5, 1], {}, Refusal(level, resource, limit, limit, asked))
        assert await account.tokens() == [4, 9]
        assert await account.agree() == 200

    async def test_repeated_single_frame_batch_changes_nothing(self, account):
        batch = single_frames(account, [3, 1, 2])
        await book(account, batch)
        [again] = await book(account, batch)
        assert (sorted(again.already), again.booked, again.refused, again.declined) == ([1, 2, 3], [], [], {})
        assert await account.agree() == 300

    async def test_partly_booked_single_frame_batch_books_the_first_of_the_rest(self, account):
        await account.limit(Level.FOLDER, cores=400)
        batch = single_frames(account, range(6))
        await book(account, batch.subset([4, 1]))
        [outcome] = await book(account, batch)
        refusal = Refusal(Level.FOLDER, Resource.CORES, 400, 400, 100)
        assert outcome == outcome_of([0, 2], [1, 4], [3, 5], {}, refusal)
        assert await account.agree() == 400

    async def test_released_frames_of_a_single_frame_batch_stay_released(self, account):
        batch = single_frames(account, range(5))
        await book(account, batch)
        await account.ledger.release(account.show, [3, 1])
        [outcome] = await book(account, batch)
        assert outcome == outcome_of(
            already=[0, 2, 4], declined={1: DeclineReason.TOMBSTONED, 3: DeclineReason.TOMBSTONED}
        )
        assert await account.tokens() == [0, 2, 4]
        assert await account.agree() == 300

    async def test_token_of_a_single_frame_batch_booked_with_another_charge_is_declined(self, account):
        batch = single_frames(account, range(4))
        await book(account, batch.subset([2]))
        [outcome] = await book(account, single_frames(account, range(4)))
        assert outcome == outcome_of(booked=[0, 1, 3], declined={2: DeclineReason.DUPLICATE})
        assert await account.agree() == 400

    @pytest.mark.parametrize("level", [Level.JOB, Level.LAYER])
    async def test_concurrently_added_cap_refuses_only_its_frame(self, account, level):
        job, layer = await create_capped_job(account, level, 99)
        jobs, layers = [uuid4(), job, uuid4()], [uuid4(), layer, uuid4()]
        [outcome] = await book(account, single_frames(account, range(3), jobs=jobs, layers=layers))
        assert outcome == outcome_of(booked=[0, 2], declined={1: DeclineReason.CAPPED})
        assert await job_cores(account, *jobs) == [100, 0, 100]
        assert await account.agree() == 200

    @pytest.mark.parametrize("level", [Level.JOB, Level.LAYER])
    async def test_concurrently_added_cap_counts_the_frames_that_fit(self, account, level):
        job, layer = await create_capped_job(account, level, 100)
        jobs, layers = [uuid4(), job], [uuid4(), layer]
        [outcome] = await book(account, single_frames(account, range(2), jobs=jobs, layers=layers))
        assert outcome == outcome_of(booked=[0, 1])
        refusal = (await account.book([7], job=job, layer=layer)).refusal
        assert refusal == Refusal(level, Resource.CORES, 100, 100, 100)
        await account.ledger.release(account.show, [0, 1])
        assert (await account.book([7], job=job, layer=layer)).booked == [7]
        assert await account.agree() == 100

    async def test_frame_refused_by_its_own_cap_leaves_its_quota_to_the_others(self, account):
        await account.limit(Level.SUBSCRIPTION, cores=200)
        job, layer = await create_capped_job(account, Level.JOB, 50)
        [outcome] = await book(
            account, single_frames(account, range(4), jobs=[job, *(uuid4() for _ in range(3))], layers=[layer] * 4)
        )
        refusal = Refusal(Level.SUBSCRIPTION, Resource.CORES, 200, 200, 100)
        assert outcome == outcome_of([1, 2], (), [3], {0: DeclineReason.CAPPED}, refusal)
        assert await account.agree() == 200

    async def test_single_frame_batch_without_subscription_folder_or_point_is_not_booked(self, account):
        no_subscription = Refusal(Level.SUBSCRIPTION, Resource.CORES, 0, 0, 100)
        where = {
            "alloc": outcome_of(refused=[1, 2], refusal=no_subscription),
            "folder": outcome_of(declined={1: DeclineReason.UNKNOWN_FOLDER, 2: DeclineReason.UNKNOWN_FOLDER}),
            "dept": outcome_of(declined={1: DeclineReason.UNKNOWN_DEPT, 2: DeclineReason.UNKNOWN_DEPT}),
        }
        other = single_frames(account, [8])
        for name, expected in where.items():
            outcomes = await book(account, single_frames(account, [1, 2], **{name: uuid4()}), other)
            assert outcomes[0] == expected
            assert outcomes[1].all_booked == [8]
        assert await account.agree() == 100

    @pytest.mark.parametrize("repeated", [False, True])
    async def test_groups_and_single_frame_batches_of_one_batch_are_booked_in_order(self, account, repeated):
        await account.limit(Level.SUBSCRIPTION, cores=600)
        before = await account.book([90]) if repeated else None
        batch = [
            account.group(range(2)),
            single_frames(account, [5, 7]),
            account.group([90] if repeated else [20]),
            single_frames(account, [30, 6]),
            account.group([31]),
        ]
        outcomes = await book(account, *batch)
        refusal = Refusal(Level.SUBSCRIPTION, Resource.CORES, 600, 600, 100)
        assert [outcome.all_booked for outcome in outcomes] == [[0, 1], [5, 7], [90] if before else [20], [30], []]
        assert [(outcome.refused, outcome.refusal) for outcome in outcomes[3:]] == [([6], refusal), ([31], refusal)]
        assert await account.agree() == 600

    async def test_forced_single_frame_batch_ignores_limits(self, account):
        await account.limit(Level.SUBSCRIPTION, cores=0)
        job, layer = await create_capped_job(account, Level.JOB, 50)
        batch = single_frames(account, [1, 2], jobs=[job, uuid4()], layers=[layer, uuid4()])
        [outcome] = await book(account, batch, force=True)
        assert outcome == outcome_of(booked=[1, 2])
        assert await account.agree() == 200

    async def test_single_frame_batch_may_contain_several_frames_of_one_job(self, account):
        await account.limit(Level.JOB, cores=200)
        batch = single_frames(account, range(4), jobs=[account.job] * 4, layers=[account.layer] * 4)
        [outcome] = await book(account, batch)
        assert outcome == outcome_of(booked=[0, 1], declined={2: DeclineReason.CAPPED, 3: DeclineReason.CAPPED})
        assert await account.counted() == everywhere(200)

    async def test_full_single_frame_batch_of_scattered_tokens_is_booked_repeated_and_released(self, account):
        batch = single_frames(account, [131 * number for number in range(4096)], cores=1)
        [outcome] = await book(account, batch)
        assert len(outcome.booked) == 4096
        [again] = await book(account, batch)
        assert len(again.already) == 4096
        released = await account.ledger.release(account.show, batch.tokens)
        assert len(released) == 4096
        assert await account.agree() == 0

    async def test_empty_single_frame_batch_changes_nothing(self, account):
        outcomes = await book(account, single_frames(account, []), single_frames(account, [4]))
        assert outcomes == [outcome_of(), outcome_of(booked=[4])]

    @pytest.mark.parametrize(("jobs", "layers"), [(2, 3), (3, 2), (4, 3)])
    async def test_columns_of_different_lengths_are_refused_with_nothing_written(self, account, jobs, layers):
        columns = {"jobs": [uuid4() for _ in range(jobs)], "layers": [uuid4() for _ in range(layers)]}
        with pytest.raises(InvalidInput, match="one job and layer per token"):
            await book(account, single_frames(account, range(3), **columns))
        assert await account.tokens() == []
