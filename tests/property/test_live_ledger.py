"""A state machine over both ledgers, on real servers, against a plain model.

Bookings in batches, releases, every kind of limit, changes of management, an emptied Redis, reconciliations, reseeds,
bookers that crash and releases that are not published, in any order, by two services with Redis and one without. After
every step outcomes, counters and rows equal the model; so no cap is ever exceeded (A1), and Redis counts correctly
(A2, A3, A5). The model knows groups only: a single-frame batch must equal its frames as groups.
"""

import asyncio
from contextlib import suppress
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rota.accounting import allocations
from rota.accounting.ledger import NIL_UUID, BookingGroup, DeclineReason, SingleFrameBatch, expand_single_frames
from rota.accounting.live.ledger import BookedReply
from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.infra.postgres import Database, PostgresTarget
from rota.model.errors import InvalidInput, Refused
from rota.model.quota import Level, Limit, Usage
from tests.contract.ledger_suite import EMPTY, plain, sql
from tests.integration.accounting.accounting_support import ShowQuota
from tests.property.accounting_model import Model
from tests.support.harness.effort import effort
from tests.support.harness.fixtures import redis_async
from tests.support.single_frame_batches import with_single_frame_batches

CLEAR = [sql(statement) for statement in EMPTY.split("; ")]
SUBMIT = sql("INSERT INTO rota.job_resource (pk_job, pk_show, int_max_cores, int_max_gpus) VALUES ($1, $2, 350, 3)")
NEVER_S = 1e9


TOKENS = st.builds(lambda at, skip: at + skip, st.sampled_from([0, 8, 122, 2**53 - 30]), st.integers(0, 9))
RUN = st.tuples(TOKENS, st.integers(1, 9), st.sampled_from([1, 1, 1, -1, 2]))
KEYS = st.tuples(*[st.integers(0, 1)] * 2, st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
ASK = st.sampled_from([(100, 0), (50, 1), (250, 2), (0, 1), (33, 0), (1, 0)])
GROUP = st.tuples(KEYS, ASK, RUN, st.booleans(), st.sampled_from([0, 0, 0, 1]))
OWNERS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=9)
SINGLE_FRAMES = st.tuples(GROUP, OWNERS)
CORES = st.sampled_from([None, -1, 0, "0.5", 1, "2.33", 5, 9])
GPUS = st.sampled_from([None, -1, 0, 1, 3, 6])
BY = st.sampled_from(["one", "two", "silent"])
WHO = st.sampled_from(["one", "two"])
FORCE = st.sampled_from([False] * 5 + [True])


class Machine(RuleBasedStateMachine):
    environment = None
    """The runner of the event loop, the database and the Redis of this test."""

    def __init__(self):
        super().__init__()
        self.runner, self.database, self.redis = self.environment

    def run(self, work):
        return self.runner.run(work)

    @initialize(burst=st.sampled_from([3, 6, 9]))
    def make(self, burst):
        self.run(self._make(burst))

    async def _make(self, burst):
        for statement in CLEAR:
            await self.database.run(statement)
        await self.redis.flushdb()
        self.farm = farm = await ShowQuota(AccountingService(self.database, self.redis)).make(burst=burst)
        pool = (await farm.change("create_pool", "other")).after.id
        await farm.change("create_subscription", "duck", "other", size=1, burst=burst)
        folder = (await farm.change("create_folder", "duck", "assets")).after.id
        dept = (await farm.change("create_dept", "sims")).after.id
        self.services = {
            "one": farm.accounting,
            "two": AccountingService(self.database, self.redis, remember_s=NEVER_S),
        }
        self.silent = AccountingService(self.database, None, remember_s=NEVER_S)
        self.pools, self.folders, self.depts = (farm.pool, pool), (farm.folder, folder), (farm.dept, dept)
        self.names = {pool: "other", farm.pool: "duck-main", folder: "assets", farm.folder: "shots"}
        self.names |= {dept: "sims", farm.dept: "duck-fx"}
        self.jobs = [UUID(int=farm.job.int ^ number) for number in range(3)]
        self.hosts = [farm.host, UUID(int=farm.host.int ^ 1)]
        self.maintenance = farm.maintenance()
        self.model = Model()
        self.model.limits = {(Level.SUBSCRIPTION, each): Limit(100 * burst, -1) for each in self.pools}
        self.least = {}
        # A job submitted with caps: its row exists before any booking.
        await self.database.run(SUBMIT, self.jobs[2], farm.show)
        self.model.limits[Level.JOB, self.jobs[2]] = Limit(350, 3)

    def groups(self, drawn):
        """Drawn groups, each token once."""
        seen, groups = set(), []
        for (pool, folder, job, layer, dept), (cores, gpus), (first, number, step), capped, host in drawn:
            tokens = (
                range(first, first + number)[:: 1 if step > 0 else -1]
                if abs(step) == 1
                else range(first, first + number)[::2]
            )
            tokens = [token for token in tokens if token not in seen]
            seen |= set(tokens)
            charge = self.farm.charge(
                cores,
                gpus,
                alloc=self.pools[pool],
                folder=self.folders[folder],
                job=self.jobs[job],
                layer=self.layer(job, layer),
                dept=self.depts[dept],
            )
            groups.append(BookingGroup(charge, self.hosts[host], tokens, capped or job == 2))
        return groups

    def batch(self, drawn):
        """Drawn groups; those drawn with owners become single-frame batches with tokens of alternating owners."""
        groups = self.groups([each if len(each) > 2 else each[0] for each in drawn])
        return [
            group if len(each) > 2 else self.single_frames(group, each[1])
            for group, each in zip(groups, drawn, strict=True)
        ]

    def single_frames(self, group, owners):
        token_owners = [owners[at % len(owners)] for at in range(len(group.tokens))]
        jobs, layers = [self.jobs[job] for job, _ in token_owners], [self.layer(*owner) for owner in token_owners]
        charge = msgspec.structs.replace(group.charge, job=NIL_UUID, layer=NIL_UUID)
        return SingleFrameBatch(charge, group.host, group.tokens, jobs, layers)

    def layer(self, job, layer):
        return UUID(int=self.jobs[job].int ^ (16 << layer))

    @rule(drawn=st.lists(GROUP, min_size=1, max_size=4), force=FORCE, who=WHO)
    def book(self, drawn, force, who):
        unavailable = None if self.model.seeded or not self.model.managed else DeclineReason.UNSEEDED
        self._book(self.services[who], self.groups(drawn), force=force, unavailable=unavailable)

    @rule(drawn=st.lists(SINGLE_FRAMES | SINGLE_FRAMES | GROUP, min_size=1, max_size=4), force=FORCE, who=WHO)
    def book_single_frames(self, drawn, force, who):
        unavailable = None if self.model.seeded or not self.model.managed else DeclineReason.UNSEEDED
        self._book(self.services[who], self.batch(drawn), force=force, unavailable=unavailable)

    @rule(who=WHO)
    def repeat(self, who):
        groups = [BookingGroup(charge, host, [token]) for token, (charge, host) in self.model.booked.items()]
        self._book(
            self.services[who],
            groups,
            unavailable=None if self.model.seeded else DeclineReason.UNSEEDED if self.model.managed else None,
        )

    @rule(drawn=st.lists(SINGLE_FRAMES | GROUP, min_size=1, max_size=2))
    def book_without_redis(self, drawn):
        self._book(self.silent, self.batch(drawn), unavailable=DeclineReason.REDIS_OFF if self.model.managed else None)

    def _book(self, service, groups, *, force=False, unavailable=None):
        postgres_first = not self.run(service.is_managed(self.farm.show))
        outcomes = [plain(each) for each in self.run(service.book(self.farm.show, groups, force=force))]
        expected = iter(
            self.model.book(
                expand_single_frames(groups),
                self.fence(),
                force=force,
                unavailable=unavailable,
                postgres_first=postgres_first,
            )
        )
        for group, outcome in zip(groups, outcomes, strict=True):
            if isinstance(group, SingleFrameBatch):
                check_single_frames(outcome, [next(expected) for _ in group.tokens])
            else:
                check_group(outcome, *next(expected))

    @precondition(lambda self: self.model.live)
    @rule(drawn=GROUP)
    def crash_before_insert_of_a_group(self, drawn):
        [group] = self.groups([drawn])
        self.run(self.farm.live._book(self.farm.show, [group], "limits"))
        refused, _, _ = self.model.decide(group, False, self.model.counters())
        left = [token for token in group.tokens if token not in refused and token not in self.model.tokens]
        self.model.orphans |= dict.fromkeys(left, (group.charge, self.fence()))

    @precondition(lambda self: self.model.live)
    @rule(drawn=SINGLE_FRAMES)
    def crash_before_insert_of_single_frames(self, drawn):
        [batch] = self.batch([drawn])
        counters, left = self.model.counters(), []
        for group in batch.groups():
            refused, otherwise, _ = self.model.decide(group, False, counters)
            left += [token for token in group.tokens if token not in refused and token not in otherwise]
        if isinstance(self.run(self.farm.live._book(self.farm.show, [batch], "limits")), BookedReply):
            self.model.orphans |= {each.tokens[0]: (each.charge, self.fence()) for each in batch.subset(left).groups()}

    @rule(tokens=st.lists(RUN, min_size=1, max_size=3), who=BY)
    def release(self, tokens, who):
        tokens = [first + at for first, number, _ in tokens for at in range(number)]
        self._release(tokens, who)

    @rule(tokens=st.lists(RUN, min_size=1, max_size=3), who=BY)
    def release_single_frames(self, tokens, who):
        tokens = [first + at for first, number, _ in tokens for at in range(number)]
        deleted = self.run(allocations.delete(self.database, self.farm.show, tokens))
        self.run(self.who(who).publisher.publish(self.farm.show, with_single_frame_batches(deleted)))
        self._released(deleted.released, tokens, who)

    @rule(who=BY)
    def release_everything(self, who):
        self._release(sorted(self.model.booked), who)

    def _release(self, tokens, who):
        self._released(self.run(self.who(who).release(self.farm.show, tokens)), tokens, who)

    def who(self, name):
        return self.silent if name == "silent" else self.services[name]

    def _released(self, released, tokens, who):
        charges = {token: each.charge for each in released for token in each.tokens}
        assert charges == self.model.release(tokens, self.fence(), published=who != "silent")

    def fence(self):
        return self.run(self.farm.fence())

    def change(self, who, action, *args, **more):
        return self.run(self.services[who].change(lambda admin: getattr(admin, action)(*args, actor="ann", **more)))

    @rule(pool=st.integers(0, 1), burst=st.sampled_from([0, "0.5", 2, 5, 9]), gpus=GPUS, who=WHO)
    def change_burst(self, pool, burst, gpus, who):
        key = (Level.SUBSCRIPTION, self.pools[pool])
        if key not in self.model.limits:
            return
        self.change(who, "change_subscription", "duck", self.names[key[1]], burst=burst, gpu_burst=gpus)
        old = self.model.limits[key]
        self.model.limits[key] = Limit(hundredths(burst), old.gpus if gpus is None else gpus)

    @rule(who=WHO)
    def remove_or_create_the_other_subscription(self, who):
        key = (Level.SUBSCRIPTION, self.pools[1])
        if key not in self.model.limits:
            self.change(who, "create_subscription", "duck", "other", size=1, burst=4, gpu_burst=2)
            self.model.limits[key] = Limit(400, 2)
        elif any(charge.alloc == key[1] for charge, _ in self.model.booked.values()):
            with pytest.raises(Refused):
                self.change(who, "delete_subscription", "duck", "other")
        else:
            self.change(who, "delete_subscription", "duck", "other")
            del self.model.limits[key]

    @rule(
        level=st.sampled_from([Level.FOLDER, Level.POINT]),
        at=st.integers(0, 1),
        cores=CORES,
        gpus=GPUS,
        least=st.sampled_from([None, None, 0, 1]),
        who=WHO,
    )
    def cap_folder_or_point(self, level, at, cores, gpus, least, who):
        thing = (self.folders if level is Level.FOLDER else self.depts)[at]
        if thing == self.depts[1] and thing not in self.least:
            with suppress(InvalidInput):  # a booking may have created it
                self.change(who, "create_point", "duck", self.names[thing])
            self.least[thing] = 0
        new, low = self.changed((level, thing), cores, gpus), self.least.get(thing, 0) if least is None else 100 * least
        action = "change_folder" if level is Level.FOLDER else "change_point"
        arguments = ("duck", self.names[thing], CapsUpdate(min_cores=least, max_cores=cores, max_gpus=gpus))
        if 0 < new.cores < low:
            with pytest.raises(InvalidInput):
                self.change(who, action, *arguments)
            return
        self.change(who, action, *arguments)
        self.model.limits[level, thing], self.least[thing] = new, low

    @rule(
        level=st.sampled_from([Level.JOB, Level.LAYER]),
        job=st.integers(0, 2),
        layer=st.integers(0, 1),
        cores=CORES,
        gpus=GPUS,
        who=WHO,
    )
    def cap_job_or_layer(self, level, job, layer, cores, gpus, who):
        thing = self.jobs[job] if level is Level.JOB else self.layer(job, layer)
        running = any(charge.key(level) == thing for charge, _ in self.model.booked.values())
        try:
            self.change(who, f"change_{level}", "duck", thing, max_cores=cores, max_gpus=gpus)
        except InvalidInput:
            old = self.model.limits.get((level, thing), Limit(-1, -1))
            assert not running
            assert max(old.cores, old.gpus) <= 0
            return
        self.model.limits[level, thing] = self.changed((level, thing), cores, gpus)

    def changed(self, key, cores, gpus):
        old = self.model.limits.get(key, Limit(-1, -1))
        return Limit(old.cores if cores is None else hundredths(cores), old.gpus if gpus is None else gpus)

    @rule(managed=st.booleans(), who=WHO)
    def set_managed(self, managed, who):
        was = self.model.live
        self.change(who, "set_managed", "duck", managed)
        self.model.managed = self.model.seeded = managed
        if not was or not managed:
            self.model.clear_orphans()

    @precondition(lambda self: self.model.managed)
    @rule()
    def empty_redis(self):
        self.run(self.redis.flushdb())
        self.model.seeded = False
        self.model.clear_orphans()

    @rule()
    def seed_lagging_shows(self):
        self.run(self.maintenance.seed_lagging_shows())
        self.model.seeded = self.model.managed

    @rule()
    def reconcile(self):
        found = self.run(self.farm.reconcile())
        if not self.model.live:
            assert found is None
            return
        tokens = len(self.model.tokens)
        assert (found.tokens, found.adopted, found.drifted) == (tokens, 0, {})
        assert (found.released, found.buried) == self.model.reconcile(self.fence())

    @rule()
    def reseed(self):
        assert self.run(self.farm.live.sync_limits(self.farm.show)) == self.model.live
        self.run(self.maintenance.reseed_limits())

    @rule()
    def write_tables(self):
        ledger = self.farm.accounting.transactional
        if self.model.managed:
            self.run(ledger.refresh_managed_tables(self.farm.show))
            assert self.run(ledger.refresh_managed_tables(self.farm.show)) == {}
        else:
            assert self.run(ledger.recompute(self.farm.show)) == {}

    @rule()
    def prune_tombstones(self):
        self.run(self.maintenance.prune_tombstones())

    @invariant()
    def ledger_matches_model(self):
        self.model.prune(self.fence())  # a tombstone has no effect under a higher fence
        self.run(self._check())

    async def _check(self):
        ledger = self.farm.live if self.model.managed else self.farm.accounting.transactional
        counters = await ledger.counters(self.farm.show)
        assert not self.model.managed or self.model.seeded or not counters
        if self.model.live or not self.model.managed:
            assert {key: usage for key, usage in counters.items() if usage != Usage()} == self.model.counters()
        rows = await allocations.page(self.database, self.farm.show)
        assert {row.token: (row.charge, row.host) for row in rows} == self.model.booked

    def teardown(self):
        if hasattr(self, "model"):
            self.seed_lagging_shows()
            self.release_everything("one")
            self.reconcile()
            self.ledger_matches_model()
            assert self.run(self.farm.audit()).ok


def check_group(outcome, booked, already, refused, declined, refusal):
    assert (outcome.booked, sorted(outcome.already), outcome.refused) == (booked, sorted(already), refused)
    assert (outcome.declined, outcome.refusal) == (declined, refusal)


def check_single_frames(outcome, singles):
    """Equals the outcomes of its frames as groups, except that frames refused by their own caps are declined."""
    refused, declined, refusals = [], {}, {None}
    for _, _, tokens, why, refusal in singles:
        declined |= why
        if refusal is not None and refusal.table in (Level.JOB, Level.LAYER):
            declined |= dict.fromkeys(tokens, DeclineReason.CAPPED)
        elif refusal is not None:
            refused += tokens
            refusals = {refusal} if None in refusals else refusals | {refusal}
    assert sorted(outcome.booked) == sorted(token for each in singles for token in each[0])
    assert sorted(outcome.already) == sorted(token for each in singles for token in each[1])
    assert (sorted(outcome.refused), outcome.declined) == (sorted(refused), declined)
    assert outcome.refusal in refusals


def hundredths(cores):
    return -1 if cores == -1 else round(float(cores) * 100)


@pytest.fixture
def machine(database_url, redis_url):
    with asyncio.Runner() as runner:
        database = runner.run(Database.open(PostgresTarget(url=database_url)))
        redis = redis_async(redis_url)
        Machine.environment = runner, database, redis
        yield Machine
        runner.run(redis.aclose())
        runner.run(database.close())


QUICK = settings(
    max_examples=effort(15, 40),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking against real servers takes longer than reading the failure.
    phases=[phase for phase in Phase if phase is not Phase.shrink],
)


@pytest.mark.timeout(300)
def test_ledgers_match_the_model(machine):
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.soak
def test_ledgers_match_the_model_in_a_long_run(machine):
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=300, stateful_step_count=50))
