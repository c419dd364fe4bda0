"""The YAML reader: numbers and words that YAML versions read differently, and that there is no second reader."""

import ast
import math
import os
from pathlib import Path

import pytest

import rota
from rota.infra.yaml_reader import YamlFormat, YamlReader, parse_yaml, read_bytes, read_text
from rota.model.errors import InvalidInput

SOURCES = Path(rota.__file__).parent
READER = SOURCES / "infra" / "yaml_reader.py"


def strict(text):
    return YamlReader("f").to_builtins(parse_yaml(text, "f"), strict=True)


def refusal(text):
    with pytest.raises(InvalidInput) as refused:
        strict(text)
    return refused.value.sentence


def yaml_names(path):
    """What a module uses of PyYAML: `safe_dump` for `yaml.safe_dump` and for `from yaml import safe_dump`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "yaml":
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "yaml":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("yaml.") or _renamed(each))


def _renamed(name):
    return name.name == "yaml" and name.asname not in (None, "yaml")


def test_only_the_yaml_reader_parses_yaml():
    used = {path: {*yaml_names(path)} for path in SOURCES.rglob("*.py") if path != READER}
    assert {str(path): names for path, names in used.items() if names - {"safe_dump"}} == {}
    assert "parse" in yaml_names(READER), "this test would find a second reader"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-0", 0),
        ("+5", 5),
        (str(2**64 - 1), 2**64 - 1),
        (str(2**70), 2**70),
        ("1.50", 1.5),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("1e3", 1000.0),
        ("1.5E-07", 1.5e-7),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("'010'", "010"),
        ('"yes"', "yes"),
        ("1.2.3", "1.2.3"),
        ("1-100x2", "1-100x2"),
        ("2030-01-31", "2030-01-31"),
        ("8080:80", "8080:80"),
        ("0xyz", "0xyz"),
        ("e5", "e5"),
        ("y", "y"),
        ("{on: [no-op], 010: 1}", {"on": ["no-op"], "010": 1}),
    ],
)
def test_strict_reading_keeps_decimal_numbers_and_text(text, value):
    found = strict(text)
    assert (type(found), found) == (type(value), value)


def test_strict_reading_accepts_nan():
    assert math.isnan(strict(".nan"))


@pytest.mark.parametrize(
    "text", ["010", "-010", "08", "00", "01.5", "0o10", "0x1F", "0b11", "1_000", "12:30", "08:30", "1:30.5", "9" * 5000]
)
def test_strict_reading_refuses_ambiguous_numbers_with_their_line(text):
    assert refusal(f"a: 1\nb: [\n{text}]") == (
        f"f:3: {text[:60]} is ambiguous: write a plain decimal number, or put it in quotes if it is text."
    )


@pytest.mark.parametrize("text", ["yes", "No", "ON", "off"])
def test_strict_reading_refuses_ambiguous_words_with_their_line(text):
    assert refusal(f"a: 1\nb: {text}") == (
        f"f:2: {text} is ambiguous: write true or false, or put it in quotes if it is text."
    )


def test_pipe_is_refused_unread(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidInput, match="it is a pipe or a device, not a file"):
        read_bytes(path)


def test_file_over_the_limit_of_its_format_is_refused(tmp_path):
    path = tmp_path / "f"
    path.write_text("#" * 2048)
    assert read_text(path, YamlFormat(bytes_max=2048)) == "#" * 2048
    with pytest.raises(InvalidInput, match="f:1: the file is larger than 1 KiB"):
        read_text(path, YamlFormat(bytes_max=1024))
