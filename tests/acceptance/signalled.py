"""A process with one service that tests send signals to: `python -m tests.acceptance.signalled MODE`."""

import asyncio
import sys

import uvloop

from rota.infra.service import RestartPolicy, Service, Supervisor, lifecycle, run_until_signalled
from rota.infra.telemetry import logs
from rota.model.backoff import Backoff


async def finish(life):
    """`drains` stops on drain, `slow` only on cancellation, `stuck` never."""
    while True:
        try:
            await life.until_draining()
            print("draining", flush=True)
            if sys.argv[1] == "drains":
                return
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("cancelled", flush=True)
            if sys.argv[1] != "stuck":
                raise


async def body(life):
    if sys.argv[1] == "starting":
        print("starting", flush=True)
        await asyncio.Event().wait()
    life.ready()
    print("ready", flush=True)
    if sys.argv[1] == "failing":
        raise ValueError("password=c4nary")
    await finish(life)


def main():
    logs.configure("json", "info")
    lifecycle.CANCEL_GRACE_S = 0.05
    supervisor = Supervisor(drain_budget_s=60)
    supervisor.add(Service("one", body, restarts=RestartPolicy(limit=1, pauses=Backoff(0.001, 10.0))))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if "uvloop" in sys.argv else None) as runner:
        sys.exit(runner.run(run_until_signalled(supervisor)))


if __name__ == "__main__":
    main()
