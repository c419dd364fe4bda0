"""What a list of jobs is asked for: `state:RUNNING show:film topic:render reason:quota_job label:shot=12`."""

from __future__ import annotations

import re
from typing import Final

from rota.engine.jobs import JobFilter
from rota.model.access import Actor, Role, guard
from rota.model.errors import InvalidInput
from rota.model.lifecycle import JobState

WORDS: Final = ("state", "show", "topic", "reason", "label")
LENGTH_MAX: Final = 1024
_TERM = re.compile(r'([a-z]+):("[^"]*"|\S+)')


def parse_filter(text: str, actor: Actor) -> JobFilter:
    """A filter that finds nothing in shows which `actor` may not look into."""
    terms = _terms(text)
    show = terms.get("show")
    if show is not None:
        guard(actor, Role.VIEWER, show)
    return JobFilter(
        show=show,
        shows=actor.limited_to(Role.VIEWER) if show is None else None,
        state=_state(terms["state"]) if "state" in terms else None,
        topic=terms.get("topic"),
        reason=terms.get("reason"),
        label=_label(terms["label"]) if "label" in terms else None,
    )


def _terms(text: str) -> dict[str, str]:
    if len(text) > LENGTH_MAX or "\0" in text:
        raise InvalidInput(f"A filter has at most {LENGTH_MAX} characters, none of them NUL: write a shorter one.")
    terms: dict[str, str] = {}
    for word, value in _TERM.findall(text):
        if word not in WORDS or word in terms:
            raise InvalidInput(f"{word}:{value} is no filter here: use each of {', '.join(WORDS)} once.")
        terms[word] = value.strip('"')
    if left := _TERM.sub("", text).strip():
        raise InvalidInput(f"{left[:64]!r} is no filter: write word:value, with one of {', '.join(WORDS)}.")
    return terms


def _state(text: str) -> JobState:
    try:
        return JobState(text.upper())
    except ValueError:
        raise InvalidInput(f"{text[:64]} is no state: there are {', '.join(JobState)}.") from None


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"label:{text[:64]} is no filter: write label:key=value.")
    return key, value
