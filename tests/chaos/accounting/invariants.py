"""The ledger invariants A1 to A6, checked after every step of a schedule and at rest."""

from collections import defaultdict

from rota.accounting.ledger import DeclineReason, expand_single_frames
from rota.infra.redis.keys import RedisKeys
from rota.model.quota import RESOURCES
from rota.model.units import format_cores, parse_cores, parse_cores_limit
from tests.chaos.accounting.observed import names_of, text_of

ENDED = 2**53
SHARED = ("sub:", "folder:", "point:")
CAPS = {"sub": ("burst", "gpu_burst")}
NO_CAPS = ("int_max_cores", "int_max_gpus")


class InvariantViolated(AssertionError):
    """An invariant did not hold."""


def require(holds, rule, *facts):
    if not holds:
        raise InvariantViolated(f"{rule}: {', '.join(map(str, facts))}")


class InvariantChecker:
    def __init__(self, observer, rng, *, repeat=0.15):
        self.observer = observer
        self.rng = rng
        self.repeat = repeat
        self.postgres = self.redis = None
        self.ever = set()
        """Tokens that have or had a row."""
        self.claimed = set()
        self.booked = set()
        """(token, charge, fence) seen in a seeded Redis."""
        self.charged = defaultdict(set)
        """Token -> every charge seen with it, in either store."""

    async def begin(self):
        self.postgres, self.redis = await self.observer.postgres(), await self.observer.redis()
        self._remember()

    async def check(self, store=None, *, external=False):
        """Check after a step in `store`, or in both. `external`: an injected fault made the change, not a process."""
        before, found_before = self.postgres, self.redis
        if store != "redis":
            self.postgres = await self.observer.postgres()
        if store != "postgres":
            self.redis = await self.observer.redis()
        if not external:
            self._no_booking_while_unseeded(found_before)
        self._remember()
        require(self.claimed <= self.ever, "reported as booked without a row", self.claimed - self.ever)
        self._no_cap_exceeded(before)
        self._rows_were_booked(before)
        self._usage_tables_match()
        self._series_are_charged()
        if self.redis.fence is not None:
            self._text_is_exact()
            self._counters_match_tokens()
            require(self.redis.fence <= self.postgres.fence, "fence", self.redis.fence, self.postgres.fence)
            if self.postgres.managed and self.redis.fence == self.postgres.fence:
                self._redis_covers_rows()
                self._caps_match_the_fence()

    async def repeated(self, command):
        """A5: repeating a script call changes nothing but `acct:seq`."""
        if command is None or self.rng.random() > self.repeat:
            return
        before = self.redis.keys_without_seq()
        await self.observer.client.execute_command(*command)
        after = (await self.observer.redis()).keys_without_seq()
        changed = {
            key: (before.get(key), after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key)
        }
        require(not changed, "A5 a repeated call changed something", changed)

    def check_outcomes(self, groups, outcomes):
        """Booking results are true: a booked token has or had a row (checked after the step), and a duplicate was seen
        with another charge."""
        self.claimed |= {token for outcome in outcomes for token in outcome.all_booked}
        for group, outcome in zip(groups, outcomes, strict=True):
            double = [token for token in group.tokens if outcome.declined.get(token) is DeclineReason.DUPLICATE]
            for each in expand_single_frames([group.subset(double)]) if double else ():
                for token in each.tokens:
                    others = self.charged[token] - {text_of(each.charge)}
                    require(others, "reported as a duplicate without another charge", token, self.charged[token])

    def _remember(self):
        self.ever |= self.postgres.rows.keys()
        for token, charge in [*self.postgres.rows.items(), *self.redis.held.items()]:
            self.charged[token].add(charge)
        if self.redis.fence is not None:
            self.booked |= {(token, charge, self.redis.fence) for token, charge in self.redis.held.items()}

    def _no_cap_exceeded(self, before):
        """A1. Only added rows count, because a cap may be lowered below usage. Steps that waited for each other end
        together: then the higher of the old and new cap applies, and the fence shows which came last."""
        for token in self.postgres.late:
            under = self.postgres.fences[token]
            require(under == self.postgres.fence, "A1 inserted with an old fence", token, under, self.postgres.fence)
        added = self.postgres.rows.keys() - before.rows.keys()
        touched = {name for token in added for name in names_of(self.postgres.rows[token])}
        for name in touched:
            for resource in RESOURCES:
                caps = [self.postgres.cap(name, resource), before.cap(name, resource)]
                used = self.postgres.sums[name, resource]
                asked = any(_charges(self.postgres.rows[token], name, resource) for token in added)
                require(
                    not asked or None in caps or used <= max(caps), "A1 cap exceeded", name, resource, used, caps, added
                )

    def _rows_were_booked(self, before):
        """A4: a row of a managed show was booked in a seeded Redis with the fence of the row."""
        if self.postgres.managed and before.managed:
            for token in self.postgres.rows.keys() - before.rows.keys():
                row = (token, self.postgres.rows[token], self.postgres.fences[token])
                require(row in self.booked, "A4 never booked in a seeded Redis", row)

    def _no_booking_while_unseeded(self, before):
        if before.fence is None and before.seeding is None:
            require(not self.redis.tokens.keys() - before.tokens.keys(), "A4 booked in an unseeded Redis")

    def _series_are_charged(self):
        """Each frame that may run has a charge: its own, or that of its carrier; and no charge outlives its series."""
        followers = self.postgres.followers
        spans = [range(first, carrier) for first, carrier, _ in self.postgres.series]
        bare = [token for token in followers if not any(token in span for span in spans)]
        require(not bare, "series: frames without a charge", bare)
        for first, carrier, ended in self.postgres.series:
            left = [token for token in followers if first <= token < carrier]
            require(left or not ended, "series: the charge outlives its frames", first, carrier)

    def _usage_tables_match(self):
        if not self.postgres.managed:
            require(
                self.postgres.counted == self.postgres.sums,
                "A3 tables of an unmanaged show",
                self.postgres.counted,
                self.postgres.sums,
            )

    def _text_is_exact(self):
        """A6: cores have exactly two decimals at most and GPUs are whole numbers."""
        for name, fields in self.redis.hashes.items():
            cores, gpus = fields.get("int_cores", "0"), fields.get("int_gpus", "0")
            require(format_cores(parse_cores(cores)) == cores, "A6 cores", name, cores)
            require(gpus.isdigit(), "A6 GPUs", name, gpus)

    def _counters_match_tokens(self):
        """Counters, charges and buckets always match the tokens, because one script changes all of them."""
        redis = self.redis
        require(
            redis.by_holders == {number: tokens for number, (tokens, _) in redis.charges.items()},
            "charges and tokens",
            redis.by_holders,
            redis.charges,
        )
        listed = {int(each) for each in redis.keys.get(f"acct:buckets:{redis.show}", [])}
        require(listed == redis.buckets, "buckets and tokens", listed, redis.buckets)
        for name in self._counted_names():
            for resource in RESOURCES:
                held, counted = redis.sums[name, resource], self.counter(name, resource)
                require(counted == held, "counter and tokens", name, resource, counted, held)

    def _counted_names(self):
        """Names with counters in Redis: shared levels, and capped jobs and layers once counted."""
        settled = "uncounted" not in self.redis.state
        names = {name for name, _ in self.redis.sums} | self.redis.hashes.keys()
        for name in names:
            fields = self.redis.hashes.get(name, {})
            if name.startswith(SHARED) or (settled and "int_max_cores" in fields):
                yield name

    def _redis_covers_rows(self):
        """A2, for every token and for every counter that a cap may use."""
        for token, charge in self.postgres.rows.items():
            require(self.redis.held.get(token) == charge, "A2 a row without its token", token, charge)
        for (name, resource), used in self.postgres.sums.items():
            if name.startswith(SHARED) or self.limit(name, resource) is not None:
                counted = self.counter(name, resource)
                require(counted >= used, "A2 Redis counts less than procs", name, resource, counted, used)

    def _caps_match_the_fence(self):
        """With a current fence, Redis has every cap of PostgreSQL, and none is higher."""
        for name in {*self.redis.hashes, *self.postgres.limits}:
            level = name.partition(":")[0]
            for resource in RESOURCES:
                expected, actual = self.postgres.cap(name, resource), self.limit(name, resource)
                if expected is None or (level in ("sub", "folder", "point") and not self._has_caps(name)):
                    continue
                require(
                    actual is not None and actual <= expected, "cap under the fence", name, resource, actual, expected
                )

    def _has_caps(self, name):
        level = name.partition(":")[0]
        return CAPS.get(level, NO_CAPS)[0] in self.redis.hashes.get(name, {})

    def limit(self, name, resource):
        """The cap in Redis, or None."""
        level = name.partition(":")[0]
        cores, gpus = CAPS.get(level, NO_CAPS)
        text = self.redis.hashes.get(name, {}).get(cores if resource == "cores" else gpus)
        if text is None:
            return None
        found = parse_cores_limit(text) if resource == "cores" else int(text)
        if level == "sub":
            return found if found >= 0 else None
        return found if found > 0 else None

    def counter(self, name, resource):
        text = self.redis.hashes.get(name, {}).get(f"int_{resource}", "0")
        return parse_cores(text) if resource == "cores" else int(text)

    async def at_rest(self):
        """A3: all processes have ended and one reconciliation was made."""
        await self.check()
        postgres, redis = self.postgres, self.redis
        if not postgres.managed:
            left = [key for key in redis.keys if key != "acct:seq"]
            require(not left, "A3 an unmanaged show in Redis", left)
            return
        require(redis.fence == postgres.fence, "A3 fence", redis.fence, postgres.fence)
        require(redis.held == postgres.rows, "A3 tokens and rows", redis.held, postgres.rows)
        for name in {*redis.hashes, *(name for name, _ in postgres.sums)}:
            if name.startswith(SHARED) or name in redis.hashes:
                for resource in RESOURCES:
                    counted, used = self.counter(name, resource), postgres.sums[name, resource]
                    require(counted == used, "A3 counter", name, resource, counted, used)
        in_tables = {key: used for key, used in postgres.sums.items() if key[0] in postgres.limits}
        require(postgres.counted == in_tables, "A3 tables", postgres.counted, in_tables)
        markers = {"recount", "recounted", "seeding", "uncounted"} & redis.state.keys()
        require(not markers, "A3 markers left", markers)
        require(RedisKeys().show_keys(redis.show).shadow not in redis.keys, "A3 shadow counters left")


def _charges(charge, name, resource):
    cores, gpus = charge.split(" ")[5:]
    return name in names_of(charge) and int(cores if resource == "cores" else gpus) > 0
