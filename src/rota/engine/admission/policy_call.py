"""One call to the policy engine: a decision for each request, or an error; and the policy input of a stored job.

`Unavailable` means no reply: a timeout, or a call that was cut off. Any other error is a failing policy engine or a
malformed reply (`InvalidPolicyResponse`); it never triggers fail-open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from rota.infra.postgres import Record
from rota.model.errors import InvalidPolicyResponse, Unavailable
from rota.model.policy.decision import Kernel, PolicyDecision, PolicyRequestGroup
from rota.model.settings.lifecycle import SafetySettings
from rota.policy.request_builder import PolicyInput, PolicyInputLayer

KERNEL_MARGIN_S: Final = 1.0
"""Added to `safety.timeout`: the client of a remote kernel ends its call itself and says why."""
KERNEL_TIMEOUT_S: Final = SafetySettings().timeout + KERNEL_MARGIN_S


def kernel_timeout_s(safety: SafetySettings) -> float:
    return safety.timeout + KERNEL_MARGIN_S


async def query_kernel(
    kernel: Kernel, questions: list[PolicyRequestGroup], within_s: float
) -> Sequence[PolicyDecision]:
    try:
        async with asyncio.timeout(within_s):
            decisions = await kernel.check(questions)
    except TimeoutError as error:
        raise Unavailable(f"The policy did not answer within {within_s:g} s: the call is retried.") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable("The call to the policy was cut off: the call is retried.") from error
    if len(decisions) != len(questions) or not all(isinstance(decision, PolicyDecision) for decision in decisions):
        raise InvalidPolicyResponse(
            f"The policy answered {len(questions)} requests with {len(decisions)} decisions: fix the policy engine."
        )
    return decisions


def policy_input_from_row(row: Record) -> PolicyInput:
    """A stored job as rules see it; `row` holds a list for each layer column."""
    requires = msgspec.json.decode(row["requires"], type=list[tuple[str, ...]])
    layers = zip(row["works"], requires, row["frames"], row["input_bytes"], strict=True)
    return PolicyInput(
        row["show"],
        row["folder"],
        row["dept"],
        row["topic"],
        row["priority"],
        row["labels"],
        row["request"],
        row["workflow_id"],
        tuple(PolicyInputLayer(*layer) for layer in layers),
    )
