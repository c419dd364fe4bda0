"""Agents that answer questions: each calls a model, uses tools concurrently, and retries when the model is busy.

The model and the tools are simulated, so the output is always the same. Async tasks of one worker share its event loop:
hundreds of agents that mostly wait for I/O cost little.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rota import Fatal, Retry, Rota, context

app = Rota()
KNOWN = {"rota": "a list of who does what, and when", "frame": "the unit that is queued, booked and run"}
TOKENS_PER_WORD = 2


async def search(word: str) -> str:
    await asyncio.sleep(0.02)
    return KNOWN.get(word, "")


async def count(word: str) -> int:
    await asyncio.sleep(0.01)
    return len(word)


async def ask_model(prompt: str) -> str:
    """Simulates a model that is busy on the first attempt of some questions."""
    await asyncio.sleep(0.01)
    if context().attempt == 1 and "frame" in prompt:
        raise Retry("the model is busy", after=0.05)
    return prompt.rsplit(maxsplit=1)[-1].strip("?").lower()


@app.task(cores=0.1, retries=3, timeout="1min")
async def answer(question: str, tokens_max: int = 100) -> dict[str, Any]:
    now = context()
    spent = TOKENS_PER_WORD * len(question.split())
    if spent > tokens_max:
        raise Fatal(f"the question takes {spent} tokens, and {tokens_max} are left")
    topic = await ask_model(question)
    now.progress(50, f"looking for {topic}")
    async with asyncio.TaskGroup() as tools:
        found, letters = tools.create_task(search(topic)), tools.create_task(count(topic))
    now.log(f"{topic}: {found.result() or 'nothing found'}")
    return {"topic": topic, "answer": found.result() or "I do not know", "letters": letters.result(), "tokens": spent}
