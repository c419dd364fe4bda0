"""Values that travel: what a signature says they are, they are on the other side, and what does not fit is named."""

from __future__ import annotations

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
    """Refuses in its own words, and in its own way."""

    at: int

    def __post_init__(self):
        if self.at > 5:
            raise KeyError("too late")


class Quacks(Protocol):
    def quack(self) -> None: ...


NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
ID = UUID("0192f0c1-2b3a-7c4d-8e5f-60718293a4b5")
SCENE = Scene.model_validate({"name": "comp", "id": ID, "shots": ["a"], "from": 7})


def travelled(function, *args, **kwargs):
    """Arguments as the function would be given them by a worker."""
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
def test_a_value_is_on_the_other_side_what_it_was(kind, value):
    def task(given): ...

    task.__annotations__ = {"given": kind, "return": kind}
    assert travelled(task, value) == (value,)
    assert travelled(task, given=value) == (value,)
    returned = Signature(task).decode_result(encode_value(value))
    assert (returned, type(returned)) == (value, type(value) if kind is not float else float)


def test_parameters_of_every_kind_are_fitted():
    def task(first: Shot, /, second: UUID, *rest: Colour, third: datetime, **others: Camera): ...

    camera = Camera(1.0, NOON)
    given = travelled(task, Shot("a", []), ID, Colour.RED, Colour.RED, third=NOON, more=camera)
    assert given == (Shot("a", []), ID, Colour.RED, Colour.RED, NOON, camera)


def test_what_has_no_type_is_passed_on_as_it_came():
    def task(bare, anything: Any, thing: object, quacks: Quacks, unknown: NoSuchType = 1): ...  # noqa: F821

    assert travelled(task, Shot("a", [1]), ID, (1, 2), {"a": 1}) == (
        {"name": "a", "frames": [1]},
        str(ID),
        [1, 2],
        {"a": 1},
    )


def test_functions_without_a_signature_are_not_in_the_way():
    assert travelled(min, 2, 1) == (2, 1)
    assert Signature(print).decode_result(encode_value([1])) == [1]


@pytest.mark.parametrize(
    ("kind", "value", "says"),
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
def test_a_value_that_does_not_fit_is_one_sentence_that_names_its_parameter(kind, value, says):
    def task(given): ...

    task.__annotations__ = {"given": kind}
    with pytest.raises(msgspec.ValidationError, match=says) as raised:
        travelled(task, value)
    assert "\n" not in str(raised.value)


def test_what_cannot_travel_says_so():
    with pytest.raises(TypeError, match="the type object is not supported: pass plain values"):
        to_msgpack_value([object()])
    with pytest.raises(TypeError, match="is not supported"):
        encode_value(lambda: 1)


def test_pydantic_is_never_imported_by_us():
    check = "import rota, sys; rota.Rota, rota.Job; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
