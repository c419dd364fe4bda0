"""The whole tree. Its fields are the sections of the settings file."""

from __future__ import annotations

from rota.model.settings.accounting import Accounting
from rota.model.settings.lifecycle import (
    InputPolicy,
    OutputPolicy,
    Policy,
    Queue,
    Reconciler,
    Registry,
    Replayer,
    Retention,
    Routing,
    Safety,
    SafetyKernel,
    Saga,
    Scheduler,
    Worker,
    Workflow,
)
from rota.model.settings.process import Api, Grpc, Listen, Log, Service
from rota.model.settings.section import Section
from rota.model.settings.servers import Local, Nats, Postgres, Redis
from rota.model.settings.store import Store


class Settings(Section, frozen=True):
    """Everything that may be set. `Settings()` is the defaults."""

    postgres: Postgres = Postgres()
    redis: Redis = Redis()
    nats: Nats = Nats()
    local: Local = Local()
    listen: Listen = Listen()
    api: Api = Api()
    log: Log = Log()
    service: Service = Service()
    grpc: Grpc = Grpc()
    accounting: Accounting = Accounting()
    scheduler: Scheduler = Scheduler()
    reconciler: Reconciler = Reconciler()
    replayer: Replayer = Replayer()
    routing: Routing = Routing()
    registry: Registry = Registry()
    worker: Worker = Worker()
    queue: Queue = Queue()
    retention: Retention = Retention()
    store: Store = Store()
    safety: Safety = Safety()
    safety_kernel: SafetyKernel = SafetyKernel()
    policy: Policy = Policy()
    input_policy: InputPolicy = InputPolicy()
    output_policy: OutputPolicy = OutputPolicy()
    workflow: Workflow = Workflow()
    saga: Saga = Saga()
