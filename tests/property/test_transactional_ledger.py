"""Random batches on the transactional ledger against `rota.model.quota` and a dictionary of bookings."""

from uuid import UUID

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.accounting.ledger import BookingGroup, Charge
from rota.accounting.transactional import TransactionalLedger
from rota.model.quota import LEVELS, Level, LevelStatus, Limit, Usage, fits
from tests.contract.ledger_suite import EMPTY, LIMITS, Books, plain, sql
from tests.support.harness.effort import effort

FENCE = sql("SELECT int_fence FROM rota.show WHERE pk_show = $1")


CLEAR = [sql(statement) for statement in EMPTY.split("; ")]
TABLES = {
    Level.SUBSCRIPTION: "subscription",
    Level.FOLDER: "folder_resource",
    Level.JOB: "job_resource",
    Level.LAYER: "layer_resource",
    Level.POINT: "point",
}
FIRST_OR_OTHER = st.integers(0, 1)
CAP = st.sampled_from([None, -1, 0, 1, 150, 300, 700, 1000])
BURST = st.sampled_from([0, 100, 450, 800, 1200])
LIMIT_CHANGE = st.tuples(st.just("limit"), st.sampled_from(LEVELS[1:]), CAP, CAP)
BURST_CHANGE = st.tuples(st.just("limit"), st.just(Level.SUBSCRIPTION), BURST, st.sampled_from([None, -1, 0, 4]))
GROUP = st.tuples(
    st.tuples(FIRST_OR_OTHER, FIRST_OR_OTHER, FIRST_OR_OTHER),
    st.sampled_from([(100, 0), (50, 1), (250, 2), (0, 1), (33, 0)]),
    st.integers(0, 40),
    st.integers(1, 6),
)
BOOK = st.tuples(st.just("book"), st.lists(GROUP, min_size=1, max_size=4), st.booleans())
RELEASE = st.tuples(st.just("release"), st.lists(st.integers(0, 46), max_size=12))
REPEAT = st.tuples(st.just("repeat"))
STEPS = st.lists(st.one_of(BOOK, BOOK, RELEASE, LIMIT_CHANGE, BURST_CHANGE, REPEAT), min_size=1, max_size=8)


class Model:
    """Expected answers of the ledger, from a dictionary of charges by token."""

    def __init__(self, account, pool):
        self.pools = (account.pool, pool)
        self.limits = {(Level.SUBSCRIPTION, key): Limit(800, -1) for key in self.pools}
        self.booked = {}
        self.released = set()

    def counters(self):
        counters = {}
        for charge in self.booked.values():
            for level in LEVELS:
                key = (level, charge.key(level))
                counters[key] = counters.get(key, Usage()).plus(charge.ask)
        return counters

    def book(self, group, *, force):
        """(booked, already, refused, declined, refusal) of one group."""
        there = {token: self.booked[token] == group.charge for token in group.tokens if token in self.booked}
        tombstoned = [token for token in group.tokens if token in self.released]
        wanted = [token for token in group.tokens if token not in there and token not in self.released]
        counters = self.counters()
        keys = {level: (level, group.charge.key(level)) for level in LEVELS}
        held = {
            level: LevelStatus(self.limits.get(key, Limit()), counters.get(key, Usage())) for level, key in keys.items()
        }
        fit = fits(held, group.charge.ask, len(wanted))
        count = len(wanted) if force else fit.count
        self.booked |= dict.fromkeys(wanted[:count], group.charge)
        return (
            wanted[:count],
            [token for token, same in there.items() if same],
            wanted[count:],
            {token: "duplicate" for token, same in there.items() if not same} | dict.fromkeys(tombstoned, "tombstoned"),
            None if force else fit.refusal,
        )


def unique_tokens(groups):
    """Drawn groups, each token once."""
    seen = set()
    for keys, ask, first, number in groups:
        tokens = [token for token in range(first, first + number) if token not in seen]
        seen |= set(tokens)
        yield keys, ask, tokens


async def apply(step, account, model):
    match step:
        case ("limit", level, cores, gpus):
            key = account.charge().key(level)
            old = model.limits.get((level, key), Limit(-1, -1))
            new = Limit(old.cores if cores is None else cores, old.gpus if gpus is None else gpus)
            model.limits[(level, key)] = new
            fence = await account.database.value(FENCE, account.show)
            await account.database.run(LIMITS[level], account.show, key, cores, gpus)
            if await account.database.value(FENCE, account.show) > fence:  # tombstones have no effect now
                model.released.clear()
        case ("book", drawn, force):
            groups = [
                BookingGroup(charge_of(account, model, keys, *ask), account.host, tokens)
                for keys, ask, tokens in unique_tokens(drawn)
            ]
            await book(account, model, groups, force=force and len(drawn) == 1)
        case ("release", tokens):
            released = await account.ledger.release(account.show, tokens)
            charges = {token: each.charge for each in released for token in each.tokens}
            assert charges == {token: model.booked.pop(token) for token in set(tokens) & set(model.booked)}
            model.released |= set(charges)
        case ("repeat",):
            groups = [BookingGroup(charge, account.host, [token]) for token, charge in model.booked.items()]
            await book(account, model, groups, force=False)


def charge_of(account, model, keys, cores, gpus):
    pool, job, layer = keys
    return Charge(
        model.pools[pool],
        account.folder,
        account.job if job == 0 else UUID(int=account.job.int ^ 1),
        account.layer if layer == 0 else UUID(int=account.layer.int ^ 1),
        account.dept,
        cores,
        gpus,
    )


async def book(account, model, groups, *, force):
    outcomes = [plain(outcome) for outcome in await account.ledger.book(account.show, groups, force=force)]
    for outcome, group in zip(outcomes, groups, strict=True):
        booked, already, refused, declined, refusal = model.book(group, force=force)
        assert (outcome.booked, sorted(outcome.already), outcome.refused) == (booked, sorted(already), refused)
        assert (outcome.declined, outcome.refusal) == (declined, refusal)


@settings(max_examples=effort(25, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
async def test_transactional_ledger_matches_the_model(database, steps):
    for statement in CLEAR:
        await database.run(statement)
    account = await Books(database, TransactionalLedger(database)).make(burst=800)
    model = Model(account, await account.another_pool(burst=800))
    for step in steps:
        await apply(step, account, model)
        counters = await account.ledger.counters(account.show)
        assert counters == model.counters()
    assert await account.tokens() == sorted(model.booked)
    assert await account.ledger.recompute(account.show) == {}
