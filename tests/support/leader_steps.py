"""The steps of a leader loop, run by the test instead of the loop."""

from functools import partial


async def run_steps(loop, lease, *names):
    """Run the steps of a term once, or only those named: the results by name, without the steps that failed."""
    results = {}

    async def record(name, work):
        results[name] = await work()

    for step in loop.begin_term(lease):
        if not names or step.name in names:
            step.work = partial(record, step.name, step.work)
            await loop.run_step(step)
    return results
