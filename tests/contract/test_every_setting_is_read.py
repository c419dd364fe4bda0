"""Every setting is read somewhere in the source; an unread one would promise what the code does not do.

A setting counts as read if a module uses it as an attribute and also names its section, as an attribute or by class.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

import rota
from rota.model.settings.leaves import leaves, sections

SOURCE = Path(rota.__file__).parent
DECLARED = {"accounting", "agents", "lifecycle", "process", "rules", "servers", "store", "tree"}
"""Modules that only declare settings and check them against each other."""
WITHOUT_EFFECT = {
    *(f"redis.connection.pool.{name}" for name in ("max_idle", "min_idle")),
    *(f"scheduler.retry_delay_{why}" for why in ("busy", "store", "publish", "no_workers")),
    *("scheduler.job_lock_ttl", "scheduler.max_renewal_failures", "reconciler.dispatch_timeout"),
    *("nats.ack_wait", "nats.in_flight_ttl"),
}
"""Accepted and documented as being without effect."""


class Module:
    def __init__(self, path):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        self.names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        self.attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        self.constants = (
            {node.value for node in nodes if isinstance(node, ast.Constant)} if "getattr" in self.names else set()
        )

    def reads(self, section, name):
        if name not in self.attributes and name not in self.constants:
            return False
        return self.names_section(section) or section.rpartition(".")[2] in self.attributes

    def names_section(self, section):
        return sections()[section].__name__ in self.names


@cache
def modules():
    settings = SOURCE / "model" / "settings"
    return [Module(path) for path in SOURCE.rglob("*.py") if path.parent != settings or path.stem not in DECLARED]


@pytest.mark.parametrize("path", [path for path in leaves() if path not in WITHOUT_EFFECT])
def test_setting_is_read_by_the_source(path):
    section, _, name = path.rpartition(".")
    assert any(module.reads(section, name) for module in modules())


@pytest.mark.parametrize("path", sorted(WITHOUT_EFFECT))
def test_setting_without_effect_is_documented_as_such(path):
    assert "without effect" in leaves()[path].kind.meaning
