"""Asking the kernel, whoever asks: a word for each question, or an error that says whether anybody was there; and what
it is told of a job that is stored.

`Unavailable` is silence: nobody answered in time, or the call was cut off. Anything else is a kernel that fails, or
that answers what nobody asked (`PolicyGarbled`); that is no silence, and never opens a gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from rota.infra.postgres import Record
from rota.model.errors import InvalidPolicyResponse, Unavailable
from rota.model.policy.decision import Kernel, PolicyDecision, PolicyRequestGroup
from rota.policy.request_builder import PolicyInput, PolicyInputLayer


async def query_kernel(
    kernel: Kernel, questions: list[PolicyRequestGroup], within_s: float
) -> Sequence[PolicyDecision]:
    try:
        async with asyncio.timeout(within_s):
            words = await kernel.check(questions)
    except TimeoutError as late:
        raise Unavailable(f"The policy did not answer within {within_s:g} s: it is asked again.") from late
    except asyncio.CancelledError as cut_off:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable("The call to the policy was cut off: it is asked again.") from cut_off
    if len(words) != len(questions) or not all(isinstance(word, PolicyDecision) for word in words):
        raise InvalidPolicyResponse(
            f"The policy answered {len(questions)} questions with {len(words)} words: mend the kernel."
        )
    return words


def policy_input_from_row(row: Record) -> PolicyInput:
    """A stored job as rules see it; `row` has a list for each of the columns of its layers."""
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
