"""The ledger of a show as read by an observer: PostgreSQL in one statement, Redis in one call. Both are read between
two steps, so they are consistent."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from rota.model.quota import LEVELS, RESOURCES, Limit, effective_limit

LEVEL_NAMES = ("sub", "folder", "job", "layer", "point")
LEVEL_OF = dict(zip(LEVEL_NAMES, LEVELS, strict=True))
SPAN = 128

READ_POSTGRES = """
SELECT json_build_object(
  'show', (SELECT json_build_array(int_fence, b_scheduler_managed, xmin::text::bigint)
           FROM rota.show WHERE pk_show = $1),
  'procs', (SELECT coalesce(json_agg(json_build_array(
              token, int_fence, CASE WHEN b_ended THEN 0 ELSE xmin::text::bigint END,
              concat_ws(' ', pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, int_cores_reserved, int_gpus_reserved)
            )), '[]')
            FROM rota.proc WHERE pk_show = $1 AND (int_cores_reserved > 0 OR int_gpus_reserved > 0)),
  'followers', (SELECT coalesce(json_agg(token), '[]') FROM rota.proc
                WHERE pk_show = $1 AND int_cores_reserved = 0 AND int_gpus_reserved = 0),
  'series', (SELECT coalesce(json_agg(json_build_array(series_first, token, b_ended)), '[]') FROM rota.proc
             WHERE pk_show = $1 AND series_first IS NOT NULL),
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
# Reads pg_locks, because pg_stat_activity may still show a session as waiting after its lock was granted.
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
    """Short names of the keys that a charge (`alloc folder job layer dept cores gpus`) counts in."""
    return [f"{level}:{id_}" for level, id_ in zip(LEVEL_NAMES, charge.split(" "), strict=False)]


def text_of(charge):
    """A charge in the text form that both stores use."""
    return " ".join(str(getattr(charge, field)) for field in charge.__struct_fields__)


def sums_of(charges):
    """Sums of charges: (name, resource) -> amount, without zeros."""
    sums = Counter()
    for charge, times in charges:
        amounts = [int(level) for level in charge.split(" ")[5:]]
        for name in names_of(charge):
            for resource, amount in zip(RESOURCES, amounts, strict=True):
                if amount:
                    sums[name, resource] += times * amount
    return +sums


@dataclass
class PostgresSnapshot:
    fence: int
    managed: bool
    rows: dict[int, str]
    """Token -> charge, of rows that have one."""
    followers: set[int]
    """Tokens of the others: frames in series before their carrier."""
    series: list[tuple[int, int, bool]]
    """First token, carrier, and whether the carrier has ended."""
    fences: dict[int, int]
    """Token -> the fence of its insert."""
    late: set[int]
    """Tokens inserted after the fence last rose, but those whose frame has ended since. A transaction gets its xid at
    its first write, and both raising the fence and inserting hold the lock of the show, so xids show the commit
    order."""
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
        for level in LEVEL_NAMES:
            for id_, cores, gpus, used_cores, used_gpus in held[level]:
                limits[f"{level}:{id_}"] = Limit(cores, gpus)
                for resource, used in zip(RESOURCES, (used_cores, used_gpus), strict=True):
                    counted[f"{level}:{id_}", resource] = used
        followers, series = set(held["followers"]), [tuple(each) for each in held["series"]]
        return cls(fence, managed, rows, followers, series, fences, late, limits, +counted)

    @cached_property
    def sums(self):
        return sums_of((charge, 1) for charge in self.rows.values())

    def cap(self, name, resource):
        """The cap, or None if unlimited. A missing folder or subscription has the cap 0."""
        level = name.partition(":")[0]
        if level == "folder" and name not in self.limits:
            return 0
        return effective_limit(LEVEL_OF[level], resource, self.limits.get(name, Limit()))


@dataclass
class RedisSnapshot:
    run: str
    keys: dict[str, dict[str, str] | list[str]]
    show: str
    tokens: dict[int, str] = field(default_factory=dict)
    """Token -> charge number."""
    buckets: set[int] = field(default_factory=set)
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Short name -> fields of a quota level hash."""

    @classmethod
    def read(cls, reply, show):
        keys = {}
        for key, kind, held in reply[1]:
            fields_and_values = [level.decode() for level in held]
            keys[key.decode()] = (
                dict(zip(fields_and_values[::2], fields_and_values[1::2], strict=True))
                if kind == b"hash"
                else fields_and_values
            )
        snapshot = cls(reply[0].decode(), keys, show)
        for key, held in keys.items():
            level, _, rest = key.removeprefix("acct:").partition(":")
            if level in LEVEL_NAMES:
                id_ = rest.removeprefix(f"{show}:").removesuffix(f":{show}")
                snapshot.hashes[f"{level}:{id_}"] = held
            elif level == "tokens":
                bucket = int(rest.rpartition(":")[2])
                snapshot.buckets.add(bucket)
                snapshot.tokens |= {bucket * SPAN + int(within): number for within, number in held.items()}
        return snapshot

    @property
    def state(self):
        return self.keys.get(f"acct:show:{self.show}", {})

    @property
    def is_current_run(self):
        return self.state.get("run") == self.run

    @property
    def fence(self):
        return int(self.state["fence"]) if self.is_current_run and "fence" in self.state else None

    @property
    def seeding(self):
        return int(self.state["seeding"]) if self.is_current_run and "seeding" in self.state else None

    @cached_property
    def charges(self):
        """Charge number -> (number of tokens, charge)."""
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

    def keys_without_seq(self):
        return {key: held for key, held in self.keys.items() if key != "acct:seq"}


class LedgerObserver:
    """Reads both stores outside the schedule."""

    def __init__(self, connection, client, show):
        self.connection = connection
        self.client = client
        self.show = show

    async def postgres(self):
        return PostgresSnapshot.read(await self.connection.fetchval(READ_POSTGRES, self.show))

    async def redis(self):
        return RedisSnapshot.read(await self.client.eval(READ_REDIS, 0), str(self.show))

    async def blocked(self):
        return await self.connection.fetchval(BLOCKED)
