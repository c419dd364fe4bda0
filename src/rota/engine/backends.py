"""The servers that the parts of an engine share, and what is kept on them."""

from __future__ import annotations

from typing import NamedTuple

from redis.asyncio import Redis

from rota.accounting.service import AccountingService
from rota.infra.blob_store import BlobStore
from rota.infra.lease import Leases
from rota.infra.nats import Bus
from rota.infra.postgres import Database
from rota.queue import Queue


class Backends(NamedTuple):
    database: Database
    redis: Redis
    bus: Bus
    accounting: AccountingService
    queue: Queue
    store: BlobStore
    leases: Leases
