"""Infrastructure: access to PostgreSQL, Redis and NATS, and what every long-running process needs.

    postgres/      pool, transactions, statements, notifications, migrations
    redis/         client, Lua scripts with a contract, key names, server clock
    nats/          JetStream: publish, consume, ordered reads
    lease/         leases with fencing tokens, leader election
    outbox/        messages committed with the state change, relay to NATS
    audit/         append-only hash chain of actions
    blob_store/    large values in PostgreSQL or files
    breaker/       circuit breakers, local or shared in Redis
    rpc/           gRPC server, authentication, protobuf
    service/       service lifecycle, supervisor, HTTP listener
    telemetry/     logs, metrics, tracing, redaction
    asyncio_cancel, clock, data_dir, extras, failpoints, loop, replica, settings_file, yaml_reader

Invariants: every wait that leaves the process has a timeout; nothing here retries an operation whose outcome is
unknown; infra imports only `api` and `model`. Callers: all packages above it.
"""
