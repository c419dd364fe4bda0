"""One part of the deployment is away for a time, with frames running and waiting: PostgreSQL, Redis, NATS, all servers.

No running frame is stopped, none is lost or run twice, and waiting frames start soon after the return. The short tests
outlast every lease and silence; the long ones last `OUTAGE_S` (600 s), all four at a time:

    .venv/bin/python -m pytest -n 4 -m soak --timeout 3600 -s tests/chaos/pipeline/test_outages.py
"""

import asyncio
import os
import signal
import time
from http.client import HTTPException

import pytest

from rota.agents import membership
from rota.engine.dispatch import dispatcher
from rota.engine.recovery import reconciler
from tests.chaos.pipeline.deployment import POLL_S, START_S, Farm, _fetch
from tests.chaos.pipeline.history import violations
from tests.support.harness.effort import effort
from tests.support.waiting import until

PARTS = ("postgres", "redis", "nats", "servers")
WORKER_TTL_S = 5.0
SHORT_OUTAGE_S = 2.0 + max(reconciler.FIRST_HEARTBEAT_TIMEOUT_S, dispatcher.LEASE_S, membership.LEASE_S, WORKER_TTL_S)
LONG_OUTAGE_S = float(os.environ.get("OUTAGE_S", "600"))
RESUMED_WITHIN_S = 10.0
OUTLAST_S = 10.0
"""Long frames end this long after the outage."""
BACKLOG = 200
BACKLOG_FRAME_S = 0.3


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film", burst=12)
        await farm.show("plain", burst=4, managed=False)
        await farm.start(servers=0, workers=0)
        for number in range(2):
            await farm.add_server(f"server{number}", heartbeat_s=0.5, ROTA_REGISTRY_WORKER_TTL=f"{WORKER_TTL_S}s")
        for number in range(2):
            await farm.add_worker(f"worker{number}", slots=10)
        await farm.until_workers(2)
        yield farm


async def put_under_load(farm, outage_s):
    """Frames that outlast the outage, frames that end within it, and more than can start before it."""
    running = [
        await farm.submit("nap", outage_s + OUTLAST_S, frames=4),
        await farm.submit("crunch", outage_s + OUTLAST_S, frames=2),
        await farm.submit("nap", outage_s / 2, frames=2),
    ]
    await until(lambda: len(farm.read_runs()) == 8, within_s=START_S, what="running frames", every_s=POLL_S)
    for show in ("film", "plain"):
        await farm.submit("nap", BACKLOG_FRAME_S, frames=BACKLOG, show=show)
    await until(lambda: len(farm.read_runs()) > 8 + 10, within_s=START_S, what="a backlog at work", every_s=POLL_S)
    return {str(job) for job in running}


async def take_away(farm, part, outage_s):
    """Returns when it went and when it was back, in monotonic seconds."""
    went_at = time.monotonic()
    if part == "servers":
        for server in farm.servers:
            await server.kill()
        await asyncio.sleep(outage_s)
        for server in farm.servers:
            await server.start()
        await until(lambda: is_ready(farm.servers[0]), within_s=START_S, what="a ready server", every_s=POLL_S)
    else:
        server = farm.stack.servers[part]
        server.process.send_signal(signal.SIGINT if part == "postgres" else signal.SIGKILL)
        await server.process.wait()
        await asyncio.sleep(outage_s)
        await server.restart()
    return went_at, time.monotonic()


async def is_ready(server):
    try:
        return await asyncio.to_thread(_fetch, f"http://127.0.0.1:{server.port}/ready", "")
    except (OSError, HTTPException):
        return False


async def survive(farm, part, outage_s):
    """Returns the seconds until waiting frames started again."""
    processes = {actor.name: actor.pid for actor in (*farm.workers, *(farm.servers if part != "servers" else ()))}
    running = await put_under_load(farm, outage_s)
    went_at, back_at = await take_away(farm, part, outage_s)
    await until(
        lambda: any(run.began > back_at for run in farm.read_runs()),
        within_s=START_S,
        what=f"frames that start after the return of {part}",
        every_s=POLL_S,
    )
    await farm.quiet(within_s=START_S + OUTLAST_S)
    history = await farm.history()
    alive = {actor.name: actor.pid for actor in (*farm.workers, *farm.servers) if actor.alive}
    assert processes.items() <= alive.items(), f"processes ended: {processes.keys() - alive.keys()}"
    assert not (found := violations(history)), "\n".join(map(str, found[:20]))
    frames = [(run.layer, run.frame) for run in history.runs]
    assert len(frames) == len(set(frames)) == 8 + 2 * BACKLOG, "each frame runs once"
    assert all(run.ended is not None for run in history.runs), "no running frame is stopped"
    assert not farm.logged("worker_lost"), "no worker is declared lost"
    assert not farm.logged("worker_session_lost"), "no worker gives up its frames"
    outlasting = [run for run in history.runs if run.job in running and run.began < went_at and run.ended > back_at]
    assert len(outlasting) == 6, "the long frames ran through the outage"
    return min(run.began for run in history.runs if run.began > back_at) - back_at


@pytest.mark.slow("the outage outlasts every lease")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("part", effort(["postgres"], PARTS))
async def test_control_plane_away_for_longer_than_every_lease_keeps_running_frames(farm, part):
    assert await survive(farm, part, SHORT_OUTAGE_S) <= RESUMED_WITHIN_S


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", PARTS)
async def test_soak_outage_of(farm, part, capsys):
    resumed_s = await survive(farm, part, LONG_OUTAGE_S)
    with capsys.disabled():
        print(f"\nsoak outage_of {part}: {LONG_OUTAGE_S:.0f} s away, frames started {resumed_s:.1f} s after its return")
    assert resumed_s <= RESUMED_WITHIN_S
