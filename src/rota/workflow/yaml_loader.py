"""Loads a workflow from YAML or JSON, the same model as in Python; errors have the form `file:line: sentence.`

name: trip
show: travel
inputs: {city: {required: true}}
steps:
  - {id: flight, task: book_flight, input: {to: "${input.city}"}, compensate: {topic: undo, task: cancel_flight}}
  - {id: hotel, task: book_hotel, depends_on: [flight]}
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from rota.infra.yaml_reader import MappingNode, YamlNode, YamlReader, parse_yaml, read_text
from rota.model.errors import InvalidInput
from rota.model.workflows.compiler import compile_workflow
from rota.model.workflows.spec import WorkflowSpec

_STEP: Final = re.compile(r"\b[Ss]teps? ([A-Za-z][\w-]*)")


def read(path: Path) -> WorkflowSpec:
    """The definition in a file, validated."""
    return parse(read_text(path), str(path))


def parse(text: str, source: str = "workflow") -> WorkflowSpec:
    """The definition in a text, validated; InvalidInput with the line of the first error."""
    node = parse_yaml(text, source)
    reader = YamlReader(source)
    if not isinstance(node, MappingNode):
        raise InvalidInput(f"{source}:1: a workflow must be a mapping: add a name and steps.")
    try:
        spec = msgspec.convert(reader.to_builtins(node), WorkflowSpec)
    except msgspec.ValidationError as error:
        at, sentence = reader.locate(node, error)
        raise reader.error(at, f"{sentence[:1].lower()}{sentence[1:]}") from None
    try:
        compile_workflow(spec)
    except InvalidInput as error:
        raise reader.error(_step_node(reader, node, spec, error.sentence), error.sentence.rstrip(".")) from error
    return spec


def _step_node(reader: YamlReader, node: YamlNode, spec: WorkflowSpec, sentence: str) -> YamlNode:
    """The step that an error names."""
    places = {step.id: at for at, step in enumerate(spec.steps)}
    found = [places[name] for name in _STEP.findall(sentence) if name in places]
    return reader.node_at(node, ["steps", found[0]]) if found else node
