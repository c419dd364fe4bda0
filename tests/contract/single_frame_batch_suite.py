"""What every ledger must do with swarms: what it does with their frames as groups. Fixtures as of `LedgerSuite`."""

from uuid import uuid4

import pytest

from rota.accounting.ledger import NIL_UUID, DeclineReason, SingleFrameBatch
from rota.model.errors import InvalidInput
from rota.model.quota import Level, Refusal, Resource, Usage
from tests.contract.ledger_suite import LIMITS, MAKE_JOB, MAKE_LAYER, everywhere, outcome_of, plain

SHARED = (Level.SUBSCRIPTION, Level.FOLDER, Level.POINT)


def swarm(books, tokens, cores=100, gpus=0, *, jobs=None, layers=None, **other):
    """A job and a layer of its own for each token."""
    jobs = [uuid4() for _ in tokens] if jobs is None else jobs
    layers = [uuid4() for _ in tokens] if layers is None else layers
    charge = books.charge(cores, gpus, **{"job": NIL_UUID, "layer": NIL_UUID} | other)
    return SingleFrameBatch(charge, books.host, tokens, jobs, layers)


async def book(books, *batch, force=False):
    return [plain(outcome) for outcome in await books.ledger.book(books.show, batch, force=force)]


async def capped(books, level, cores):
    """A job and its layer, one of which gets a cap."""
    job, layer = uuid4(), uuid4()
    await books.database.run(MAKE_JOB, job, books.show)
    await books.database.run(MAKE_LAYER, layer, job, books.show)
    await books.database.run(LIMITS[level], books.show, job if level is Level.JOB else layer, cores, None)
    await books.told()
    return job, layer


async def counted(books, *jobs):
    counters = await books.ledger.counters(books.show)
    return [counters.get((Level.JOB, job), Usage()).cores for job in jobs]


class SwarmSuite:
    async def test_a_swarm_counts_at_every_level_and_each_of_its_frames_has_a_row(self, books):
        jobs = [uuid4() for _ in range(3)]
        [outcome] = await book(books, swarm(books, [10, 300, 11], 150, 2, jobs=jobs))
        assert outcome == outcome_of(booked=[10, 300, 11])
        assert await books.tokens() == [10, 11, 300]
        found = await books.counted()
        assert [found[level] for level in SHARED] == [Usage(450, 6)] * 3
        assert await counted(books, *jobs) == [150, 150, 150]
        assert await books.agree() == 450

    @pytest.mark.parametrize("level", SHARED)
    @pytest.mark.parametrize("resource", Resource)
    async def test_the_first_frames_of_a_swarm_are_booked_and_the_rest_refused(self, books, level, resource):
        cores = resource is Resource.CORES
        await books.limit(level, **{"cores": 200} if cores else {"gpus": 2})
        [outcome] = await book(books, swarm(books, [9, 4, 5, 1], 100, 1))
        limit, asked = (200, 100) if cores else (2, 1)
        assert outcome == outcome_of([9, 4], (), [5, 1], {}, Refusal(level, resource, limit, limit, asked))
        assert await books.tokens() == [4, 9]
        assert await books.agree() == 200

    async def test_a_swarm_booked_again_changes_nothing(self, books):
        asked = swarm(books, [3, 1, 2])
        await book(books, asked)
        [again] = await book(books, asked)
        assert (sorted(again.already), again.booked, again.refused, again.declined) == ([1, 2, 3], [], [], {})
        assert await books.agree() == 300

    async def test_a_swarm_that_is_partly_there_books_the_first_of_the_rest(self, books):
        await books.limit(Level.FOLDER, cores=400)
        asked = swarm(books, range(6))
        await book(books, asked.subset([4, 1]))
        [outcome] = await book(books, asked)
        refusal = Refusal(Level.FOLDER, Resource.CORES, 400, 400, 100)
        assert outcome == outcome_of([0, 2], [1, 4], [3, 5], {}, refusal)
        assert await books.agree() == 400

    async def test_frames_of_a_swarm_that_were_released_stay_so(self, books):
        asked = swarm(books, range(5))
        await book(books, asked)
        await books.ledger.release(books.show, [3, 1])
        [outcome] = await book(books, asked)
        assert outcome == outcome_of(
            already=[0, 2, 4], declined={1: DeclineReason.TOMBSTONED, 3: DeclineReason.TOMBSTONED}
        )
        assert await books.tokens() == [0, 2, 4]
        assert await books.agree() == 300

    async def test_a_token_of_a_swarm_that_is_booked_otherwise_is_declined(self, books):
        asked = swarm(books, range(4))
        await book(books, asked.subset([2]))
        [outcome] = await book(books, swarm(books, range(4)))
        assert outcome == outcome_of(booked=[0, 1, 3], declined={2: DeclineReason.DUPLICATE})
        assert await books.agree() == 400

    @pytest.mark.parametrize("level", [Level.JOB, Level.LAYER])
    async def test_a_cap_that_came_meanwhile_refuses_its_frame_alone(self, books, level):
        job, layer = await capped(books, level, 99)
        jobs, layers = [uuid4(), job, uuid4()], [uuid4(), layer, uuid4()]
        [outcome] = await book(books, swarm(books, range(3), jobs=jobs, layers=layers))
        assert outcome == outcome_of(booked=[0, 2], declined={1: DeclineReason.CAPPED})
        assert await counted(books, *jobs) == [100, 0, 100]
        assert await books.agree() == 200

    @pytest.mark.parametrize("level", [Level.JOB, Level.LAYER])
    async def test_a_cap_that_came_meanwhile_counts_what_fits_below_it(self, books, level):
        job, layer = await capped(books, level, 100)
        jobs, layers = [uuid4(), job], [uuid4(), layer]
        [outcome] = await book(books, swarm(books, range(2), jobs=jobs, layers=layers))
        assert outcome == outcome_of(booked=[0, 1])
        refusal = (await books.book([7], job=job, layer=layer)).refusal
        assert refusal == Refusal(level, Resource.CORES, 100, 100, 100)
        await books.ledger.release(books.show, [0, 1])
        assert (await books.book([7], job=job, layer=layer)).booked == [7]
        assert await books.agree() == 100

    async def test_a_frame_that_its_own_cap_refuses_leaves_its_room_to_the_others(self, books):
        await books.limit(Level.SUBSCRIPTION, cores=200)
        job, layer = await capped(books, Level.JOB, 50)
        [outcome] = await book(
            books, swarm(books, range(4), jobs=[job, *(uuid4() for _ in range(3))], layers=[layer] * 4)
        )
        refusal = Refusal(Level.SUBSCRIPTION, Resource.CORES, 200, 200, 100)
        assert outcome == outcome_of([1, 2], (), [3], {0: DeclineReason.CAPPED}, refusal)
        assert await books.agree() == 200

    async def test_a_swarm_where_nothing_is_set_up_is_not_booked(self, books):
        no_share = Refusal(Level.SUBSCRIPTION, Resource.CORES, 0, 0, 100)
        where = {
            "alloc": outcome_of(refused=[1, 2], refusal=no_share),
            "folder": outcome_of(declined={1: DeclineReason.UNKNOWN_FOLDER, 2: DeclineReason.UNKNOWN_FOLDER}),
            "dept": outcome_of(declined={1: DeclineReason.UNKNOWN_DEPT, 2: DeclineReason.UNKNOWN_DEPT}),
        }
        other = swarm(books, [8])
        for name, expected in where.items():
            outcomes = await book(books, swarm(books, [1, 2], **{name: uuid4()}), other)
            assert outcomes[0] == expected
            assert outcomes[1].all_booked == [8]
        assert await books.agree() == 100

    @pytest.mark.parametrize("repeated", [False, True])
    async def test_groups_and_swarms_of_one_batch_see_each_other_in_order(self, books, repeated):
        await books.limit(Level.SUBSCRIPTION, cores=600)
        before = await books.book([90]) if repeated else None
        batch = [
            books.group(range(2)),
            swarm(books, [5, 7]),
            books.group([90] if repeated else [20]),
            swarm(books, [30, 6]),
            books.group([31]),
        ]
        outcomes = await book(books, *batch)
        refusal = Refusal(Level.SUBSCRIPTION, Resource.CORES, 600, 600, 100)
        assert [outcome.all_booked for outcome in outcomes] == [[0, 1], [5, 7], [90] if before else [20], [30], []]
        assert [(outcome.refused, outcome.refusal) for outcome in outcomes[3:]] == [([6], refusal), ([31], refusal)]
        assert await books.agree() == 600

    async def test_force_asks_no_limit_for_a_swarm(self, books):
        await books.limit(Level.SUBSCRIPTION, cores=0)
        job, layer = await capped(books, Level.JOB, 50)
        asked = swarm(books, [1, 2], jobs=[job, uuid4()], layers=[layer, uuid4()])
        [outcome] = await book(books, asked, force=True)
        assert outcome == outcome_of(booked=[1, 2])
        assert await books.agree() == 200

    async def test_a_swarm_may_hold_several_frames_of_one_job(self, books):
        await books.limit(Level.JOB, cores=200)
        asked = swarm(books, range(4), jobs=[books.job] * 4, layers=[books.layer] * 4)
        [outcome] = await book(books, asked)
        assert outcome == outcome_of(booked=[0, 1], declined={2: DeclineReason.CAPPED, 3: DeclineReason.CAPPED})
        assert await books.counted() == everywhere(200)

    async def test_a_full_batch_of_scattered_tokens_is_booked_repeated_and_released(self, books):
        asked = swarm(books, [131 * number for number in range(4096)], cores=1)
        [outcome] = await book(books, asked)
        assert len(outcome.booked) == 4096
        [again] = await book(books, asked)
        assert len(again.already) == 4096
        released = await books.ledger.release(books.show, asked.tokens)
        assert len(released) == 4096
        assert await books.agree() == 0

    async def test_an_empty_swarm_is_nothing(self, books):
        outcomes = await book(books, swarm(books, []), swarm(books, [4]))
        assert outcomes == [outcome_of(), outcome_of(booked=[4])]

    @pytest.mark.parametrize(("jobs", "layers"), [(2, 3), (3, 2), (4, 3)])
    async def test_columns_of_different_lengths_are_refused_with_nothing_written(self, books, jobs, layers):
        columns = {"jobs": [uuid4() for _ in range(jobs)], "layers": [uuid4() for _ in range(layers)]}
        with pytest.raises(InvalidInput, match="a job and a layer for each"):
            await book(books, swarm(books, range(3), **columns))
        assert await books.tokens() == []
