"""The only place that builds Redis key names.

A key is `prefix` + name + `{hash_tag}`. With a hash tag all keys lie in one slot of a Redis Cluster; without one a
script with several keys fails there with CROSSSLOT. Both are empty by default, so operators see the plain names.

Every name is declared in `PATTERNS`, with `{placeholder}` for its variable parts. The `-- key` lines of Lua files use
the same text (a test compares them), and `RedisKeys.owns` separates Rota's keys from foreign ones.
"""

from __future__ import annotations

import re
from typing import Final

from rota.model.errors import InvalidSetting

BREAKER_FAILURES: Final = "rota:cb:{name}:failures"
BREAKER_STATE: Final = "rota:cb:{name}:state"

VELOCITY: Final = "rota:velocity:{limit}"
REQUEST_TOKENS: Final = "rota:http:tokens:{key}"

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
"""Default names of the agents' keys; settings can change them. All but the last exist once more per further group."""

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
    REQUEST_TOKENS,
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
    """Key names of one installation."""

    def __init__(self, prefix: str = "", hash_tag: str = "") -> None:
        for setting, value in (("prefix", prefix), ("hash-tag", hash_tag)):
            if value and not _KEY_PART.fullmatch(value):
                raise InvalidSetting(
                    f"The {setting} of Redis keys is {value!r}: leave out braces and spaces; Rota adds the braces."
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
        """Jobs admitted under a velocity limit of a policy."""
        return self.key(VELOCITY, limit=limit)

    def request_tokens(self, key: str) -> str:
        """Requests that an API key may still send."""
        return self.key(REQUEST_TOKENS, key=key)

    def workers_snapshot(self) -> str:
        return self.key(WORKERS_SNAPSHOT)

    def snapshot_writer(self) -> str:
        """Lock of the replica that writes the snapshot."""
        return self.key(SNAPSHOT_WRITER)

    def workflow_timers(self) -> str:
        """Due times of workflow timers; for display only."""
        return self.key(WORKFLOW_TIMERS)

    def workflow_poller(self) -> str:
        """Replica that maintains the timer index; absent after Redis was flushed."""
        return self.key(WORKFLOW_POLLER)

    def saga_stack(self, saga: str) -> str:
        """Compensations of a run, the next one first; for display only."""
        return self.key(SAGA_STACK, saga=saga)

    def saga_lock(self, saga: str) -> str:
        """Exists while a saga rolls back."""
        return self.key(SAGA_LOCK, saga=saga)

    def agent_keys(
        self, group: str = "", waiting: str = AGENTS_WAITING, working: str = AGENTS_WORKING
    ) -> AgentRedisKeys:
        """Keys of one group of agents, under the configured names."""
        return AgentRedisKeys(self, group, waiting, working)

    def agents_leader(self, name: str = AGENTS_LEADER) -> str:
        """Leader of the agents' cleanup; for display only."""
        return self.key("{name}", name=name)

    def show_keys(self, show: str) -> ShowRedisKeys:
        """Accounting keys of one show."""
        if show not in self._shows:
            self._shows[show] = ShowRedisKeys(self, show)
        return self._shows[show]

    def owns(self, key: bytes) -> bool:
        """Whether `key` is one of the names declared here, under this prefix and hash tag."""
        text = key.decode("utf-8", "replace")
        return any(matcher.fullmatch(text) for matcher in self._owned)

    def split_around(self, pattern: str, placeholder: str, **others: str) -> tuple[str, str]:
        """The key's text before and after one placeholder, for keys built by the thousand."""
        before, after = self.key(pattern, **others, **{placeholder: _SPLIT_MARKER}).split(_SPLIT_MARKER)
        return before, after

    def parse(self, pattern: str, key: str) -> dict[str, str]:
        """The placeholder values in a key of `pattern`; empty when the key does not match."""
        full_name = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^:{}\\s]+)", re.escape(pattern))
        found = re.fullmatch(re.escape(self.prefix) + full_name + re.escape(self._tag), key)
        return found.groupdict() if found else {}

    def scan_pattern(self, pattern: str) -> str:
        """A SCAN pattern for every key of `pattern`; it may match foreign keys too, which `owns` rejects."""
        return f"{self.prefix}{re.sub(_PLACEHOLDER, '*', pattern)}{self._tag}"

    @staticmethod
    def is_declared(key: bytes) -> bool:
        """Whether `key` is declared here, without prefix and hash tag."""
        return _UNPREFIXED.owns(key)

    def key(self, pattern: str, **values: str) -> str:
        """The key of a declared pattern."""
        for placeholder, value in values.items():
            # A brace would start another hash tag before ours and spread the keys over slots.
            assert _KEY_PART.fullmatch(value), f"{placeholder} of {pattern} is {value!r}"
        return f"{self.prefix}{pattern.format(**values)}{self._tag}"

    def _matcher(self, pattern: str) -> re.Pattern[str]:
        body = re.sub(r"\\\{\w+\\\}", lambda _: _KEY_PART.pattern, re.escape(pattern))
        return re.compile(re.escape(self.prefix) + body + re.escape(self._tag))


class AgentRedisKeys:
    """The two sets of agents, and the run ids of working agents."""

    def __init__(self, keys: RedisKeys, group: str, waiting: str, working: str) -> None:
        def full_name(name: str) -> str:
            return keys.key("{name}:{group}", name=name, group=group) if group else keys.key("{name}", name=name)

        self.waiting = full_name(waiting)
        self.working = full_name(working)
        self.runs = full_name(f"{working}-runs")


class ShowRedisKeys:
    """Accounting keys of one show. Each object with counters has a short name in values, `sub:…` to `point:…`."""

    def __init__(self, keys: RedisKeys, show: str) -> None:
        self.seq = keys.key(ACCT_SEQ)
        self.show = keys.key(ACCT_SHOW, show=show)
        self.limits = keys.key(ACCT_LIMITS, show=show)
        self.buckets = keys.key(ACCT_BUCKETS, show=show)
        self.charges = keys.key(ACCT_CHARGES, show=show)
        self.shadow = keys.key(ACCT_SHADOW, show=show)
        self._counters = {
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
        """The key of the object with the short name `name`."""
        level, _, identifier = name.partition(":")
        before, after = self._counters[level]
        return f"{before}{identifier}{after}"

    def shared_counter_keys(self, charged: tuple[str, str, str, str, str]) -> tuple[str, str, str, str, str]:
        """As `counter_keys`, with empty strings for job and layer."""
        (a, b), (c, d), _, _, (i, j) = self._counters.values()
        return f"{a}{charged[0]}{b}", f"{c}{charged[1]}{d}", "", "", f"{i}{charged[4]}{j}"

    def counter_keys(self, charged: tuple[str, str, str, str, str]) -> tuple[str, str, str, str, str]:
        """The five keys of pool, folder, job, layer and department, without building short names (hot path)."""
        alloc, folder, job, layer, dept = charged
        (a, b), (c, d), (e, f), (g, h), (i, j) = self._counters.values()
        return f"{a}{alloc}{b}", f"{c}{folder}{d}", f"{e}{job}{f}", f"{g}{layer}{h}", f"{i}{dept}{j}"


_UNPREFIXED: Final = RedisKeys()
