"""The root of the settings tree. Its fields are the sections of the settings file."""

from __future__ import annotations

from rota.model.settings.accounting import AccountingSettings
from rota.model.settings.lifecycle import (
    InputPolicySettings,
    OutputPolicySettings,
    PolicySettings,
    QueueSettings,
    ReconcilerSettings,
    RegistrySettings,
    ReplayerSettings,
    RetentionSettings,
    RoutingSettings,
    SafetyKernelSettings,
    SafetySettings,
    SagaSettings,
    SchedulerSettings,
    WorkerSettings,
    WorkflowSettings,
)
from rota.model.settings.process import ApiSettings, GrpcSettings, ListenSettings, LogSettings, ServiceSettings
from rota.model.settings.section import Section
from rota.model.settings.servers import LocalSettings, NatsSettings, PostgresSettings, RedisSettings
from rota.model.settings.store import StoreSettings


class Settings(Section, frozen=True):
    """All settings. `Settings()` has the defaults."""

    postgres: PostgresSettings = PostgresSettings()
    redis: RedisSettings = RedisSettings()
    nats: NatsSettings = NatsSettings()
    local: LocalSettings = LocalSettings()
    listen: ListenSettings = ListenSettings()
    api: ApiSettings = ApiSettings()
    log: LogSettings = LogSettings()
    service: ServiceSettings = ServiceSettings()
    grpc: GrpcSettings = GrpcSettings()
    accounting: AccountingSettings = AccountingSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    reconciler: ReconcilerSettings = ReconcilerSettings()
    replayer: ReplayerSettings = ReplayerSettings()
    routing: RoutingSettings = RoutingSettings()
    registry: RegistrySettings = RegistrySettings()
    worker: WorkerSettings = WorkerSettings()
    queue: QueueSettings = QueueSettings()
    retention: RetentionSettings = RetentionSettings()
    store: StoreSettings = StoreSettings()
    safety: SafetySettings = SafetySettings()
    safety_kernel: SafetyKernelSettings = SafetyKernelSettings()
    policy: PolicySettings = PolicySettings()
    input_policy: InputPolicySettings = InputPolicySettings()
    output_policy: OutputPolicySettings = OutputPolicySettings()
    workflow: WorkflowSettings = WorkflowSettings()
    saga: SagaSettings = SagaSettings()
