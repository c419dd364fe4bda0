"""What an onlooker sees of the books: everything PostgreSQL has of a show in one statement, everything Redis has in one
call. Both are read between two steps, so they are exact."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from rota.model.quota import LEVELS, RESOURCES, Limit, effective_limit

WORDS = ("sub", "folder", "job", "layer", "point")
LEVEL_OF = dict(zip(WORDS, LEVELS, strict=True))
SPAN = 128

READ_POSTGRES = """
SELECT json_build_object(
  'show', (SELECT json_build_array(int_fence, b_scheduler_managed, xmin::text::bigint)
           FROM rota.show WHERE pk_show = $1),
  'procs', (SELECT coalesce(json_agg(json_build_array(token, int_fence, xmin::text::bigint, concat_ws(' ', pk_alloc,
              pk_folder, pk_job, pk_layer, pk_dept, int_cores_reserved, int_gpus_reserved))), '[]')
            FROM rota.proc WHERE pk_show = $1),
  'sub', (SELECT coalesce(json_agg(json_build_array(pk_alloc, int_burst, int_gpu_burst, int_cores, int_gpus)), '[]')
          FROM rota.subscription WHERE pk_show = $1),
  'folder', (SELECT coalesce(json_agg(json_build_array(pk_folder, int_max_cores, int_max_gpus, int_cores, int_gpus)),
             '[]') FROM rota.folder_resource WHERE pk_show = $1),
  'job', (SELECT coalesce(json_agg(json_build_array(pk_job, int_max_cores, int_max_gpus, int_cores, int_gpus)), '[]')
          FROM rota.job_resource WHERE pk_show = $1),
  'layer', (SELECT coalesce(json_agg(json_build_array(pk_layer, int_max_cores, int_max_gpus, int_cores, int_gpus)),
            '[]') FROM rota.layer_resource WHERE pk_show = $1),
  'point', (SELECT coalesce(json_agg(json_build_array(pk_dept, int_max_cores, int_max_gpus, int_cores, int_gpus)), '[]')
            FROM rota.point WHERE pk_show = $1)
)::text
"""
# Asked of the lock table: a session that was granted its lock may not have woken up yet, and still be shown as waiting.
BLOCKED = """
SELECT count(DISTINCT l.pid) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE NOT l.granted AND a.datname = current_database()
"""

READ_REDIS = """
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local held
  if kind == 'hash' then
    held = redis.call('HGETALL', key)
  elseif kind == 'zset' then
    held = redis.call('ZRANGE', key, 0, -1)
  else
    held = {redis.call('GET', key)}
  end
  all[#all + 1] = {key, kind, held}
end
return {string.match(redis.call('INFO', 'server'), 'run_id:(%x+)'), all}
"""


def names_of(charge):
    """Short names of what a charge (`alloc folder job layer dept cores gpus`) counts in."""
    return [f"{word}:{thing}" for word, thing in zip(WORDS, charge.split(" "), strict=False)]


def text_of(charge):
    """A charge as both stores tell it here."""
    return " ".join(str(getattr(charge, field)) for field in charge.__struct_fields__)


def sums_of(charges):
    """What charges hold together: (name, resource) -> amount; nothing where it is 0."""
    sums = Counter()
    for charge, times in charges:
        amounts = [int(word) for word in charge.split(" ")[5:]]
        for name in names_of(charge):
            for resource, amount in zip(RESOURCES, amounts, strict=True):
                if amount:
                    sums[name, resource] += times * amount
    return +sums


@dataclass
class InPostgres:
    fence: int
    managed: bool
    rows: dict[int, str]
    """Token -> charge."""
    fences: dict[int, int]
    """Token -> the fence it was inserted under."""
    late: set[int]
    """Tokens whose rows were inserted after the fence last rose. A transaction has its number when it first writes, and
    who raises the fence or inserts does so under the lock of the show, so numbers tell the order of commits."""
    limits: dict[str, Limit]
    counted: Counter

    @classmethod
    def read(cls, text):
        held = msgspec.json.decode(text)
        fence, managed, raised_by = held["show"]
        rows = {token: charge for token, _, _, charge in held["procs"]}
        fences = {token: under for token, under, _, _ in held["procs"]}
        late = {token for token, _, inserted_by, _ in held["procs"] if inserted_by > raised_by}
        limits, counted = {}, Counter()
        for word in WORDS:
            for thing, cores, gpus, used_cores, used_gpus in held[word]:
                limits[f"{word}:{thing}"] = Limit(cores, gpus)
                for resource, used in zip(RESOURCES, (used_cores, used_gpus), strict=True):
                    counted[f"{word}:{thing}", resource] = used
        return cls(fence, managed, rows, fences, late, limits, +counted)

    @cached_property
    def sums(self):
        return sums_of((charge, 1) for charge in self.rows.values())

    def cap(self, name, resource):
        """None where there is none. A folder that is not there takes nothing, like a subscription that is not."""
        word = name.partition(":")[0]
        if word == "folder" and name not in self.limits:
            return 0
        return effective_limit(LEVEL_OF[word], resource, self.limits.get(name, Limit()))


@dataclass
class InRedis:
    run: str
    keys: dict[str, dict[str, str] | list[str]]
    show: str
    tokens: dict[int, str] = field(default_factory=dict)
    """Token -> number of its charge."""
    buckets: set[int] = field(default_factory=set)
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Short name -> fields of one of the five hashes."""

    @classmethod
    def read(cls, reply, show):
        keys = {}
        for key, kind, held in reply[1]:
            words = [word.decode() for word in held]
            keys[key.decode()] = dict(zip(words[::2], words[1::2], strict=True)) if kind == b"hash" else words
        seen = cls(reply[0].decode(), keys, show)
        for key, held in keys.items():
            word, _, rest = key.removeprefix("acct:").partition(":")
            if word in WORDS:
                thing = rest.removeprefix(f"{show}:").removesuffix(f":{show}")
                seen.hashes[f"{word}:{thing}"] = held
            elif word == "tokens":
                bucket = int(rest.rpartition(":")[2])
                seen.buckets.add(bucket)
                seen.tokens |= {bucket * SPAN + int(within): number for within, number in held.items()}
        return seen

    @property
    def state(self):
        return self.keys.get(f"acct:show:{self.show}", {})

    @property
    def here(self):
        return self.state.get("run") == self.run

    @property
    def fence(self):
        return int(self.state["fence"]) if self.here and "fence" in self.state else None

    @property
    def seeding(self):
        return int(self.state["seeding"]) if self.here and "seeding" in self.state else None

    @cached_property
    def charges(self):
        """Number -> (how many tokens hold it, charge)."""
        held = self.keys.get(f"acct:charges:{self.show}", {})
        split = {number: text.split(" ", 2) for number, text in held.items()}
        return {number: (int(tokens), charge) for number, (tokens, _, charge) in split.items()}

    @cached_property
    def held(self):
        """Token -> charge."""
        return {token: self.charges[number][1] for token, number in self.tokens.items() if number in self.charges}

    @cached_property
    def sums(self):
        return sums_of((charge, 1) for charge in self.held.values())

    @cached_property
    def by_holders(self):
        holders = defaultdict(int)
        for number in self.tokens.values():
            holders[number] += 1
        return dict(holders)

    def but_seq(self):
        return {key: held for key, held in self.keys.items() if key != "acct:seq"}


class Onlooker:
    """Reads both stores past the schedule."""

    def __init__(self, connection, client, show):
        self.connection = connection
        self.client = client
        self.show = show

    async def postgres(self):
        return InPostgres.read(await self.connection.fetchval(READ_POSTGRES, self.show))

    async def redis(self):
        return InRedis.read(await self.client.eval(READ_REDIS, 0), str(self.show))

    async def blocked(self):
        return await self.connection.fetchval(BLOCKED)
