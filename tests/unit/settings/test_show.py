"""`rota config show`: path, value and origin of every setting, without secrets in output or errors."""

from __future__ import annotations

import io
import json
import re

import pytest
import rich
from hypothesis import given
from hypothesis import strategies as st

from rota.cli import config
from rota.cli.core.output_format import OutputFormat
from rota.infra.settings_file import parse
from rota.model.errors import InvalidSetting
from rota.model.settings import leaves, resolve, rows
from rota.model.settings.kinds import Secret, Url
from rota.model.settings.masking import masked_url

CANARY = "hunter2hunter2hunter2"

SECRETS = f"""
postgres: {{url: 'postgresql://rota:{CANARY}@db:5432,db2/rota?sslpassword={CANARY}&application_name=rota'}}
redis: {{url: 'rediss://:{CANARY}@cache:6379/1'}}
nats: {{url: 'nats://{CANARY}@one:4222,nats://rota:{CANARY}@two:4222'}}
accounting: {{redis_url: 'redis://books?password={CANARY}'}}
grpc: {{shared_secret: {CANARY}}}
safety_kernel: {{shared_secret: {CANARY}}}
api: {{url: 'https://rota:{CANARY}@rota.internal', key: rota_0123456789_{CANARY}000000000000000000}}
"""


def resolved(text="", **environ):
    return resolve(parse(text, "rota.yaml"), environ)


def output_of(found, *, as_json=False):
    out = io.StringIO()
    config.show(found, form=OutputFormat.JSON if as_json else OutputFormat.TEXT, out=out)
    return out.getvalue()


def test_table_has_value_and_origin_of_every_setting():
    lines = output_of(resolved("\nscheduler: {backoff_max: 120s}", ROTA_LISTEN_PORT="81")).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["setting"] == ["value", "from"]
    assert rows["scheduler.backoff_max"] == ["2m", "rota.yaml:2"]
    assert rows["listen.port"] == ["81", "ROTA_LISTEN_PORT"]
    assert rows["redis.connection.timeout"] == ["3s", "default"]
    assert rows["redis.agent.enabled_pattern"] == [".*", "default"]
    assert rows["postgres.url"] == ["default"]
    assert rows.keys() - {"setting"} == leaves().keys()


def test_pattern_is_printed_literally_not_as_markup():
    assert "[red]x[/red]" in output_of(resolved("redis: {agent: {disabled-pattern: '[red]x[/red]'}}"))


def test_json_has_typed_values_with_unit_and_origin():
    found = {
        row["path"]: row
        for row in json.loads(output_of(resolved("log: {level: debug}", ROTA_LISTEN_PORT="81"), as_json=True))
    }
    assert found.keys() == leaves().keys()
    assert found["listen.port"] == {
        "path": "listen.port",
        "value": 81,
        "unit": None,
        "source": "environment",
        "where": "ROTA_LISTEN_PORT",
    }
    assert found["log.level"]["where"] == "rota.yaml:1"
    assert found["scheduler.backoff_jitter"]["value"] == 0.5
    assert found["scheduler.backoff_jitter"]["unit"] == "seconds"
    assert found["redis.scheduler.interval_ms"]["unit"] == "milliseconds"
    assert found["redis.url"] == {"path": "redis.url", "value": None, "unit": None, "source": "default", "where": None}


def test_secrets_are_masked_in_table_json_and_repr():
    found = resolved(SECRETS)
    table, as_json = output_of(found), output_of(found, as_json=True)
    for text in (table, as_json):
        assert CANARY not in text
        assert "postgresql://rota:***@db:5432,db2/rota?sslpassword=***&application_name=rota" in text
        assert "rediss://:***@cache:6379/1" in text
        assert "nats://***@one:4222,nats://rota:***@two:4222" in text
    out = io.StringIO()
    rich.print(found.settings, found.settings.redis, file=out)
    assert CANARY not in out.getvalue() + repr(found) + repr(found.settings.grpc) + str(found.settings)


def test_every_setting_with_a_secret_has_a_secret_type():
    secret = re.compile("url|secret|password|token|^key$")
    for path, leaf in leaves().items():
        assert bool(secret.search(path.rpartition(".")[2])) == isinstance(leaf.kind, Secret | Url), path


@pytest.mark.parametrize("path", [path for path, leaf in leaves().items() if isinstance(leaf.kind, Secret | Url)])
@pytest.mark.parametrize(
    "value",
    [
        CANARY,
        f"ftp://u:{CANARY}@host",
        f"redis://u:{CANARY}",
        f"redis://u:{CANARY}/x@host",
        f"redis://u:{CANARY}#x@host",
        f"redis://u:@{CANARY}@host",
        f"redis://u:{CANARY}?x@host",
        f"redis://u:x://{CANARY}@host",
        f"nats://:{CANARY}@:70000",
        f"postgresql://u:{CANARY}@",
        f"postgres://u:{CANARY}@h:99999/x",
        f"redis://u:{CANARY} @host",
        "short",
    ],
)
def test_invalid_secret_is_refused_without_repeating_it(path, value):
    if path.endswith(".shared_secret") and value != "short":
        value = f"{value} with a space"
    for text, environ in ((f"{path}: {json.dumps(value)}", {}), ("", {leaves()[path].env_names[-1]: value})):
        with pytest.raises(InvalidSetting) as error:
            resolved(text, **environ)
        assert CANARY not in str(error.value)
        assert CANARY not in repr(error.value.facts)
        assert path in str(error.value)


def test_url_in_a_setting_of_another_type_is_masked():
    for text in (f"listen: {{host: 'redis://u:{CANARY}@h'}}", f"'redis://u:{CANARY}@h': 1"):
        with pytest.raises(InvalidSetting) as error:
            resolved(text)
        assert CANARY not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:6379/0",
        "rediss://u:p@h:1",
        "redis://[::1]:6379",
        "unix:///run/redis.sock",
        "unix://u:p@/run/redis.sock?db=1",
    ],
)
def test_common_redis_urls_are_accepted(url):
    assert resolved(f"redis: {{url: '{url}'}}").settings.redis.url == url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/db",
        "postgres://u@h:5432/db?sslmode=require",
        "postgresql:///db?host=/run/postgresql",
        "postgresql://h1:1,h2:2/db",
        "postgresql://%2Frun%2Fpostgresql/db",
    ],
)
def test_common_postgres_urls_are_accepted(url):
    assert resolved(f"postgres: {{url: '{url}'}}").settings.postgres.url == url


@pytest.mark.parametrize(
    "url", ["redis://", "redis://:1", "redis://h:0x1", "redis://h:65536", "unix://", "http://h", "h:6379"]
)
def test_invalid_redis_urls_are_refused(url):
    with pytest.raises(InvalidSetting, match="it must be a URL starting with redis:// or rediss:// or unix://"):
        resolved(f"redis: {{url: '{url}'}}")


@pytest.mark.parametrize("password", ["one@two", "one:two", "one/two", "one?two", "one#two", "@@", "one two"])
def test_password_with_url_delimiters_is_masked_whole(password):
    assert masked_url(f"redis://u:{password}@host:1/0") == "redis://u:***@host:1/0"
    assert masked_url(f"nats://{password.replace(':', '')}@a,nats://u:{password}@b") == "nats://***@a,nats://u:***@b"


@given(
    st.text(st.characters(blacklist_categories=("Cs",)), min_size=1).map(lambda text: f"<{text}>"),
    st.sampled_from(["", "u"]),
)
def test_any_password_is_masked(password, user):
    for url in (f"redis://{user}:{password}@host:1/0", f"redis://{password}@host:1"):
        assert password not in masked_url(url)
        assert password not in output_or_error(ROTA_REDIS_URL=url)


def output_or_error(**environ):
    try:
        return "".join(row.text + str(row.value) for row in rows(resolved(**environ)))
    except InvalidSetting as error:
        return str(error)
