"""The settings file: which one is read, the YAML it may contain, and errors when it is unreadable."""

from __future__ import annotations

import os

import pytest
import yaml

from rota.infra.settings_file import FILE_BYTES_MAX, load
from rota.model.errors import InvalidSetting
from rota.model.settings import Settings


def write(folder, text, name="rota.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(folder, **environ):
    with pytest.raises(InvalidSetting) as error:
        load(environ=environ, directory=folder)
    return error.value.sentence


def test_defaults_apply_without_file_and_variables(tmp_path):
    loaded = load(environ={}, directory=tmp_path)
    assert loaded.settings == Settings()
    assert {origin.source for origin in loaded.origins.values()} == {"default"}


def test_environment_and_directory_of_the_process_are_the_defaults(tmp_path, monkeypatch):
    write(tmp_path, "listen:\n  host: ::1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROTA_CONFIG", raising=False)
    monkeypatch.setenv("ROTA_LISTEN_PORT", "1234")
    loaded = load()
    assert (loaded.settings.listen.host, loaded.settings.listen.port) == ("::1", 1234)
    assert loaded.origins["listen.host"].where == "rota.yaml:2"


def test_config_option_wins_over_the_variable_and_the_variable_over_the_directory(tmp_path):
    write(tmp_path, "listen: {port: 1}")
    write(tmp_path, "listen: {port: 2}", "two.yaml")
    three = write(tmp_path, "listen: {port: 3}", "three.yaml")
    named = {"ROTA_CONFIG": "two.yaml"}
    assert load(environ={}, directory=tmp_path).settings.listen.port == 1
    assert load(environ=named, directory=tmp_path).settings.listen.port == 2
    loaded = load(three, environ=named, directory=tmp_path)
    assert loaded.settings.listen.port == 3
    assert loaded.origins["listen.port"].where == f"{three}:1"


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "---\n", "~", "{}", "redis:\n", "\ufeffredis: {}\n"])
def test_empty_settings_file_is_accepted(tmp_path, text):
    write(tmp_path, text)
    assert load(environ={}, directory=tmp_path).settings == Settings()


def test_missing_named_file_is_reported(tmp_path):
    sentence = refusal(tmp_path, ROTA_CONFIG="nowhere.yaml")
    assert "nowhere.yaml cannot be read (No such file or directory): correct --config, ROTA_CONFIG" in sentence


def test_directory_as_settings_file_is_refused(tmp_path):
    (tmp_path / "rota.yaml").mkdir()
    assert "rota.yaml cannot be read (Is a directory)" in refusal(tmp_path)


NOBODY = 65534


@pytest.fixture
def as_plain_user():
    """Drops root privileges: root could read every file."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield
    if root:
        os.seteuid(0)


def test_settings_file_without_read_permission_is_reported(tmp_path, request):
    write(tmp_path, "{}").chmod(0)
    request.getfixturevalue("as_plain_user")
    assert "cannot be read (Permission denied)" in refusal(tmp_path)


def test_settings_file_over_the_size_limit_is_refused_unread(tmp_path):
    write(tmp_path, b"#" * FILE_BYTES_MAX)
    load(environ={}, directory=tmp_path)
    write(tmp_path, b"#" * (FILE_BYTES_MAX + 1))
    assert "is larger than 256 KiB: is it the right one?" in refusal(tmp_path)


def test_other_encodings_are_refused_with_their_line(tmp_path):
    write(tmp_path, "log:\n  level: é".encode("latin-1"))
    assert refusal(tmp_path).endswith("rota.yaml:2: this is not UTF-8: save the file as UTF-8.")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("redis:\n\turl: x", 2, "this is not YAML: "),
        ("redis: {url: x", None, "this is not YAML: did not find expected ',' or '}'."),
        ("a: 'open", 1, "this is not YAML: "),
        ("log: {}\n---\nlog: {}", 2, "a second document begins here: keep one of them."),
        ("- redis", 1, "a settings file contains sections such as `redis:` with settings below them."),
        ("redis", 1, "a settings file contains sections such as `redis:` with settings below them."),
        ("log: {}\n? [a, b]\n: 1", 2, "a key must be plain text."),
        ("log: {}\n? {a: b}\n: 1", 2, "a key must be plain text."),
        ("redis: " + "{a: " * 30 + "1" + "}" * 30, 1, "this is nested too deeply."),
        ("redis: " + "[" * 100_000, 1, "this is nested too deeply."),
        ("log: {level: \x07}", 1, "it contains characters that are not allowed."),
        ("log:\n  level: \x07", 2, "it contains characters that are not allowed."),
        ("log:\n  level: !!python/name:os.system x", 2, "tags are not supported: put a value that begins with !"),
        ("log: !section\n  level: info", 1, "tags are not supported: put a value that begins with !"),
        ("log:\n  level: info\n  level: debug", 3, "log.level is already set in line 2: keep one of them."),
        ("log:\n  level: info\nlog: {}", 3, "log is already set in line 1: keep one of them."),
        ("listen:\n  port: 010", 2, "listen.port is 010; it must be a whole number"),
        ("listen:\n  port: 0o10", 2, "listen.port is 0o10; it must be a whole number"),
        ("log:\n  level: no", 2, "log.level is no; it must be debug or info"),
    ],
)
def test_malformed_settings_file_is_refused_with_its_line(tmp_path, text, line, sentence):
    write(tmp_path, text)
    message = refusal(tmp_path)
    assert sentence in message
    assert line is None or f"rota.yaml:{line}: " in message
    assert "\n" not in message


def test_yaml_aliases_and_merges_are_refused(tmp_path):
    write(tmp_path, "log: &a {level: info}\nlisten: *a\nnats: {<<: *a}\n")
    assert refusal(tmp_path).endswith("rota.yaml:1: anchors and aliases are not supported: write it out.")
    write(tmp_path, "log: {}\nnats: {<<: *a}\n")
    assert refusal(tmp_path).endswith("rota.yaml:2: anchors and aliases are not supported: write it out.")


def test_values_are_parsed_from_their_text_not_by_yaml_types(tmp_path):
    write(
        tmp_path,
        "redis: {scheduler: {keys: {prefix: 010, hash-tag: 1e3, waiting-set: yes}}}\nlocal: {data_dir: 12:30:45}",
    )
    settings = load(environ={}, directory=tmp_path).settings
    keys = settings.redis.scheduler.keys
    assert (keys.prefix, keys.hash_tag, keys.waiting_set) == ("010", "1e3", "yes")
    assert settings.local.data_dir == "12:30:45"


@pytest.mark.parametrize(
    ("written", "value"), [("yes", True), ("on", True), ("TRUE", True), ("no", False), ("off", False), ("'no'", False)]
)
def test_boolean_setting_accepts_yes_and_on(tmp_path, written, value):
    write(tmp_path, f"output_policy: {{enabled: {written}}}")
    assert load(environ={}, directory=tmp_path).settings.output_policy.enabled is value


@pytest.mark.parametrize("written", ["url:", "url: ~", "url: null", "url: ''"])
def test_empty_value_means_none_where_none_is_the_default(tmp_path, written):
    write(tmp_path, f"redis:\n  {written}\n")
    loaded = load(environ={}, directory=tmp_path)
    assert loaded.settings.redis.url is None
    assert loaded.origins["redis.url"].where.endswith("rota.yaml:2")


@pytest.mark.parametrize(
    "text", ["grpc:\n  shared_secret: !hunter2hunter2!x", "a: 'hunter2hunter2", "a: {b: hunter2hunter2"]
)
@pytest.mark.parametrize("loader", ["libyaml", "pure Python"])
def test_parser_quotes_of_the_file_are_not_repeated_in_errors(tmp_path, monkeypatch, loader, text):
    if loader == "pure Python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    write(tmp_path, text)
    assert "hunter2" not in refusal(tmp_path)
