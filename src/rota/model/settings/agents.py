"""Settings of recurring agents, under `redis.agent` and `redis.scheduler`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from rota.model.settings.kinds import (
    INTEGER_MAX,
    Boolean,
    Choice,
    Float,
    Integer,
    Milliseconds,
    RegularExpression,
    Seconds,
    String,
)
from rota.model.settings.section import Section

AgentSchedulerType = Literal["priority"]

_KEY = r"[^\s{}\x00-\x1f\x7f]{1,200}"
_KEY_DESCRIPTION = "a key name of 1 to 200 characters without spaces and braces"
_AWAIT = "Longest wait at shutdown for its work to end by itself."
_FORCE_AWAIT = "Longest wait after that, once the work has been cancelled."
_BUDGET = "Time limit of one pass; the next pass continues; 0: no limit."


class AgentSettings(Section, frozen=True):
    """Which agents this process runs, and how many concurrently."""

    max_concurrent_agents: Annotated[
        int, Integer("Concurrent agents in this process; 0 or less: no limit.", least=-INTEGER_MAX)
    ] = 100
    enabled_pattern: Annotated[str, RegularExpression("Agents whose whole name matches may run here.")] = ".*"
    disabled_pattern: Annotated[
        str, RegularExpression("Agents whose whole name matches never run here; overrides enabled_pattern.")
    ] = ""


class BatchOperationsSettings(Section, frozen=True):
    """How many agents one Redis call acquires."""

    enabled: Annotated[bool, Boolean("Acquire agents in batches instead of one by one.")] = True
    batch_size: Annotated[
        int, Integer("Agents per batch; 0 or less: as many as there are free slots.", least=-INTEGER_MAX)
    ] = 0
    chunk_attempt_multiplier: Annotated[
        float,
        Float("Further scans per required batch if the agents found may not run here; 0: none.", most=100.0),
    ] = 0.0


class JitterSettings(Section, frozen=True):
    """Random spread, so that many agents do not run in lockstep."""

    initial_registration_seconds: Annotated[
        int, Seconds("Spreads the first runs of new agents over this time; 0: run immediately.")
    ] = 0
    shutdown_seconds: Annotated[
        int, Seconds("Spreads agents released at shutdown over this time; 0: due immediately.")
    ] = 0
    failure_backoff_ratio: Annotated[
        float, Float("Jitter of the delay after a failure, as a fraction of it, up and down.")
    ] = 0.1


class ThrottledBackoffSettings(Section, frozen=True):
    """Delay after a throttling failure: the base, times the multiplier for each further one."""

    base_ms: Annotated[int, Milliseconds("Delay after the first such failure.", least=1)] = 30_000
    multiplier: Annotated[float, Float("Factor for each further consecutive failure.", least=1.0, most=100.0)] = 2.0
    cap_ms: Annotated[int, Milliseconds("Longest such delay.", least=1)] = 600_000


class FailureBackoffSettings(Section, frozen=True):
    """Delay before the next run by class of failure."""

    enabled: Annotated[
        bool, Boolean("Choose the delay by the class of failure; otherwise the agent's error interval.")
    ] = False
    max_immediate_retries: Annotated[
        int, Integer("Immediate retries after consecutive transient or server errors.", most=1000)
    ] = 0
    permanent_forbidden_backoff_ms: Annotated[int, Milliseconds("Delay after an access-denied failure.")] = 1_800_000
    throttled: ThrottledBackoffSettings = ThrottledBackoffSettings()


class CircuitBreakerSettings(Section, frozen=True):
    """Circuit breaker of the agents' Redis calls. The numbers are those of acquisition."""

    enabled: Annotated[bool, Boolean("Whether the breaker is active.")] = True
    failure_threshold: Annotated[int, Integer("Failures within the window that open the breaker.", least=1)] = 5
    failure_window_ms: Annotated[int, Milliseconds("The window in which failures are counted.", least=1)] = 10_000
    cooldown_ms: Annotated[int, Milliseconds("Time without calls before recovery is probed.", least=1)] = 30_000
    half_open_duration_ms: Annotated[
        int, Milliseconds("Time without a failure after which the breaker closes.", least=1)
    ] = 5_000


class ExceptionalAgentsSettings(Section, frozen=True):
    """Agents with long runs."""

    pattern: Annotated[str, RegularExpression("Agents whose whole name matches have this threshold; empty: none.")] = ""
    threshold_ms: Annotated[int, Milliseconds("Time past the deadline before one of them is a zombie.")] = 3_600_000


class ZombieCleanupSettings(Section, frozen=True):
    """Stops agents of this process that run past their deadline."""

    enabled: Annotated[bool, Boolean("Whether such agents are stopped.")] = True
    threshold_ms: Annotated[int, Milliseconds("Time past the deadline before an agent is a zombie.")] = 30_000
    interval_ms: Annotated[int, Milliseconds("Interval between passes.", least=1)] = 300_000
    run_budget_ms: Annotated[int, Milliseconds(_BUDGET)] = 0
    executor_shutdown_await_ms: Annotated[int, Milliseconds(_AWAIT)] = 10_000
    executor_shutdown_force_await_ms: Annotated[int, Milliseconds(_FORCE_AWAIT)] = 5_000
    exceptional_agents: ExceptionalAgentsSettings = ExceptionalAgentsSettings()


class OrphanCleanupSettings(Section, frozen=True):
    """Releases the agents of crashed processes. One process does it at a time."""

    enabled: Annotated[bool, Boolean("Whether this process takes part.")] = True
    threshold_ms: Annotated[int, Milliseconds("Time past the deadline before an agent is an orphan.")] = 600_000
    interval_ms: Annotated[int, Milliseconds("Interval between passes.", least=1)] = 300_000
    leadership_ttl_ms: Annotated[int, Milliseconds("Lease of the leader without renewal.", least=1000)] = 120_000
    force_all_pods: Annotated[bool, Boolean("Every process cleans up its own shard, without a leader.")] = False
    remove_numeric_only_agents: Annotated[bool, Boolean("Remove entries that are numbers, not names.")] = True
    run_budget_ms: Annotated[int, Milliseconds(_BUDGET)] = 0
    executor_shutdown_await_ms: Annotated[int, Milliseconds(_AWAIT)] = 10_000
    executor_shutdown_force_await_ms: Annotated[int, Milliseconds(_FORCE_AWAIT)] = 5_000


class AgentReconcileSettings(Section, frozen=True):
    """Synchronizes the registered agents with those this process owns."""

    run_budget_ms: Annotated[int, Milliseconds(_BUDGET)] = 0
    executor_shutdown_await_ms: Annotated[int, Milliseconds(_AWAIT)] = 5_000
    executor_shutdown_force_await_ms: Annotated[int, Milliseconds(_FORCE_AWAIT)] = 2_000


class AgentKeySettings(Section, frozen=True):
    """Redis keys of the agents: prefix, name, then the hash tag in braces."""

    prefix: Annotated[
        str,
        String("Prefix of every name.", pattern=rf"(?:{_KEY})?", described="nothing, or " + _KEY_DESCRIPTION),
    ] = ""
    waiting_set: Annotated[str, String("Sorted set of waiting agents.", pattern=_KEY, described=_KEY_DESCRIPTION)] = (
        "waiting"
    )
    working_set: Annotated[str, String("Sorted set of running agents.", pattern=_KEY, described=_KEY_DESCRIPTION)] = (
        "working"
    )
    cleanup_leader_key: Annotated[
        str, String("Leader lease of the orphan cleanup.", pattern=_KEY, described=_KEY_DESCRIPTION)
    ] = "cleanup-leader"
    hash_tag: Annotated[
        str,
        String(
            "Keeps the keys in one slot of a Redis Cluster.",
            pattern=rf"(?:{_KEY})?",
            described="nothing, or " + _KEY_DESCRIPTION,
        ),
    ] = ""


class AgentSchedulerSettings(Section, frozen=True):
    """The loop that acquires due agents."""

    enabled: Annotated[bool, Boolean("Whether this process runs agents.")] = True
    type: Annotated[
        AgentSchedulerType, Choice("Strategy that selects agents.", options=get_args(AgentSchedulerType))
    ] = "priority"
    interval_ms: Annotated[int, Milliseconds("Interval of the loop.", least=1)] = 1_000
    refresh_period_seconds: Annotated[
        int, Seconds("Interval between synchronizations of the agents to Redis.", least=1)
    ] = 30
    health_summary_period_seconds: Annotated[
        int, Seconds("Interval between health summaries in the log; 0 or less: none.", least=-INTEGER_MAX)
    ] = 600
    time_cache_duration_ms: Annotated[int, Milliseconds("How long the offset to the Redis clock is cached.")] = 10_000
    batch_operations: BatchOperationsSettings = BatchOperationsSettings()
    jitter: JitterSettings = JitterSettings()
    failure_backoff: FailureBackoffSettings = FailureBackoffSettings()
    circuit_breaker: CircuitBreakerSettings = CircuitBreakerSettings()
    zombie_cleanup: ZombieCleanupSettings = ZombieCleanupSettings()
    orphan_cleanup: OrphanCleanupSettings = OrphanCleanupSettings()
    reconcile: AgentReconcileSettings = AgentReconcileSettings()
    keys: AgentKeySettings = AgentKeySettings()
