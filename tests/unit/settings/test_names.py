"""Setting names: equal in every spelling, and suggestions for misspelled ones."""

from __future__ import annotations

import pytest

from rota.infra.settings_file import parse
from rota.model.errors import InvalidSetting
from rota.model.settings import resolve


def first_problem(text="", **environ):
    with pytest.raises(InvalidSetting) as error:
        resolve(parse(text, "rota.yaml"), environ)
    return error.value.sentence.splitlines()[0]


@pytest.mark.parametrize(
    "key",
    [
        "snapshot_lock_ttl",
        "snapshot-lock-ttl",
        "snapshotLockTTL",
        "snapshotLockTtl",
        "SnapshotLockTTL",
        "SNAPSHOT_LOCK_TTL",
    ],
)
def test_kebab_snake_and_camel_case_name_the_same_setting(key):
    loaded = resolve(parse(f"registry:\n  {key}: 7s", "rota.yaml"))
    assert loaded.settings.registry.snapshot_lock_ttl == 7.0
    assert loaded.origins["registry.snapshot_lock_ttl"].where == "rota.yaml:2"


@pytest.mark.parametrize("key", ["safety_kernel", "safety-kernel", "safetyKernel"])
def test_section_names_accept_every_case(key):
    assert resolve(parse(f"{key}: {{tlsCA: /ca.pem}}", "f")).settings.safety_kernel.tls_ca == "/ca.pem"


def test_setting_path_may_be_written_with_dots():
    text = "accounting.redis.port: 7\naccounting:\n  redis.host: books\n"
    redis = resolve(parse(text, "f")).settings.accounting.redis
    assert (redis.host, redis.port) == ("books", 7)


@pytest.mark.parametrize(
    "text",
    [
        "log:\n  level: info\n  level: debug",
        "registry:\n  snapshotLockTTL: 1s\n  snapshot-lock-ttl: 2s",
        "log: {level: info}\n\nlog.level: debug",
        "log: {level: info}\n\nlog: {format: json}",
    ],
)
def test_duplicate_key_is_refused_with_both_lines(text):
    problem = first_problem(text)
    assert problem.startswith("rota.yaml:3: ")
    assert problem.endswith(": keep one of them.")
    assert "is already set in line" in problem


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("redsi: {}", "redis"),
        ("redis:\n  schedular: {}", "redis.scheduler"),
        ("redis: {scheduler: {interval: 5}}", "redis.scheduler.interval_ms"),
        ("registry: {snapshot_lock_tll: 5s}", "registry.snapshot_lock_ttl"),
        ("snapshotLockTTL: 5s", "registry.snapshot_lock_ttl"),
        ("reconciler: {store-op-timeout: 5s}", "scheduler.store_op_timeout"),
        ("safetyKernel: {tls-ac: x}", "safety_kernel.tls_ca"),
        ("port: 80", "listen.port"),
    ],
)
def test_unknown_key_is_refused_with_its_line_and_the_nearest_name(text, meant):
    problem = first_problem(text)
    assert problem.startswith(f"rota.yaml:{text.count(chr(10)) + 1}: unknown setting ")
    assert problem.endswith(f": did you mean {meant}?")


def test_unknown_key_without_a_similar_name_is_refused_with_a_link_to_the_reference():
    assert first_problem("zzzzqqqq: 1") == (
        "rota.yaml:1: unknown setting zzzzqqqq: see docs/reference/settings.md for all settings."
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ROTA_REDIS_URI", "ROTA_REDIS_URL"),
        ("ROTA_SCHEDULER_STORE_OPTIMEOUT", "ROTA_SCHEDULER_STORE_OP_TIMEOUT"),
        ("ROTA_CONFG", "ROTA_CONFIG"),
        ("ROTA_POLICY_CHECK_FAIL_MODE", "POLICY_CHECK_FAIL_MODE"),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest_name(name, meant):
    assert first_problem(**{name: "x"}) == f"Unknown setting {name}: did you mean {meant}?"


def test_long_or_unprintable_key_is_sanitized_in_the_error():
    problem = first_problem('"\\e[31m' + "k" * 500 + '": 1')
    assert "\x1b" not in problem
    assert len(problem) < 200
