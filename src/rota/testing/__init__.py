"""Testing code that submits: Rota played in this process, without servers.

    with rota.testing.inline() as rehearsal:
        job = await render.submit("comp")
        rehearsal.assert_submitted(render, "comp")
        assert await job.result() == 3

`inline` runs what is submitted at once, `manual` when it is told to (`drain`). Values go the way they go to a worker
and back, submissions are checked as a server checks them, and retries, keys, times and deadlines count by a clock that
only the test moves. Workflows are played with their delays and with what undoes them; steps that wait for people have
`Rehearsal.approve`. What is not played: quotas, placement, timeouts of frames, the policy, transactions of `task.on`.
"""

from rota.testing.clock import MovableClock
from rota.testing.in_memory import Rehearsal, inline, manual

__all__ = ["MovableClock", "Rehearsal", "inline", "manual"]
