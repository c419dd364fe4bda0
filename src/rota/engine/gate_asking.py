"""Asking the kernel, whoever asks: a word for each question, or an error that says whether anybody was there.

`Unavailable` is silence: nobody answered in time, or the call was cut off. Anything else is a kernel that fails, or
that answers what nobody asked (`PolicyGarbled`); that is no silence, and never opens a gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rota.model.errors import PolicyGarbled, Unavailable
from rota.model.policy import Kernel, Question, Word


async def ask(kernel: Kernel, questions: list[Question], within_s: float) -> Sequence[Word]:
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
    if len(words) != len(questions) or not all(isinstance(word, Word) for word in words):
        raise PolicyGarbled(f"The policy answered {len(questions)} questions with {len(words)} words: mend the kernel.")
    return words
