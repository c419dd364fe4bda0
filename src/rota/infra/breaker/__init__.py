"""Breakers: stop calling a service that fails, in this process or in all replicas at once."""

from rota.infra.breaker.breaker import Breaker, BreakerStatus
from rota.infra.breaker.machine import BreakerPermit

__all__ = ["Breaker", "BreakerPermit", "BreakerStatus"]
