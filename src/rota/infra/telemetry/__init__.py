"""Telemetry: `logs` (structlog), `metrics` (Prometheus), `tracing` (OpenTelemetry's API), `redaction` of secrets.

Nothing is imported here, so that each caller pays only for what it uses. Invariant: log lines and spans pass through
`redaction`. Callers: every package.
"""
