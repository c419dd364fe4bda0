"""One lap of frames or jobs on servers of its own; prints its figures as JSON. For `bench compare`, in either revision.

python -m bench.e2e.lap frames 50000
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final

from bench.e2e import deployment
from bench.e2e.deployment import Lap, farm
from bench.e2e.setup import one_ground

DATABASE: Final = "lap"


async def measure(what: str, n: int) -> Lap:
    async with one_ground() as ground:
        await deployment.prepare(ground, DATABASE)
        async with farm(ground, DATABASE) as running:
            return await (running.frames(n) if what == "frames" else running.jobs(n))


def main() -> None:
    what, n = sys.argv[1:]
    lap = asyncio.run(measure(what, int(n)))
    print(json.dumps({"cpu_us": lap.cpu_us(), "per_s": lap.per_s}))


if __name__ == "__main__":
    main()
