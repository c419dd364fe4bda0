"""The invariants of the books (DESIGN A1 to A6), looked at after every step of a schedule, and at rest."""

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


class Broken(AssertionError):
    """An invariant did not hold."""


def demand(holds, rule, *facts):
    if not holds:
        raise Broken(f"{rule}: {', '.join(map(str, facts))}")


class Rules:
    def __init__(self, onlooker, rng, *, repeat=0.15):
        self.onlooker = onlooker
        self.rng = rng
        self.repeat = repeat
        self.postgres = self.redis = None
        self.ever = set()
        """Tokens that have, or once had, a row."""
        self.claimed = set()
        self.booked = set()
        """Tokens, charges and fences that were seen in a seeded Redis."""
        self.charged = defaultdict(set)
        """Token -> every charge it was seen with, in either store."""

    async def begin(self):
        self.postgres, self.redis = await self.onlooker.postgres(), await self.onlooker.redis()
        self._remember()

    async def look(self, store=None, *, wind=False):
        """After a step in `store`, or in both. `wind`: it was no process that changed something, but the weather."""
        before, found_before = self.postgres, self.redis
        if store != "redis":
            self.postgres = await self.onlooker.postgres()
        if store != "postgres":
            self.redis = await self.onlooker.redis()
        if not wind:
            self._nothing_booked_unseeded(found_before)
        self._remember()
        demand(self.claimed <= self.ever, "told as booked without a row", self.claimed - self.ever)
        self._never_over_a_cap(before)
        self._only_what_was_booked(before)
        self._tables_of_unmanaged()
        if self.redis.fence is not None:
            self._text_is_exact()
            self._counters_are_what_tokens_hold()
            demand(self.redis.fence <= self.postgres.fence, "fence", self.redis.fence, self.postgres.fence)
            if self.postgres.managed and self.redis.fence == self.postgres.fence:
                self._never_less_than_rows()
                self._caps_belong_to_the_fence()

    async def repeated(self, words):
        """A5: the same script call again changes nothing but `acct:seq`."""
        if words is None or self.rng.random() > self.repeat:
            return
        before = self.redis.but_seq()
        await self.onlooker.client.execute_command(*words)
        after = (await self.onlooker.redis()).but_seq()
        changed = {
            key: (before.get(key), after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key)
        }
        demand(not changed, "A5 a repeated call changed something", changed)

    def told(self, groups, outcomes):
        """What a booker was told is true: what is booked has, or had, a row. Looked at when its step is over. And what
        was booked otherwise was seen so."""
        self.claimed |= {token for outcome in outcomes for token in outcome.all_booked}
        for group, outcome in zip(groups, outcomes, strict=True):
            double = [token for token, why in outcome.declined.items() if why is DeclineReason.DUPLICATE]
            for each in expand_single_frames([group.subset(double)]) if double else ():
                for token in each.tokens:
                    others = self.charged[token] - {text_of(each.charge)}
                    demand(others, "told as booked otherwise", token, self.charged[token])

    def _remember(self):
        self.ever |= self.postgres.rows.keys()
        for token, charge in [*self.postgres.rows.items(), *self.redis.held.items()]:
            self.charged[token].add(charge)
        if self.redis.fence is not None:
            self.booked |= {(token, charge, self.redis.fence) for token, charge in self.redis.held.items()}

    def _never_over_a_cap(self, before):
        """A1. What was added counts; a cap may have been lowered below use. Steps that waited for one another end
        together: then the higher of the caps of before and after is asked, and who came last is known by its fence."""
        for token in self.postgres.late:
            under = self.postgres.fences[token]
            demand(under == self.postgres.fence, "A1 inserted under an old fence", token, under, self.postgres.fence)
        added = self.postgres.rows.keys() - before.rows.keys()
        touched = {name for token in added for name in names_of(self.postgres.rows[token])}
        for name in touched:
            for resource in RESOURCES:
                caps = [self.postgres.cap(name, resource), before.cap(name, resource)]
                used = self.postgres.sums[name, resource]
                asked = any(_asks(self.postgres.rows[token], name, resource) for token in added)
                demand(
                    not asked or None in caps or used <= max(caps), "A1 over the cap", name, resource, used, caps, added
                )

    def _only_what_was_booked(self, before):
        """A4: a row of a managed show was booked in a seeded Redis, under the fence of the row."""
        if self.postgres.managed and before.managed:
            for token in self.postgres.rows.keys() - before.rows.keys():
                row = (token, self.postgres.rows[token], self.postgres.fences[token])
                demand(row in self.booked, "A4 never booked in a seeded Redis", row)

    def _nothing_booked_unseeded(self, before):
        if before.fence is None and before.seeding is None:
            demand(not self.redis.tokens.keys() - before.tokens.keys(), "A4 booked in an unseeded Redis")

    def _tables_of_unmanaged(self):
        if not self.postgres.managed:
            demand(
                self.postgres.counted == self.postgres.sums,
                "A3 tables of an unmanaged show",
                self.postgres.counted,
                self.postgres.sums,
            )

    def _text_is_exact(self):
        """A6."""
        for name, fields in self.redis.hashes.items():
            cores, gpus = fields.get("int_cores", "0"), fields.get("int_gpus", "0")
            demand(format_cores(parse_cores(cores)) == cores, "A6 cores", name, cores)
            demand(gpus.isdigit(), "A6 GPUs", name, gpus)

    def _counters_are_what_tokens_hold(self):
        """Whatever else is wrong: counters, charges and buckets change with the tokens, in one script."""
        redis = self.redis
        demand(
            redis.by_holders == {number: tokens for number, (tokens, _) in redis.charges.items()},
            "charges and tokens",
            redis.by_holders,
            redis.charges,
        )
        listed = {int(each) for each in redis.keys.get(f"acct:buckets:{redis.show}", [])}
        demand(listed == redis.buckets, "buckets and tokens", listed, redis.buckets)
        for name in self._counted_names():
            for resource in RESOURCES:
                held, counted = redis.sums[name, resource], self.counter(name, resource)
                demand(counted == held, "counter and tokens", name, resource, counted, held)

    def _counted_names(self):
        """What has counters in Redis: what is shared, and jobs and layers with limits once they were counted."""
        settled = "uncounted" not in self.redis.state
        names = {name for name, _ in self.redis.sums} | self.redis.hashes.keys()
        for name in names:
            fields = self.redis.hashes.get(name, {})
            if name.startswith(SHARED) or (settled and "int_max_cores" in fields):
                yield name

    def _never_less_than_rows(self):
        """A2, for every token, and for every counter that a cap may ask."""
        for token, charge in self.postgres.rows.items():
            demand(self.redis.held.get(token) == charge, "A2 a row without its token", token, charge)
        for (name, resource), used in self.postgres.sums.items():
            if name.startswith(SHARED) or self.limit(name, resource) is not None:
                counted = self.counter(name, resource)
                demand(counted >= used, "A2 Redis counts less than procs", name, resource, counted, used)

    def _caps_belong_to_the_fence(self):
        """Under a current fence Redis has no cap that is higher than the one in PostgreSQL, nor lacks one."""
        for name in {*self.redis.hashes, *self.postgres.limits}:
            word = name.partition(":")[0]
            for resource in RESOURCES:
                wanted, has = self.postgres.cap(name, resource), self.limit(name, resource)
                if wanted is None or (word in ("sub", "folder", "point") and not self._knows(name)):
                    continue
                demand(has is not None and has <= wanted, "cap under the fence", name, resource, has, wanted)

    def _knows(self, name):
        word = name.partition(":")[0]
        return CAPS.get(word, NO_CAPS)[0] in self.redis.hashes.get(name, {})

    def limit(self, name, resource):
        """The cap Redis has; None if there is none."""
        word = name.partition(":")[0]
        cores, gpus = CAPS.get(word, NO_CAPS)
        text = self.redis.hashes.get(name, {}).get(cores if resource == "cores" else gpus)
        if text is None:
            return None
        found = parse_cores_limit(text) if resource == "cores" else int(text)
        if word == "sub":
            return found if found >= 0 else None
        return found if found > 0 else None

    def counter(self, name, resource):
        text = self.redis.hashes.get(name, {}).get(f"int_{resource}", "0")
        return parse_cores(text) if resource == "cores" else int(text)

    async def at_rest(self):
        """A3: everybody has ended and one recount was made."""
        await self.look()
        postgres, redis = self.postgres, self.redis
        if not postgres.managed:
            left = [key for key in redis.keys if key != "acct:seq"]
            demand(not left, "A3 an unmanaged show in Redis", left)
            return
        demand(redis.fence == postgres.fence, "A3 fence", redis.fence, postgres.fence)
        demand(redis.held == postgres.rows, "A3 tokens and rows", redis.held, postgres.rows)
        for name in {*redis.hashes, *(name for name, _ in postgres.sums)}:
            if name.startswith(SHARED) or name in redis.hashes:
                for resource in RESOURCES:
                    counted, used = self.counter(name, resource), postgres.sums[name, resource]
                    demand(counted == used, "A3 counter", name, resource, counted, used)
        in_tables = {key: used for key, used in postgres.sums.items() if key[0] in postgres.limits}
        demand(postgres.counted == in_tables, "A3 tables", postgres.counted, in_tables)
        marks = {"recount", "recounted", "seeding", "uncounted"} & redis.state.keys()
        demand(not marks, "A3 marks left", marks)
        demand(RedisKeys().show_keys(redis.show).shadow not in redis.keys, "A3 a shadow left")


def _asks(charge, name, resource):
    cores, gpus = charge.split(" ")[5:]
    return name in names_of(charge) and int(cores if resource == "cores" else gpus) > 0
