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
_AWAIT = "Longest wait for its work to end by itself when the process stops."
_FORCE_AWAIT = "Longest wait after that, once the work was cancelled."
_BUDGET = "Longest time one pass may take before it leaves the rest to the next; 0 sets no limit."


class AgentSettings(Section, frozen=True):
    """Which agents this process runs, and how many concurrently."""

    max_concurrent_agents: Annotated[
        int, Integer("Agents that may run at once in this process; 0 or less sets no limit.", least=-INTEGER_MAX)
    ] = 100
    enabled_pattern: Annotated[str, RegularExpression("Agents whose whole name matches may run here.")] = ".*"
    disabled_pattern: Annotated[
        str, RegularExpression("Agents whose whole name matches never run here; wins over enabled_pattern.")
    ] = ""


class BatchOperationsSettings(Section, frozen=True):
    """How many agents one Redis call acquires."""

    enabled: Annotated[bool, Boolean("Acquire agents in batches rather than one by one.")] = True
    batch_size: Annotated[
        int, Integer("Agents per batch; 0 or less: as many as there are free places.", least=-INTEGER_MAX)
    ] = 0
    chunk_attempt_multiplier: Annotated[
        float,
        Float("Further scans when the agents found may not run here, per batch needed; 0 makes none.", most=100.0),
    ] = 0.0


class JitterSettings(Section, frozen=True):
    """Random spread, so that many agents do not run in lockstep."""

    initial_registration_seconds: Annotated[
        int, Seconds("Spreads the first run of new agents over this long; 0 runs them at once.")
    ] = 0
    shutdown_seconds: Annotated[
        int, Seconds("Spreads agents given back at shutdown over this long; 0 makes them due at once.")
    ] = 0
    failure_backoff_ratio: Annotated[float, Float("Share by which a delay after a failure varies up and down.")] = 0.1


class ThrottledBackoffSettings(Section, frozen=True):
    """Delay after a throttling failure: the base, times the multiplier for each further one."""

    base_ms: Annotated[int, Milliseconds("Delay after the first such failure.", least=1)] = 30_000
    multiplier: Annotated[float, Float("Factor for each further one in a row.", least=1.0, most=100.0)] = 2.0
    cap_ms: Annotated[int, Milliseconds("Longest such delay.", least=1)] = 600_000


class FailureBackoffSettings(Section, frozen=True):
    """Delay before the next run by class of failure."""

    enabled: Annotated[bool, Boolean("Choose the delay by the kind of failure; else the agent's error interval.")] = (
        False
    )
    max_immediate_retries: Annotated[
        int, Integer("Runs without delay after transient or server errors in a row.", most=1000)
    ] = 0
    permanent_forbidden_backoff_ms: Annotated[int, Milliseconds("Delay after an access-denied failure.")] = 1_800_000
    throttled: ThrottledBackoffSettings = ThrottledBackoffSettings()


class CircuitBreakerSettings(Section, frozen=True):
    """Circuit breaker of the agents' Redis calls. The numbers are those of acquisition."""

    enabled: Annotated[bool, Boolean("Whether failures stop the calls at all.")] = True
    failure_threshold: Annotated[int, Integer("Failures within the window that open the breaker.", least=1)] = 5
    failure_window_ms: Annotated[int, Milliseconds("The window in which failures are counted.", least=1)] = 10_000
    cooldown_ms: Annotated[int, Milliseconds("Time without calls before recovery is tried.", least=1)] = 30_000
    half_open_duration_ms: Annotated[int, Milliseconds("Time within which a trial must succeed.", least=1)] = 5_000


class ExceptionalAgentsSettings(Section, frozen=True):
    """Agents with long runs."""

    pattern: Annotated[
        str, RegularExpression("Agents whose whole name matches get the longer threshold; empty: none.")
    ] = ""
    threshold_ms: Annotated[int, Milliseconds("Time past the deadline before one of them is a zombie.")] = 3_600_000


class ZombieCleanupSettings(Section, frozen=True):
    """Stops agents of this process that run past their deadline."""

    enabled: Annotated[bool, Boolean("Whether such agents are stopped.")] = True
    threshold_ms: Annotated[int, Milliseconds("Time past the deadline before an agent is a zombie.")] = 30_000
    interval_ms: Annotated[int, Milliseconds("Time between two passes.", least=1)] = 300_000
    run_budget_ms: Annotated[int, Milliseconds(_BUDGET)] = 0
    executor_shutdown_await_ms: Annotated[int, Milliseconds(_AWAIT)] = 10_000
    executor_shutdown_force_await_ms: Annotated[int, Milliseconds(_FORCE_AWAIT)] = 5_000
    exceptional_agents: ExceptionalAgentsSettings = ExceptionalAgentsSettings()


class OrphanCleanupSettings(Section, frozen=True):
    """Releases the agents of crashed processes. One process does it at a time."""

    enabled: Annotated[bool, Boolean("Whether this process takes part.")] = True
    threshold_ms: Annotated[int, Milliseconds("Time past the deadline before an agent is an orphan.")] = 600_000
    interval_ms: Annotated[int, Milliseconds("Time between two passes.", least=1)] = 300_000
    leadership_ttl_ms: Annotated[int, Milliseconds("How long leadership lasts without renewal.", least=1000)] = 120_000
    force_all_pods: Annotated[bool, Boolean("Every process cleans its own shard, without a leader.")] = False
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
        String("Put before every name.", pattern=rf"(?:{_KEY})?", described="nothing, or " + _KEY_DESCRIPTION),
    ] = ""
    waiting_set: Annotated[
        str, String("Sorted set of agents that wait for their time.", pattern=_KEY, described=_KEY_DESCRIPTION)
    ] = "waiting"
    working_set: Annotated[str, String("Sorted set of agents that run.", pattern=_KEY, described=_KEY_DESCRIPTION)] = (
        "working"
    )
    cleanup_leader_key: Annotated[
        str, String("Who leads the orphan cleanup.", pattern=_KEY, described=_KEY_DESCRIPTION)
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
    type: Annotated[AgentSchedulerType, Choice("How agents are chosen.", options=get_args(AgentSchedulerType))] = (
        "priority"
    )
    interval_ms: Annotated[int, Milliseconds("Time between two cycles of the loop.", least=1)] = 1_000
    refresh_period_seconds: Annotated[int, Seconds("Time between two syncs of the agents to Redis.", least=1)] = 30
    health_summary_period_seconds: Annotated[
        int, Seconds("Time between two health lines in the log; 0 or less writes none.", least=-INTEGER_MAX)
    ] = 600
    time_cache_duration_ms: Annotated[int, Milliseconds("How long the offset to the server's clock is kept.")] = 10_000
    batch_operations: BatchOperationsSettings = BatchOperationsSettings()
    jitter: JitterSettings = JitterSettings()
    failure_backoff: FailureBackoffSettings = FailureBackoffSettings()
    circuit_breaker: CircuitBreakerSettings = CircuitBreakerSettings()
    zombie_cleanup: ZombieCleanupSettings = ZombieCleanupSettings()
    orphan_cleanup: OrphanCleanupSettings = OrphanCleanupSettings()
    reconcile: AgentReconcileSettings = AgentReconcileSettings()
    keys: AgentKeySettings = AgentKeySettings()
