"""The one place where names of Redis keys are made.

A key is `prefix` + name + `{hash_tag}`: with a hash tag all keys lie in one slot of a Redis Cluster, without one a
script of several keys fails there with CROSSSLOT. Both are empty by default, and then operators find the plain names.

Every name is declared in `PATTERNS`, with `{word}` for what varies; the `-- key` lines of Lua files use the same text
(a test compares them), and `Keys.owns` tells our keys from strangers.
"""

from __future__ import annotations

import re
from typing import Final

from rota.model.errors import InvalidSetting

BREAKER_FAILURES: Final = "rota:cb:{name}:failures"
BREAKER_STATE: Final = "rota:cb:{name}:state"

VELOCITY: Final = "rota:velocity:{limit}"

WORKERS_SNAPSHOT: Final = "sys:workers:snapshot"
SNAPSHOT_WRITER: Final = "rota:scheduler:snapshot:writer"

WORKFLOW_TIMERS: Final = "rota:wf:delay:timers"
WORKFLOW_POLLER: Final = "rota:wf:delay:poller"
SAGA_STACK: Final = "saga:{saga}:stack"
SAGA_LOCK: Final = "saga:{saga}:lock"

ACCT_SEQ: Final = "acct:seq"
ACCT_SUB: Final = "acct:sub:{show}:{alloc}"
ACCT_FOLDER: Final = "acct:folder:{folder}"
ACCT_JOB: Final = "acct:job:{job}"
ACCT_LAYER: Final = "acct:layer:{layer}"
ACCT_POINT: Final = "acct:point:{dept}:{show}"
ACCT_SHOW: Final = "acct:show:{show}"
ACCT_LIMITS: Final = "acct:limits:{show}"
ACCT_TOKENS: Final = "acct:tokens:{show}:{bucket}"
ACCT_BUCKETS: Final = "acct:buckets:{show}"
ACCT_CHARGES: Final = "acct:charges:{show}"
ACCT_SHADOW: Final = "acct:shadow:{show}"

AGENTS_WAITING: Final = "waiting"
AGENTS_WORKING: Final = "working"
AGENTS_RUNS: Final = "working-runs"
AGENTS_LEADER: Final = "cleanup-leader"
"""Names of agents' keys as long as no setting changes them; all but the last have one more for each further group."""

PATTERNS: Final = (
    AGENTS_WAITING,
    f"{AGENTS_WAITING}:{{group}}",
    AGENTS_WORKING,
    f"{AGENTS_WORKING}:{{group}}",
    AGENTS_RUNS,
    f"{AGENTS_RUNS}:{{group}}",
    AGENTS_LEADER,
    BREAKER_FAILURES,
    BREAKER_STATE,
    VELOCITY,
    WORKERS_SNAPSHOT,
    SNAPSHOT_WRITER,
    WORKFLOW_TIMERS,
    WORKFLOW_POLLER,
    SAGA_STACK,
    SAGA_LOCK,
    ACCT_SEQ,
    ACCT_SUB,
    ACCT_FOLDER,
    ACCT_JOB,
    ACCT_LAYER,
    ACCT_POINT,
    ACCT_SHOW,
    ACCT_LIMITS,
    ACCT_TOKENS,
    ACCT_BUCKETS,
    ACCT_CHARGES,
    ACCT_SHADOW,
)

_KEY_PART = re.compile(r"[^{}\s]+")
_PLACEHOLDER = re.compile(r"\{\w+\}")
_SPLIT_MARKER: Final = "\0"


class RedisKeys:
    """Names of keys for one installation."""

    def __init__(self, prefix: str = "", hash_tag: str = "") -> None:
        for setting, value in (("prefix", prefix), ("hash-tag", hash_tag)):
            if value and not _KEY_PART.fullmatch(value):
                raise InvalidSetting(
                    f"The {setting} of Redis keys is {value!r}: leave out braces and spaces, Rota adds the braces."
                )
        self.prefix = prefix
        self._tag = f"{{{hash_tag}}}" if hash_tag else ""
        self._shows: dict[str, ShowRedisKeys] = {}
        self._owned = [self._matcher(pattern) for pattern in PATTERNS]

    def breaker_failures(self, name: str) -> str:
        return self.key(BREAKER_FAILURES, name=name)

    def breaker_state(self, name: str) -> str:
        return self.key(BREAKER_STATE, name=name)

    def velocity(self, limit: str) -> str:
        """Jobs that a velocity limit of a policy has let through."""
        return self.key(VELOCITY, limit=limit)

    def workers_snapshot(self) -> str:
        return self.key(WORKERS_SNAPSHOT)

    def snapshot_writer(self) -> str:
        """The lock of who writes the snapshot."""
        return self.key(SNAPSHOT_WRITER)

    def workflow_timers(self) -> str:
        """When which timers of runs are due, for people to read."""
        return self.key(WORKFLOW_TIMERS)

    def workflow_poller(self) -> str:
        """Who keeps that index; gone when Redis was emptied."""
        return self.key(WORKFLOW_POLLER)

    def saga_stack(self, saga: str) -> str:
        """What undoes a run, what is undone next being first; for people to read."""
        return self.key(SAGA_STACK, saga=saga)

    def saga_lock(self, saga: str) -> str:
        """There while a saga rolls back."""
        return self.key(SAGA_LOCK, saga=saga)

    def agent_keys(
        self, group: str = "", waiting: str = AGENTS_WAITING, working: str = AGENTS_WORKING
    ) -> AgentRedisKeys:
        """Keys of the agents of one group, under the names of the settings."""
        return AgentRedisKeys(self, group, waiting, working)

    def agents_leader(self, name: str = AGENTS_LEADER) -> str:
        """Who leads the cleanup of agents, for people to read."""
        return self.key("{name}", name=name)

    def show_keys(self, show: str) -> ShowRedisKeys:
        """Keys of the books of one show."""
        if show not in self._shows:
            self._shows[show] = ShowRedisKeys(self, show)
        return self._shows[show]

    def owns(self, key: bytes) -> bool:
        """Whether `key` is one of the names declared here, under this prefix and hash tag."""
        text = key.decode("utf-8", "replace")
        return any(matcher.fullmatch(text) for matcher in self._owned)

    def split_around(self, pattern: str, word: str, **others: str) -> tuple[str, str]:
        """What comes before and after `word` in a key, for those that are made by the thousand."""
        before, after = self.key(pattern, **others, **{word: _SPLIT_MARKER}).split(_SPLIT_MARKER)
        return before, after

    def parse(self, pattern: str, key: str) -> dict[str, str]:
        """What varies in a key of `pattern`; nothing when it is another one."""
        named = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^:{}\\s]+)", re.escape(pattern))
        found = re.fullmatch(re.escape(self.prefix) + named + re.escape(self._tag), key)
        return found.groupdict() if found else {}

    def scan_pattern(self, pattern: str) -> str:
        """For SCAN: every key of a pattern, and strangers that look alike; `owns` tells them apart."""
        return f"{self.prefix}{re.sub(_PLACEHOLDER, '*', pattern)}{self._tag}"

    @staticmethod
    def is_declared(key: bytes) -> bool:
        """Whether `key` is declared here, with neither prefix nor hash tag."""
        return _UNPREFIXED.owns(key)

    def key(self, pattern: str, **words: str) -> str:
        """The key of a declared pattern."""
        for word, value in words.items():
            # A brace would open another hash tag before ours and scatter the keys over slots.
            assert _KEY_PART.fullmatch(value), f"{word} of {pattern} is {value!r}"
        return f"{self.prefix}{pattern.format(**words)}{self._tag}"

    def _matcher(self, pattern: str) -> re.Pattern[str]:
        varying = re.sub(r"\\\{\w+\\\}", lambda _: _KEY_PART.pattern, re.escape(pattern))
        return re.compile(re.escape(self.prefix) + varying + re.escape(self._tag))


class AgentRedisKeys:
    """The two sets of agents, and the stamps of those that run."""

    def __init__(self, keys: RedisKeys, group: str, waiting: str, working: str) -> None:
        def named(name: str) -> str:
            return keys.key("{name}:{group}", name=name, group=group) if group else keys.key("{name}", name=name)

        self.waiting = named(waiting)
        self.working = named(working)
        self.runs = named(f"{working}-runs")


class ShowRedisKeys:
    """The books of one show. Things with counters also have a short name, `sub:…` to `point:…`, used inside them."""

    def __init__(self, keys: RedisKeys, show: str) -> None:
        self.seq = keys.key(ACCT_SEQ)
        self.show = keys.key(ACCT_SHOW, show=show)
        self.limits = keys.key(ACCT_LIMITS, show=show)
        self.buckets = keys.key(ACCT_BUCKETS, show=show)
        self.charges = keys.key(ACCT_CHARGES, show=show)
        self.shadow = keys.key(ACCT_SHADOW, show=show)
        self._counting = {
            "sub": keys.split_around(ACCT_SUB, "alloc", show=show),
            "folder": keys.split_around(ACCT_FOLDER, "folder"),
            "job": keys.split_around(ACCT_JOB, "job"),
            "layer": keys.split_around(ACCT_LAYER, "layer"),
            "point": keys.split_around(ACCT_POINT, "dept", show=show),
        }
        self._tokens = keys.split_around(ACCT_TOKENS, "bucket", show=show)

    def tokens(self, bucket: int) -> str:
        before, after = self._tokens
        return f"{before}{bucket}{after}"

    def counter_key(self, name: str) -> str:
        """The key of what has the short name `name`."""
        level, _, thing = name.partition(":")
        before, after = self._counting[level]
        return f"{before}{thing}{after}"

    def shared_counter_keys(self, charged: tuple[str, str, str, str, str]) -> tuple[str, str, str, str, str]:
        """`counting_of`, with nothing for job and layer."""
        (a, b), (c, d), _, _, (i, j) = self._counting.values()
        return f"{a}{charged[0]}{b}", f"{c}{charged[1]}{d}", "", "", f"{i}{charged[4]}{j}"

    def counter_keys(self, charged: tuple[str, str, str, str, str]) -> tuple[str, str, str, str, str]:
        """The five keys of pool, folder, job, layer and department, without a short name made on the way."""
        alloc, folder, job, layer, dept = charged
        (a, b), (c, d), (e, f), (g, h), (i, j) = self._counting.values()
        return f"{a}{alloc}{b}", f"{c}{folder}{d}", f"{e}{job}{f}", f"{g}{layer}{h}", f"{i}{dept}{j}"


_UNPREFIXED: Final = RedisKeys()
