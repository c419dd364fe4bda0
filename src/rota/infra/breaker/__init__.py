"""Circuit breakers: stop calling a failing service, per process or shared by all replicas.

    breaker    `async with breaker.call(): …`, logs and metrics
    machine    where the state lives: in this process, or in Redis with a local fallback
    step.lua   the transition in Redis; a copy of `model/circuit_breaker.py`, compared by a property test

Invariants: every permit is reported once, to the machine that granted it; an unavailable Redis delays a caller only
occasionally and never fails it. Callers: policy client, agents.
"""

from rota.infra.breaker.breaker import Breaker, BreakerStatus
from rota.infra.breaker.machine import BreakerPermit

__all__ = ["Breaker", "BreakerPermit", "BreakerStatus"]
