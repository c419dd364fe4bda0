"""What a running Rota tells: `logs` (structlog), `metrics` (Prometheus), `tracing` (OpenTelemetry's API).

Nothing is imported here, so that each caller pays only for what it uses.
"""
