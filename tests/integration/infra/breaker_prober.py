"""A process that asks a shared breaker for a permit: `python -m tests.integration.infra.breaker_prober URL NAME`.

Prints the answer. With CRASH_AT=breaker.granted it crashes between the grant and the call.
"""

import asyncio
import sys

import structlog

from rota.infra.breaker import Breaker
from rota.infra.clock import SystemClock
from rota.infra.redis import RedisKeys, RedisTarget, connect
from rota.model.circuit_breaker import BreakerConfig, ConsecutiveFailures, ProbesByCount
from rota.model.errors import BreakerOpen

SAFETY = BreakerConfig(counting=ConsecutiveFailures(3), open_ms=30_000, probing=ProbesByCount(3, successes=2))


async def main(url, name):
    async with connect(RedisTarget(url=url)) as client:
        breaker = Breaker.shared(name, SAFETY, SystemClock(), client, RedisKeys())
        try:
            await breaker.allow()
        except BreakerOpen as refused:
            print("refused", refused.facts["retry_ms"], flush=True)
        else:
            print("granted", breaker.phase, flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(*sys.argv[1:]))
