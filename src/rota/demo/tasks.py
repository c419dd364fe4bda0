"""The app of the demo's workers. Every frame returns a value, so that each of its results is stored."""

from __future__ import annotations

import asyncio

from rota.sdk import Fatal, Retry, Rota, Steps, context

app = Rota()


@app.task
async def render(seconds: float) -> str:
    """Durations differ between frames, but are the same in every run."""
    frame_context = context()
    await asyncio.sleep(seconds * (0.6 + 0.1 * (frame_context.frame * 7 % 9)))
    return f"frame.{frame_context.frame:04d}.exr"


@app.task
async def train(seconds: float) -> list[int]:
    await asyncio.sleep(seconds)
    return list(context().gpus)


@app.task
async def notes(number: float) -> dict[str, str]:
    """Leaks a (fake) key, as a careless program would."""
    return {"note": f"used {'AKIA'}{'DEMO' * 4} for node {number:g}"}


@app.agent(every="1s", timeout="10s")
async def pulse() -> None:
    """Runs on whichever worker acquires it."""


@app.task
async def flaky(broken: int) -> int:
    """Every first attempt fails; one frame never succeeds."""
    frame_context = context()
    await asyncio.sleep(0.1)
    if frame_context.frame == broken:
        raise Fatal(f"there is no texture for frame {frame_context.frame}")
    if frame_context.attempt == 1:
        raise Retry("the file server hung up", after=1.0)
    return frame_context.attempt


@app.task
async def book(what: str, city: str) -> str:
    await asyncio.sleep(0.1)
    if what == "car":
        raise Fatal(f"there is no car left in {city}")
    return f"{what} in {city}"


@app.task
async def give_back(booking: str) -> str:
    await asyncio.sleep(0.1)
    return f"gave back the {booking}"


@app.workflow(show="short", priority=8)
def trip(steps: Steps, city: str) -> dict[str, str]:
    """Three bookings that are only useful together."""
    flight = steps.job("flight", book.call("flight", city), compensate=give_back.call)
    hotel = steps.job("hotel", book.call("hotel", city), compensate=give_back.call, after=flight)
    car = steps.job("car", book.call("car", city), compensate=give_back.call, after=hotel)
    return {"flight": flight.output, "hotel": hotel.output, "car": car.output}
