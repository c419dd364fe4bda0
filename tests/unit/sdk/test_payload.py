"""Payloads: values arrive with the types of the signature, and a value that does not fit is named."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol
from uuid import UUID

import msgspec
import pydantic
import pytest

from rota.sdk.payload import Signature, encode_value, to_msgpack_value


class Shot(msgspec.Struct):
    name: str
    frames: list[int]


@dataclass
class Camera:
    lens: float
    at: datetime


class Scene(pydantic.BaseModel):
    name: str
    id: UUID
    shots: list[str] = []
    starts: int = pydantic.Field(0, alias="from")


class Colour(Enum):
    RED = "red"


class Late(msgspec.Struct):
    """Refuses a value with an exception of its own."""

    at: int

    def __post_init__(self):
        if self.at > 5:
            raise KeyError("too late")


class Quacks(Protocol):
    def quack(self) -> None: ...


NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
ID = UUID("0192f0c1-2b3a-7c4d-8e5f-60718293a4b5")
SCENE = Scene.model_validate({"name": "comp", "id": ID, "shots": ["a"], "from": 7})


def round_trip(function, *args, **kwargs):
    """Arguments as a worker would pass them to the function."""
    data = msgspec.msgpack.encode({"args": to_msgpack_value(args), "kwargs": to_msgpack_value(kwargs)})
    given = msgspec.msgpack.decode(data)
    fitted, named = Signature(function).convert_arguments(given["args"], given["kwargs"])
    return (*fitted, *named.values())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, 5),
        (float, 2),
        (str, "ä%s"),
        (bytes, b"\0\xff"),
        (bool, True),
        (type(None), None),
        (list[int], [1, 2]),
        (tuple[int, str], (1, "x")),
        (set[str], {"a"}),
        (dict[int, str], {1: "x"}),
        (datetime, NOON),
        (datetime, NOON.replace(tzinfo=None)),
        (date, date(2030, 1, 2)),
        (timedelta, timedelta(hours=3)),
        (UUID, ID),
        (Decimal, Decimal("1.10")),
        (Colour, Colour.RED),
        (Path, Path("/tmp/x")),
        (Shot, Shot("a", [1])),
        (list[Shot], [Shot("a", [1])]),
        (Camera, Camera(35.0, NOON)),
        (Scene, SCENE),
        (dict[str, Scene], {"x": SCENE}),
        (Scene | None, None),
        (Annotated[int, msgspec.Meta(ge=1)], 3),
        (Literal["a", "b"], "b"),
    ],
)
def test_value_survives_the_round_trip(kind, value):
    def task(given): ...

    task.__annotations__ = {"given": kind, "return": kind}
    assert round_trip(task, value) == (value,)
    assert round_trip(task, given=value) == (value,)
    returned = Signature(task).decode_result(encode_value(value))
    assert (returned, type(returned)) == (value, type(value) if kind is not float else float)


def test_parameters_of_every_kind_are_converted():
    def task(first: Shot, /, second: UUID, *rest: Colour, third: datetime, **others: Camera): ...

    camera = Camera(1.0, NOON)
    given = round_trip(task, Shot("a", []), ID, Colour.RED, Colour.RED, third=NOON, more=camera)
    assert given == (Shot("a", []), ID, Colour.RED, Colour.RED, NOON, camera)


def test_untyped_parameter_receives_plain_values():
    def task(bare, anything: Any, thing: object, quacks: Quacks, unknown: NoSuchType = 1): ...  # noqa: F821

    assert round_trip(task, Shot("a", [1]), ID, (1, 2), {"a": 1}) == (
        {"name": "a", "frames": [1]},
        str(ID),
        [1, 2],
        {"a": 1},
    )


def test_function_without_a_signature_is_accepted():
    assert round_trip(min, 2, 1) == (2, 1)
    assert Signature(print).decode_result(encode_value([1])) == [1]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, "5", "given does not fit: Expected `int`, got `str`"),
        (Shot, {"name": 5, "frames": []}, r"given does not fit: Expected `str`, got `int` - at `\$.name`"),
        (Shot, {"frames": []}, "missing required field `name`"),
        (list[UUID], ["no"], r"given does not fit: Invalid UUID - at `\$\[0\]`"),
        (Scene, {"name": "x", "id": "no"}, r"given does not fit: Input should be a valid UUID.* - at `\$.id`"),
        (Late, {"at": 6}, "given does not fit: 'too late'"),
        (Path, 5, "Expected `Path`, got `int`"),
        (Annotated[int, msgspec.Meta(ge=1)], 0, "Expected `int` >= 1"),
    ],
)
def test_value_that_does_not_fit_is_refused_in_one_line_that_names_its_parameter(kind, value, message):
    def task(given): ...

    task.__annotations__ = {"given": kind}
    with pytest.raises(msgspec.ValidationError, match=message) as raised:
        round_trip(task, value)
    assert "\n" not in str(raised.value)


def test_value_that_cannot_be_encoded_raises():
    with pytest.raises(TypeError, match="the type object is not supported: pass plain values"):
        to_msgpack_value([object()])
    with pytest.raises(TypeError, match="is not supported"):
        encode_value(lambda: 1)


def test_importing_rota_does_not_import_pydantic():
    check = "import rota, sys; rota.Rota, rota.Job; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def plain(first, second, third=3):
    return first, second, third


def only_named(first, *, second=2):
    return first, second


def any_number(*all_of_them, **named):
    return all_of_them, named


@pytest.mark.parametrize("function", [plain, only_named, any_number, round_trip, print, lambda: None])
@pytest.mark.parametrize("names", [(), ("first",), ("second",), ("first", "second"), ("first", "second", "third", "x")])
@pytest.mark.parametrize("count", range(5))
def test_check_accepts_what_the_function_can_be_called_with(function, count, names):
    args, kwargs = tuple(range(count)), dict.fromkeys(names, 1)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        with pytest.raises(TypeError, match=re.escape(str(error))):
            Signature(function).check(args, kwargs)
    else:
        Signature(function).check(args, kwargs)
