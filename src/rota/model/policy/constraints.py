"""How policy constraints apply to running frames. No I/O.

| budget | enforced by |
|---|---|
| `max_runtime_ms` | the worker, as the timeout of an attempt: the lower of both |
| `max_retries` | completion: no attempt starts beyond it, whether the last one failed or its worker was lost |
| `max_artifact_bytes` | the worker before it stores anything; the server, which stores none beyond it |
| `max_concurrent_jobs` | dispatch, per show |

The rest (sandbox, toolchain, diff, redaction) is passed to the frame in its environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from rota.model.jobs.work import CONSTRAINTS_ENV, Work
from rota.model.policy.decision import Constraints, PolicyBudgets
from rota.model.protocol import Artifact

_NO_BUDGETS: Final = PolicyBudgets()


def apply_constraints(work: Work, constraints: Constraints) -> Work:
    """`work` with the constraints applied, as it is sent to a worker."""
    budgets = constraints.budgets
    times = [seconds for seconds in (work.timeout_s, budgets.max_runtime_ms / 1000) if seconds > 0]
    return msgspec.structs.replace(
        work,
        timeout_s=min(times, default=0.0),
        artifact_bytes_max=budgets.max_artifact_bytes,
        env={**work.env, **constraints_env(constraints)},
    )


def constraints_env(constraints: Constraints) -> dict[str, str]:
    """Environment variables for the constraints; unset limits are omitted."""
    budgets = constraints.budgets
    values = {
        "ROTA_POLICY_CONSTRAINTS": msgspec.json.encode(constraints, order="deterministic").decode(),
        "ROTA_REDACTION_LEVEL": constraints.redaction_level,
        "ROTA_MAX_ARTIFACT_BYTES": str(budgets.max_artifact_bytes or ""),
        "ROTA_MAX_CONCURRENT_JOBS": str(budgets.max_concurrent_jobs or ""),
        "ROTA_MAX_RETRIES": str(budgets.max_retries) if budgets.max_retries >= 0 else "",
    }
    assert tuple(values) == CONSTRAINTS_ENV
    return {name: value for name, value in values.items() if value}


def artifact_bytes(artifacts: Sequence[Artifact]) -> int:
    """Total size; a pointer ends with the size of its content."""
    return sum(int(each.pointer.rpartition(":")[2]) if each.pointer else len(each.data) for each in artifacts)


def budgets_of(constraints: Constraints | None) -> PolicyBudgets:
    return _NO_BUDGETS if constraints is None else constraints.budgets
