"""docs/reference/metrics.md matches the code and maps every metric name of the seed projects."""

import importlib
import pkgutil
from pathlib import Path

import pytest

import rota
from rota.infra.telemetry.metrics import REGISTRY

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
SEED = (
    *("jobs_received", "jobs_dispatched", "jobs_completed", "safety_denied", "safety_unavailable", "dispatch_latency"),
    *("job_lock_wait", "active_goroutines", "stale_jobs", "orphan_replayed"),
    *("saga_recorded", "saga_rollback_triggered", "saga_compensation_dispatched", "saga_compensation_failed"),
    *("saga_rollback_duration", "saga_active", "saga_unmarshal_error"),
)

SEED_OF_AGENTS = (
    "scheduler.registeredAgents",
    "scheduler.activeAgents",
    "scheduler.readyCount",
    "scheduler.oldestOverdueSeconds",
    "scheduler.degraded",
    "scheduler.capacityPerCycle",
    "scheduler.queueDepth",
    "scheduler.semaphoreAvailable",
    "scheduler.completionQueueSize",
    "scheduler.timeOffsetMs",
    "scheduler.readyToCapacityRatio",
    "scheduler.permitMismatch",
    "executor.activeThreads",
    "executor.poolSize",
    "executor.queueSize",
    "executor.completedTasks",
    "redisPool.active",
    "redisPool.idle",
    "redisPool.waiters",
    "redisPool.errors",
    "run.cycleTime",
    "run.failures",
    "acquire.attempts",
    "acquire.acquired",
    "acquire.time",
    "acquire.submissionFailures",
    "acquire.batchFallbacks",
    "acquire.stallDetected",
    "circuitBreaker.trip",
    "circuitBreaker.recovery",
    "circuitBreaker.blocked",
    "validation.acquireFailures",
    "validation.invalidMember",
    "validation.invalidPair",
    "validation.scriptResultTypeError",
    "validation.inconsistentActive",
    "repopulate.time",
    "repopulate.added",
    "repopulate.errors",
    "cleanup.time",
    "cleanup.cleaned",
    "cleanup.skipped",
    "cleanup.timeout",
    "scripts.eval",
    "scripts.latency",
    "scripts.errors",
    "scripts.reloads",
    "removeAgent.fallbackUsed",
    "atomicReschedule.failed",
    "cas.contention",
    "schedule.retryExhausted",
    "schedule.recovery",
)


def declared_rows():
    """Rows the page should have."""
    for module in pkgutil.walk_packages(rota.__path__, "rota."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = [each for each in REGISTRY._collector_to_names if hasattr(each, "_labelnames")]
    known = [
        each for each in found if not each._name.startswith("rota_test_")
    ]  # declared by other tests in this process
    return [_row(each) for each in sorted(known, key=lambda each: each._name)]


def _row(metric):
    name = f"{metric._name}_total" if metric._type == "counter" else metric._name
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"| `{name}` | {metric._type} | {labels} | {metric._documentation} |"


def page_rows(heading):
    part = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line for line in part.splitlines() if line.startswith("| `")]


def test_metrics_page_lists_every_declared_metric():
    assert page_rows("All metrics") == declared_rows(), "\n".join(declared_rows())


@pytest.mark.parametrize(("heading", "seed"), [("Earlier names", SEED), ("Earlier names: agents", SEED_OF_AGENTS)])
def test_metrics_page_maps_every_seed_metric_to_existing_metrics(heading, seed):
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in page_rows(heading)]
    assert [row[0].strip("`") for row in rows] == list(seed)
    names = {row.split("`")[1] for row in declared_rows()}
    mentioned = {name for row in rows for name in row[1].split("`")[1::2]}
    assert mentioned <= names
