"""A nightly load: each frame writes a small report on the orders of one day, which is kept with the job."""

from __future__ import annotations

import csv
import time
from collections import Counter

from rota import Rota, context

app = Rota()
COUNTRIES = ("de", "fr", "it", "pl")


@app.task
def load(day: str, orders: int = 1000, pause_s: float = 0.0) -> int:
    """Returns the number of sold items, and writes a report by country."""
    now = context()
    sold: Counter[str] = Counter()
    for number in range(orders):
        now.check()
        time.sleep(pause_s)
        sold[COUNTRIES[number * 7 % len(COUNTRIES)]] += 1 + number % 9
    with (now.folder / f"{day}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("country", "sold"), *sorted(sold.items())])
    now.artifact(f"{day}.csv")
    now.log(f"{orders} orders of {day}")
    return sold.total()


@app.task(cores=0.1)
async def announce(days: int) -> str:
    return f"{days} days are loaded, good morning"
