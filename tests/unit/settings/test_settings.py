"""The settings tree: known settings, their defaults, and how file and environment are merged."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from rota.infra.settings_file import parse
from rota.model.errors import InvalidSetting
from rota.model.settings import Settings, leaves, resolve, value_at
from rota.model.settings.leaves import sections
from rota.model.settings.names import known_paths


def settings_of(text="", **environ):
    return resolve(parse(text, "rota.yaml"), environ).settings


def problems_of(text="", **environ):
    with pytest.raises(InvalidSetting) as error:
        settings_of(text, **environ)
    return error.value.sentence.splitlines()


AGENTS = """
redis:
  connection:
    pool: {max-wait-millis: 5000, max-total: 50, max-idle: 10, min-idle: 2}
    timeout: 3000
    connect-timeout: 2000
  agent: {max-concurrent-agents: 100, enabled-pattern: ".*", disabled-pattern: ""}
  scheduler:
    enabled: true
    type: priority
    interval-ms: 1000
    refresh-period-seconds: 30
    health-summary-period-seconds: 600
    time-cache-duration-ms: 10000
    batch-operations: {enabled: true, batch-size: 0, chunk-attempt-multiplier: 0.0}
    jitter: {initial-registration-seconds: 0, shutdown-seconds: 0, failure-backoff-ratio: 0.1}
    failure-backoff:
      enabled: false
      max-immediate-retries: 0
      permanent-forbidden-backoff-ms: 1800000
      throttled: {base-ms: 30000, multiplier: 2.0, cap-ms: 600000}
    circuit-breaker:
      enabled: true
      failure-threshold: 5
      failure-window-ms: 10000
      cooldown-ms: 30000
      half-open-duration-ms: 5000
    zombie-cleanup:
      enabled: true
      threshold-ms: 30000
      interval-ms: 300000
      run-budget-ms: 0
      executor-shutdown-await-ms: 10000
      executor-shutdown-force-await-ms: 5000
      exceptional-agents: {pattern: "", threshold-ms: 3600000}
    orphan-cleanup:
      enabled: true
      threshold-ms: 600000
      interval-ms: 300000
      leadership-ttl-ms: 120000
      force-all-pods: false
      remove-numeric-only-agents: true
      run-budget-ms: 0
      executor-shutdown-await-ms: 10000
      executor-shutdown-force-await-ms: 5000
    reconcile: {run-budget-ms: 0, executor-shutdown-await-ms: 5000, executor-shutdown-force-await-ms: 2000}
    keys:
      prefix: ""
      waiting-set: waiting
      working-set: working
      cleanup-leader-key: cleanup-leader
      hash-tag: ""
"""

LIFECYCLE = """
scheduler:
  storeOpTimeout: 2s
  jobLockTTL: 60s
  maxSchedulingRetries: 50
  retryDelayBusy: 500ms
  retryDelayStore: 1s
  retryDelayPublish: 2s
  retryDelayNoWorkers: 2s
  safetyThrottleDelay: 5s
  backoffBase: 1s
  backoffMax: 30s
  maxRenewalFailures: 3
  backoffJitter: 500ms
reconciler:
  dispatchTimeout: 300s
  runningTimeout: 9000s
  pollInterval: 30s
  maxIterationsPerTick: 100
  batchSize: 200
  maxRetriesPerJob: 3
replayer: {pendingAge: 2m, pollInterval: 30s}
routing: {overloadUtilization: 0.9, overloadCpuLoad: 90, overloadGpuUtilization: 90}
registry: {workerTTL: 30s, snapshotInterval: 5s, snapshotLockTTL: 10s, snapshotReadTimeout: 5s}
safety: {timeout: 2s, circuitFailBudget: 3, circuitOpenFor: 30s, circuitHalfOpenMax: 3, circuitCloseAfter: 2}
safetyKernel: {tlsCA: null, tlsRequired: false, insecure: false}
input_policy: {fail_mode: null}
output_policy: {enabled: false, contentTimeout: 30s}
saga: {lockTTL: 2min, rollbackTimeout: 30s}
workflow: {runLockTTL: 30s, delay: {pollInterval: 5s, lockTTL: 10s, cleanupInterval: 5min}}
nats: {ackWait: 10min, maxDeliver: 100, inFlightTTL: 2min, nakDelay: 5s}
"""

ACCOUNTING = """
accounting:
  recompute_interval_seconds: 120
  limit_reseed_interval_seconds: 300
  redis_pool_size: 20
  managed_shows_ttl: 30s
  recalculate_subs_interval: 2h
"""


@pytest.mark.parametrize("text", [AGENTS, LIFECYCLE, ACCOUNTING], ids=["agents", "lifecycle", "accounting"])
def test_documented_files_equal_the_defaults(text):
    loaded = resolve(parse(text, "rota.yaml"))
    assert loaded.settings == Settings()
    assert sum(origin.source == "file" for origin in loaded.origins.values()) >= 5


def test_every_default_is_valid_for_its_setting():
    for leaf in leaves().values():
        if leaf.default is not None:
            assert leaf.kind.read(leaf.kind.show(leaf.default)) == leaf.default, leaf.path


def test_setting_names_are_unique_in_file_and_environment():
    in_environment = [name for leaf in leaves().values() for name in leaf.env_names]
    assert len(set(in_environment)) == len(in_environment)
    assert len(known_paths()) == len(leaves()) + len(sections())


def test_every_setting_and_section_is_described_in_a_sentence():
    descriptions = [leaf.kind.meaning for leaf in leaves().values()] + [
        section.__doc__ for section in sections().values()
    ]
    assert all(sentence and sentence.endswith(".") for sentence in descriptions)


def test_settings_tree_is_frozen_and_refuses_unknown_fields():
    for section in [Settings, *sections().values()]:
        assert section.__struct_config__.frozen
        assert section.__struct_config__.forbid_unknown_fields
    with pytest.raises(AttributeError):
        Settings().log.level = "debug"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"log": {"levle": "info"}}, Settings)


def test_environment_wins_over_file_and_file_over_default():
    text = "scheduler: {backoff_base: 3s, backoff_max: 40s}"
    loaded = resolve(parse(text, "my.yaml"), {"ROTA_SCHEDULER_BACKOFF_BASE": "4s"}, file="my.yaml")
    assert loaded.settings.scheduler.backoff_base == 4.0
    assert loaded.settings.scheduler.backoff_max == 40.0
    assert loaded.settings.scheduler.backoff_jitter == 0.5
    assert str(loaded.origins["scheduler.backoff_base"]) == "ROTA_SCHEDULER_BACKOFF_BASE"
    assert str(loaded.origins["scheduler.backoff_max"]) == "my.yaml:1"
    assert str(loaded.origins["scheduler.backoff_jitter"]) == "default"


def test_every_setting_can_be_set_by_its_environment_variable():
    for path, leaf in leaves().items():
        text = leaf.kind.show(leaf.default)
        if text:
            loaded = resolve(environ={leaf.env_names[-1]: text})
            assert loaded.origins[path].where == leaf.env_names[-1] == "ROTA_" + path.upper().replace(".", "_")
            assert value_at(loaded.settings, path) == leaf.default


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("OUTPUT_POLICY_ENABLED", "true", "output_policy.enabled", True),
        ("POLICY_CHECK_FAIL_MODE", "open", "input_policy.fail_mode", "open"),
        ("SAFETY_KERNEL_TLS_CA", "/etc/ca.pem", "safety_kernel.tls_ca", "/etc/ca.pem"),
        ("SAFETY_KERNEL_TLS_REQUIRED", "1", "safety_kernel.tls_required", True),
        ("SAFETY_KERNEL_INSECURE", "yes", "safety_kernel.insecure", True),
    ],
)
def test_variables_without_prefix_are_accepted(name, text, path, value):
    loaded = resolve(environ={name: text})
    assert value_at(loaded.settings, path) == value
    assert loaded.origins[path].where == name


def test_two_variables_of_one_setting_are_refused():
    (problem,) = problems_of(OUTPUT_POLICY_ENABLED="true", ROTA_OUTPUT_POLICY_ENABLED="true")
    assert problem.startswith("OUTPUT_POLICY_ENABLED and ROTA_OUTPUT_POLICY_ENABLED are the same setting")


def test_empty_and_unrelated_variables_are_ignored():
    environ = {"ROTA_LISTEN_PORT": " ", "OUTPUT_POLICY_ENABLED": "", "ROTATE": "1", "PATH": "/bin", "ROTA_CONFIG": "x"}
    assert resolve(environ=environ).settings == Settings()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "registry: {snapshotLockTTL: 60}",
            "rota.yaml:1: registry.snapshot_lock_ttl is 60; it must be a duration with a unit, such as",
        ),
        ("scheduler:\n  backoff-max: 500d", "rota.yaml:2: scheduler.backoff_max is 500d; it must be a duration"),
        ("listen: {port: 65536}", "listen.port is 65536; it must be a whole number from 0 to 65535."),
        ("listen: {port: 010}", "listen.port is 010; it must be a whole number"),
        ("listen: {port: 1e3}", "listen.port is 1e3; it must be a whole number"),
        (
            "redis: {scheduler: {interval-ms: 2s}}",
            "interval_ms is 2s; it must be a whole number of milliseconds from 1",
        ),
        ("redis: {agent: {enabled-pattern: '(('}}", "is ((; it must be a regular expression that compiles."),
        ("log: {level: loud}", "log.level is loud; it must be debug or info or warning or error or critical."),
        ("redis: {scheduler: {type: sort}}", "redis.scheduler.type is sort; it must be priority."),
        ("output_policy: {enabled: maybe}", "output_policy.enabled is maybe; it must be true or false."),
        ("routing: {overload_utilization: .nan}", "is .nan; it must be a number from 0 to 1."),
        ("routing: {overload_utilization: 1.01}", "is 1.01; it must be a number from 0 to 1."),
        (
            "nats: {prefix: my_rota}",
            "is my_rota; it must be nothing, or up to 32 capital letters and digits, starting with a letter.",
        ),
        ("redis: {scheduler: {keys: {hash-tag: '{ps}'}}}", "is {ps}; it must be nothing, or a key name"),
        ("redis: {scheduler: {keys: {waiting-set: ''}}}", "waiting_set is ; it must be a key name"),
        ("listen: {host: 'a b'}", "listen.host is a b; it must be a host name or address."),
        ("listen: {port: }", "listen.port has no value; it must be a whole number"),
        ("listen: {port: [1, {a: b}]}", "listen.port is a list; it must be a whole number"),
        ("listen: {port: {a: 1}}", "listen.port is a section here; it must be a whole number"),
        ("listen: {port: !!int 80}", "rota.yaml:1: tags are not supported: put a value that begins with ! in quotes."),
        ("listen: 80", "rota.yaml:1: listen is a section: write its settings below it, indented."),
        ("listen: [80]", "rota.yaml:1: listen is a section: write its settings below it, indented."),
        (
            "postgres: {url: 'mysql://db/rota'}",
            "postgres.url is mysql://***; it must be a URL starting with postgresql://",
        ),
        ("log: {level: " + "x" * 500 + "}", "log.level is " + "x" * 57 + "...; it must be"),
    ],
)
def test_invalid_value_is_refused_with_origin_path_value_and_expected_format(text, sentence):
    problems = problems_of(text)
    assert len(problems) == 1
    assert sentence in problems[0]


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *[(f"agent.{name}-pattern", "'(['") for name in ("enabled", "disabled")],
        ("agent.max-concurrent-agents", "many"),
        ("scheduler.enabled", "perhaps"),
        ("scheduler.type", "default"),
        *[(f"scheduler.{name}", "0") for name in ("interval-ms", "refresh-period-seconds")],
        ("scheduler.health-summary-period-seconds", "often"),
        ("scheduler.time-cache-duration-ms", "-1"),
        ("scheduler.batch-operations.enabled", "perhaps"),
        ("scheduler.batch-operations.batch-size", "all"),
        *[("scheduler.batch-operations.chunk-attempt-multiplier", wrong) for wrong in ("-0.1", ".inf", ".nan", "101")],
        *[(f"scheduler.jitter.{name}-seconds", "-1") for name in ("initial-registration", "shutdown")],
        *[("scheduler.jitter.failure-backoff-ratio", wrong) for wrong in ("-0.1", "1.1", ".nan")],
        ("scheduler.failure-backoff.enabled", "perhaps"),
        ("scheduler.failure-backoff.max-immediate-retries", "-1"),
        ("scheduler.failure-backoff.permanent-forbidden-backoff-ms", "-1"),
        ("scheduler.failure-backoff.throttled.base-ms", "0"),
        ("scheduler.failure-backoff.throttled.multiplier", "0.5"),
        ("scheduler.failure-backoff.throttled.cap-ms", "0"),
        ("scheduler.circuit-breaker.enabled", "perhaps"),
        *[
            (f"scheduler.circuit-breaker.{name}", "0")
            for name in ("failure-threshold", "failure-window-ms", "cooldown-ms", "half-open-duration-ms")
        ],
        *[
            (f"scheduler.{section}.{name}", "-1")
            for section in ("zombie-cleanup", "orphan-cleanup", "reconcile")
            for name in ("run-budget-ms", "executor-shutdown-await-ms", "executor-shutdown-force-await-ms")
        ],
        *[(f"scheduler.{section}.enabled", "perhaps") for section in ("zombie-cleanup", "orphan-cleanup")],
        *[(f"scheduler.{section}.threshold-ms", "-1") for section in ("zombie-cleanup", "orphan-cleanup")],
        *[(f"scheduler.{section}.interval-ms", "0") for section in ("zombie-cleanup", "orphan-cleanup")],
        ("scheduler.zombie-cleanup.exceptional-agents.pattern", "'*'"),
        ("scheduler.zombie-cleanup.exceptional-agents.threshold-ms", "-1"),
        ("scheduler.orphan-cleanup.leadership-ttl-ms", "999"),
        ("scheduler.orphan-cleanup.force-all-pods", "perhaps"),
        ("scheduler.orphan-cleanup.remove-numeric-only-agents", "perhaps"),
        *[(f"scheduler.keys.{name}", "''") for name in ("waiting-set", "working-set", "cleanup-leader-key")],
        *[(f"scheduler.keys.{name}", "'a b'") for name in ("prefix", "hash-tag")],
    ],
)
def test_every_agent_setting_is_validated(option, wrong):
    [problem] = problems_of(f"redis.{option}: {wrong}")
    assert f"redis.{option.replace('-', '_')} is " in problem
    assert "it must be" in problem


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("postgres: {pool-min: 11}", "postgres.pool_min must not exceed postgres.pool_max"),
        ("scheduler: {backoff_base: 31s}", "scheduler.backoff_base must not exceed scheduler.backoff_max"),
        ("redis.scheduler.failure_backoff.throttled.cap_ms: 1", "base_ms must not exceed"),
        ("worker: {heartbeat_interval: 31s}", "worker.heartbeat_interval must not exceed registry.worker_ttl"),
        ("safety: {circuit_close_after: 4}", "safety.circuit_close_after must not exceed"),
        ("postgres: {lock_timeout: 31s}", "postgres.lock_timeout must not exceed postgres.statement_timeout"),
        ("nats: {publish_timeout: 6s}", "nats.publish_timeout must not exceed nats.job_ack_wait"),
        ("nats: {job_ack_wait: 8d}", "nats.job_ack_wait must not exceed nats.max_age"),
        ("saga: {rollback_timeout: 121s}", "saga.rollback_timeout must not exceed saga.lock_ttl"),
        ("redis.scheduler.keys: {waiting-set: a, working-set: a}", "use three different names"),
        ("redis.scheduler.orphan-cleanup.run-budget-ms: 60001", "at least a minute more than"),
        ("safety_kernel: {tls_required: true, insecure: true}", "contradict each other"),
        (
            "registry: {snapshot_interval: 11s}",
            "registry.snapshot_interval must not exceed registry.snapshot_lock_ttl",
        ),
        ("accounting: {redis_url: 'redis://a', redis: {host: b}}", "accounting.redis.host name different servers"),
        ("accounting: {redis_url: 'redis://a:1', redis: {port: 2}}", "accounting.redis.port name different servers"),
    ],
)
def test_contradictory_values_are_refused_with_their_line(text, sentence):
    problems = problems_of(text)
    assert len(problems) == 1
    assert sentence in problems[0]
    assert problems[0].startswith("rota.yaml:1: ")


@pytest.mark.parametrize(
    "text",
    [
        "redis.scheduler.orphan-cleanup.run-budget-ms: 60000",
        "accounting: {redis_url: 'redis://a', redis: {host: a, port: 6379}}",
        "postgres: {pool-min: 10}",
    ],
)
def test_values_at_their_mutual_limits_are_accepted(text):
    settings_of(text)


def test_all_problems_are_reported_at_once_one_line_each():
    problems = problems_of(
        "redsi: {}\nlisten:\n  port: x\n  host: 'a b'\npostgres: {pool-min: 99}\n",
        ROTA_LOG_LEVEL="loud",
        ROTA_LOG_LEVLE="info",
    )
    assert [problem.partition(" ")[0] for problem in problems] == [
        "rota.yaml:1:",
        "Unknown",
        "rota.yaml:3:",
        "rota.yaml:4:",
        "ROTA_LOG_LEVEL:",
        "rota.yaml:5:",
    ]


def test_invalid_file_value_is_reported_even_if_the_environment_overrides_it():
    assert "listen.port is x" in problems_of("listen: {port: x}", ROTA_LISTEN_PORT="1")[0]


def test_invalid_value_is_reported_only_once():
    assert len(problems_of("postgres: {pool-min: 11, pool-max: lots}")) == 1
    assert len(problems_of("postgres: {pool-min: 11}", ROTA_POSTGRES_POOL_MAX="lots")) == 1


@pytest.mark.parametrize("text", ["true", "Yes", "ON", "1"])
def test_true_has_several_spellings(text):
    assert settings_of(f"output_policy: {{enabled: {text}}}").output_policy.enabled is True


def test_negative_agent_limit_is_accepted_as_unlimited():
    assert settings_of("redis: {agent: {max-concurrent-agents: -7}}").redis.agent.max_concurrent_agents == -7


def test_loading_settings_without_a_file_imports_no_slow_modules():
    code = (
        "import sys; from rota.infra import settings_file; settings_file.load(environ={}); "
        "print(*sorted({'yaml', 'rich', 'asyncio', 'difflib', 'structlog'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == ""
