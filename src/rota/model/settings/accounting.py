"""Settings of accounting."""

from __future__ import annotations

from typing import Annotated

from rota.model.settings.kinds import Boolean, Duration, Integer, Seconds, String, Url
from rota.model.settings.section import Section


class AccountingRedisSettings(Section, frozen=True):
    """The Redis of the live ledger, if it is not that of `redis.url`."""

    enabled: Annotated[
        bool, Boolean("Whether bookings and releases use Redis; without it managed shows are not booked.")
    ] = True
    host: Annotated[
        str | None,
        String(
            "Its host; overrides the one in the URL.", pattern=r"[\w.:%-]{1,253}", described="a host name or address"
        ),
    ] = None
    port: Annotated[int | None, Integer("Its port; overrides the one in the URL.", least=1, most=65535)] = None


class AccountingSettings(Section, frozen=True):
    """Quotas and bookings."""

    redis_url: Annotated[
        str | None, Url("Redis of the live ledger, instead of redis.url.", schemes=("redis", "rediss", "unix"))
    ] = None
    redis_pool_size: Annotated[int, Integer("Maximum number of connections to it.", least=1, most=10_000)] = 20
    redis: AccountingRedisSettings = AccountingRedisSettings()
    recompute_interval_seconds: Annotated[int, Seconds("Interval between recomputations of booked usage.", least=1)] = (
        120
    )
    limit_reseed_interval_seconds: Annotated[
        int, Seconds("Interval between copies of all limits to Redis.", least=1)
    ] = 300
    recalculate_subs_interval: Annotated[
        float, Duration("Interval between recalculations of the subscriptions of unmanaged shows.", least=1.0)
    ] = 7200.0
    managed_shows_ttl: Annotated[float, Duration("How long the accounting mode of a show is cached.")] = 30.0
    cas_max_retries: Annotated[
        int, Integer("Retries of a recomputation that lost a race with another one or a reseed.", most=1000)
    ] = 3
