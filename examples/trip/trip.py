"""A trip is a flight, a hotel and a car, or nothing: `trip.py CITY` books one, and prints the result."""

from __future__ import annotations

import sys

from rota import Fatal, Rota, RunNotSucceeded, Steps

app = Rota()


@app.task(retries=3, timeout="1min")
async def book(what: str, city: str) -> str:
    """Errors are retried, except `Fatal`: nothing is available."""
    if (what, city) == ("car", "Venice"):
        raise Fatal("there are no cars in Venice")
    return f"{what} in {city}"


@app.task
async def give_back(booking: str) -> None: ...


@app.workflow(timeout="1h")
def trip(steps: Steps, city: str) -> list[str]:
    flight = steps.job("flight", book.call("flight", city), compensate=give_back.call)
    hotel = steps.job("hotel", book.call("hotel", city), compensate=give_back.call, after=flight)
    car = steps.job("car", book.call("car", city), compensate=give_back.call, after=hotel)
    return [flight.output, hotel.output, car.output]


if __name__ == "__main__":
    run = trip.sync.start(sys.argv[1])
    try:
        print("\n".join(run.result(timeout=60)))
    except RunNotSucceeded as failure:
        print(failure.error)
        print("given back:", ", ".join(entry.step for entry in run.saga().entries))
