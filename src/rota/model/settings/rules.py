"""Rules across several settings: values that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rota.model.settings.leaves import value_at
from rota.model.settings.redis_use import host_and_port
from rota.model.settings.tree import Settings


class Conflict(msgspec.Struct, frozen=True):
    """`paths` are the settings that contradict each other; `sentence` says why and what to do."""

    paths: tuple[str, ...]
    sentence: str


def conflicts(settings: Settings) -> Iterator[Conflict]:
    yield from _out_of_order(settings)
    yield from _agents(settings)
    yield from _safety(settings)
    yield from _accounting_redis(settings)
    yield from _listen(settings)
    yield from _grpc(settings)


def _out_of_order(settings: Settings) -> Iterator[Conflict]:
    throttled = "redis.scheduler.failure_backoff.throttled."
    for low, high in (
        ("postgres.pool_min", "postgres.pool_max"),
        ("scheduler.backoff_base", "scheduler.backoff_max"),
        (throttled + "base_ms", throttled + "cap_ms"),
        ("worker.heartbeat_interval", "registry.worker_ttl"),
        ("registry.snapshot_interval", "registry.snapshot_lock_ttl"),
        ("postgres.lock_timeout", "postgres.statement_timeout"),
        ("nats.publish_timeout", "nats.job_ack_wait"),
        ("nats.job_ack_wait", "nats.max_age"),
        ("saga.rollback_timeout", "saga.lock_ttl"),
        ("safety.circuit_close_after", "safety.circuit_half_open_max"),
    ):
        if _number(settings, low) > _number(settings, high):
            yield Conflict((low, high), f"{low} must not exceed {high}: change one of them.")


def _number(settings: Settings, path: str) -> float:
    value = value_at(settings, path)
    assert isinstance(value, int | float), f"{path} is not a number"
    return value


def _agents(settings: Settings) -> Iterator[Conflict]:
    keys, orphans = settings.redis.scheduler.keys, settings.redis.scheduler.orphan_cleanup
    if len({keys.waiting_set, keys.working_set, keys.cleanup_leader_key}) < 3:
        path = "redis.scheduler.keys."
        paths = (path + "waiting_set", path + "working_set", path + "cleanup_leader_key")
        yield Conflict(paths, "the agents' two sets and their leader key share a name: use three different names.")
    if orphans.run_budget_ms and orphans.leadership_ttl_ms < orphans.run_budget_ms + 60_000:
        path = "redis.scheduler.orphan_cleanup."
        yield Conflict(
            (path + "leadership_ttl_ms", path + "run_budget_ms"),
            f"{path}leadership_ttl_ms must be at least a minute more than {path}run_budget_ms, "
            f"here {orphans.run_budget_ms + 60_000}.",
        )


def _safety(settings: Settings) -> Iterator[Conflict]:
    kernel, policy = settings.safety_kernel, settings.policy
    section = "safety_kernel."
    if kernel.tls_required and kernel.insecure:
        yield Conflict(
            (section + "tls_required", section + "insecure"),
            "safety_kernel.tls_required and safety_kernel.insecure contradict each other: set only one of them.",
        )
    if bool(kernel.tls_cert) != bool(kernel.tls_key):
        yield Conflict(
            (section + "tls_cert", section + "tls_key"),
            "safety_kernel.tls_cert and safety_kernel.tls_key belong together: set both or none.",
        )
    if policy.signature_required and not policy.public_key_file:
        yield Conflict(
            ("policy.signature_required", "policy.public_key_file"),
            "policy.signature_required needs a key to verify signatures: set policy.public_key_file.",
        )
    yield from _kernel_client(settings)
    yield from _kernel_server(settings)


def _kernel_client(settings: Settings) -> Iterator[Conflict]:
    kernel = settings.safety_kernel
    host = (kernel.addr or "").rpartition(":")[0].strip("[]")
    if host and not _is_loopback(host) and not (kernel.tls_ca or kernel.tls_required or kernel.insecure):
        yield Conflict(
            ("safety_kernel.addr", "safety_kernel.tls_ca"),
            f"calls to the kernel at {kernel.addr} would not be encrypted: set safety_kernel.tls_ca or "
            "safety_kernel.tls_required, or safety_kernel.insecure where the network is trusted.",
        )


def _kernel_server(settings: Settings) -> Iterator[Conflict]:
    kernel = settings.safety_kernel
    if _is_loopback(kernel.host):
        return
    if not kernel.shared_secret:
        yield Conflict(
            ("safety_kernel.host", "safety_kernel.shared_secret"),
            f"safety_kernel.host {kernel.host} is reachable from other machines: set safety_kernel.shared_secret.",
        )
    elif not kernel.tls_cert and not kernel.insecure:
        yield Conflict(
            ("safety_kernel.host", "safety_kernel.tls_cert"),
            f"safety_kernel.host {kernel.host} is reachable from other machines, and safety_kernel.shared_secret would "
            "not be encrypted: set safety_kernel.tls_cert and tls_key, or safety_kernel.insecure.",
        )


def _accounting_redis(settings: Settings) -> Iterator[Conflict]:
    accounting = settings.accounting
    if accounting.redis_url is None:
        return
    in_url = host_and_port(accounting.redis_url)
    for part, value, stated in zip(
        ("host", "port"), (accounting.redis.host, accounting.redis.port), in_url, strict=True
    ):
        if value is not None and value != stated:
            yield Conflict(
                ("accounting.redis_url", f"accounting.redis.{part}"),
                f"accounting.redis_url and accounting.redis.{part} name different servers: keep one of them.",
            )


def _listen(settings: Settings) -> Iterator[Conflict]:
    if bool(settings.listen.tls_cert) != bool(settings.listen.tls_key):
        yield Conflict(
            ("listen.tls_cert", "listen.tls_key"),
            "listen.tls_cert and listen.tls_key belong together: set both or none.",
        )


def _grpc(settings: Settings) -> Iterator[Conflict]:
    grpc = settings.grpc
    if bool(grpc.tls_cert) != bool(grpc.tls_key):
        yield Conflict(
            ("grpc.tls_cert", "grpc.tls_key"), "grpc.tls_cert and grpc.tls_key belong together: set both or none."
        )
    elif grpc.shared_secret and not grpc.tls_cert and not _is_loopback(grpc.host):
        yield Conflict(
            ("grpc.host", "grpc.tls_cert"),
            f"grpc.host {grpc.host} is reachable from other machines, and grpc.shared_secret would not be encrypted:"
            " set grpc.tls_cert and grpc.tls_key, or use 127.0.0.1.",
        )


def _is_loopback(host: str) -> bool:
    from ipaddress import ip_address

    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
