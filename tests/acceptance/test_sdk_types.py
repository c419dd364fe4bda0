"""SDK types from task to result: the type checker accepts correct code and rejects wrong code.

A line that must be rejected names the expected error, as in `# wrong: arg-type`; any other error fails the test.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ERROR = re.compile(r"^[^:]+:(\d+): error: (.*)  \[([\w-]+)\]$")
HEAD = """
from datetime import UTC, datetime
from collections.abc import Sequence
from typing import Any, TypedDict, assert_type
from rota.api.jobs import JobSummary
from rota.api.resources import CapsView, SubscriptionView, ShowView
from rota import Call, Job, JobFailed, LayerSpec, Rota, Run, Step, Steps, Submission, SyncJob, SyncRun

app = Rota("http://localhost", key="...", show="film")

@app.task(topic="render", cores=2, memory="4GiB", retries=3, timeout="10min")
async def render(scene: str, frame: int = 1) -> bytes:
    return b""

@app.task
def square(value: int) -> float:
    return value * value

@app.task
async def nothing() -> None: ...

class Ticket(TypedDict):
    number: str
    price: int

@app.task
async def book(city: str) -> Ticket:
    return {"number": city, "price": 1}

@app.task
def cancel(ticket: Ticket, why: str = "") -> None: ...

@app.workflow
def trip(steps: Steps, city: str, nights: int = 2) -> Ticket:
    flight = steps.job("flight", book.call(city), compensate=cancel.call, when=nights > 2)
    assert_type(flight, Step[Ticket])
    steps.job("back", book.call(f"from {city}"), compensate=lambda ticket: cancel.call(ticket, ticket["number"]))
    assert_type(steps.each("each", square.call, [1, 2], max_parallel=2).output, list[float])
    assert_type(steps.loop("loop", square.call(nights), until=lambda found: found > 2).output, float)
    with steps.parallel("both", need="any", after=flight):
        steps.job("one", square.call(flight.output["price"] + nights))
    return flight.output

@app.workflow(name="outer", rollback_on=["failed"])
def outer(steps: Steps, where: str) -> dict[str, str]:
    inner = steps.workflow("inner", trip.call(where, nights=3))
    return {"number": inner.output["number"]}
"""
RIGHT = """
async def right() -> None:
    assert_type(square(2), float)
    assert_type(await render("a", frame=2), bytes)
    assert_type(await render.submit("a", frame=2), Job[bytes])
    assert_type(await (await square.submit(2)).result(), float)
    assert_type(await (await square.map(range(5))).result(timeout=5), list[float])
    assert_type(await (await nothing.submit()).result(), None)
    assert_type(await (await render.submit_frames("1-10x2", "a")).result(), list[bytes])
    assert_type(await app.submit(Submission(show="film", layers=(LayerSpec(argv=("true",)),))), Job[Any])
    assert_type(render.call("a"), Call[bytes])
    assert_type(await render.submit_many([render.call("a"), render.call("b", 2)]), list[Job[bytes]])
    later = render.options(priority="BATCH", labels={"a": "b"}, cores=0.5).schedule(at=datetime.now(UTC))
    assert_type(await later.submit("a"), Job[bytes])
    assert_type(await later("a"), bytes)
    assert_type(await render.on(object()).submit("a"), Job[bytes])
    assert_type(await render.job("...").result(), bytes)
    assert_type(await app.shows.set_managed("film", True), ShowView)
    assert_type(await app.folders.change("film", "fx", max_cores=2.5), CapsView)
    assert_type(await app.jobs.list(state="RUNNING", most=5), Sequence[JobSummary])
    try:
        await nothing.submit()
    except JobFailed as failure:
        print(failure.reason, failure.frame, failure.traceback)

async def right_runs() -> None:
    run = await trip.options(key="k").start("Oslo", nights=3)
    assert_type(run, Run[Ticket])
    assert_type(await run.result(timeout=3), Ticket)
    assert_type(await run.rerun("flight"), Run[Ticket])
    assert_type(await (await outer.start("Oslo")).result(), dict[str, str])
    assert_type(await app.workflows.start("trip", {"city": "Oslo"}), Run[Any])
    assert_type(run.sync, SyncRun[Ticket])

def right_without_a_loop() -> None:
    assert_type(trip.sync.start("Oslo"), SyncRun[Ticket])
    assert_type(trip.sync.start("Oslo").rerun("flight").result(), Ticket)
    assert_type(app.sync.workflows.start("trip"), SyncRun[Any])
    assert_type(render.sync.submit("a", frame=2), SyncJob[bytes])
    assert_type(square.sync.options(key="k").submit(2).result(), float)
    assert_type(square.sync.map([1, 2]).result(), list[float])
    assert_type(square.sync.submit_frames(3, 2).result(), list[float])
    assert_type(square.sync.submit_many([square.call(1)])[0].result(), float)
    assert_type(app.sync.shows.set_managed("film", True), ShowView)
    assert_type(app.sync.subscriptions.create("film", "local", size=4, burst=8), SubscriptionView)
    for line in render.sync.submit("a").logs(follow=True):
        assert_type(line, str)
"""
WRONG = """
async def wrong() -> None:
    await render.submit(5)  # wrong: arg-type
    await render.submit()  # wrong: call-arg
    await render.submit("a", colour="red")  # wrong: call-arg
    await render.submit("a", 1, 2)  # wrong: call-arg
    await square.map(["text"])  # wrong: list-item
    await nothing.map([1])  # wrong: arg-type, misc
    await square.submit_frames("1-10", "text")  # wrong: arg-type
    await square.submit_frames("1-10")  # wrong: call-arg
    await app.submit(square.call(1))  # wrong: arg-type
    name: str = await (await square.submit(2)).result()  # wrong: assignment
    render.options(prio=5)  # wrong: call-arg
    render.options(priority=[5])  # wrong: arg-type
    await render.submit_many([square.call(1)])  # wrong: list-item
    square("text")  # wrong: arg-type
    render.schedule(at=None)  # wrong: arg-type
    app.task(corse=2)  # wrong: call-overload
    await app.shows.set_managed("film")  # wrong: call-arg
    await app.folders.change("film", "fx", max_coers=2)  # wrong: call-arg
    show: str = await app.shows.create("film")  # wrong: assignment

@app.workflow
def wrong_steps(steps: Steps, city: str) -> int:
    flight = steps.job("flight", book.call(city), compensate=square.call)  # wrong: arg-type
    steps.job("a", square.call(flight.output["number"]))  # wrong: arg-type
    steps.each("b", square.call, ["text"])  # wrong: arg-type
    steps.job("c", book.call(city), wen=True)  # wrong: call-arg
    steps.workflow("d", trip.call(5))  # wrong: arg-type
    return flight.output  # wrong: return-value

async def wrong_runs() -> None:
    await trip.start(5)  # wrong: arg-type
    await trip.start("a", colour=1)  # wrong: call-arg
    number: str = await (await trip.start("a")).result()  # wrong: assignment
    app.workflow(rolback_on=["failed"])  # wrong: call-overload
    app.workflow(rollback_on=["faild"])  # wrong: list-item

def wrong_without_a_loop() -> None:
    trip.sync.start(5)  # wrong: arg-type
    render.sync.submit(5)  # wrong: arg-type
    square.sync.map(["text"])  # wrong: list-item
    name: str = square.sync.submit(2).result()  # wrong: assignment
    app.sync.pools.drain(5)  # wrong: arg-type
    show: str = app.sync.shows.create("film")  # wrong: assignment
"""


@pytest.mark.timeout(180)
def test_type_checker_accepts_correct_and_rejects_wrong_sdk_calls(tmp_path):
    snippet = tmp_path / "snippet.py"
    snippet.write_text(HEAD + RIGHT + WRONG)
    # With the options of the gate, so that what the gate has analysed is not analysed again.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(snippet)]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=170)
    lines = snippet.read_text().splitlines()
    expected = {
        (at, code)
        for at, line in enumerate(lines, 1)
        if "# wrong: " in line
        for code in line.rpartition("# wrong: ")[2].split(", ")
    }
    errors = [match for match in map(ERROR.match, ended.stdout.splitlines()) if match]
    found = {(int(match[1]), match[3]) for match in errors}
    assert found == expected, ended.stdout + ended.stderr
