"""An in-memory Rota for tests of code that submits jobs; no servers needed.

    with rota.testing.inline() as rehearsal:
        job = await render.submit("comp")
        rehearsal.assert_submitted(render, "comp")
        assert await job.result() == 3

`inline` runs jobs during `submit`, `manual` runs them on `drain`. Values are encoded and decoded as for a worker,
submissions are validated as by a server, and retries, idempotency keys, start times and deadlines follow a clock that
only the test moves. Workflows run with delays and compensations; `Rehearsal.approve` decides approval steps. Not
simulated: quotas, placement, timeouts of frames, the policy, transactions of `task.on`.

The decisions are made by the functions the engine, the workflow executor and the worker use (`simulated_jobs`,
`simulated_runs`); `in_memory` and `transport` replace the HTTP client. So it needs `rota[server]`.
"""

from rota.infra.extras import needs_extra

with needs_extra("server", "rota.testing"):
    from rota.testing.clock import MovableClock
    from rota.testing.in_memory import Rehearsal, inline, manual

__all__ = ["MovableClock", "Rehearsal", "inline", "manual"]
