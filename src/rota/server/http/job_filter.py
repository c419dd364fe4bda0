"""The filter language of job lists: `state:RUNNING show:film topic:render reason:quota_job label:shot=12`."""

from __future__ import annotations

import re
from typing import Final

from rota.engine.queries.jobs import JobFilter
from rota.model.access import Actor, Role, require_role
from rota.model.errors import InvalidInput
from rota.model.job_states import JobState

FILTER_KEYS: Final = ("state", "show", "topic", "reason", "label")
FILTER_CHARS_MAX: Final = 1024
_TERM = re.compile(r'([a-z]+):("[^"]*"|\S+)')


def parse_filter(text: str, actor: Actor) -> JobFilter:
    """The filter, restricted to the shows that `actor` can view."""
    terms = _parse_terms(text)
    show = terms.get("show")
    if show is not None:
        require_role(actor, Role.VIEWER, show)
    return JobFilter(
        show=show,
        shows=actor.shows_with_role(Role.VIEWER) if show is None else None,
        state=_parse_state(terms["state"]) if "state" in terms else None,
        topic=terms.get("topic"),
        reason=terms.get("reason"),
        label=_parse_label(terms["label"]) if "label" in terms else None,
    )


def _parse_terms(text: str) -> dict[str, str]:
    if len(text) > FILTER_CHARS_MAX or "\0" in text:
        raise InvalidInput(f"A filter can have at most {FILTER_CHARS_MAX} characters and no NUL: write a shorter one.")
    terms: dict[str, str] = {}
    for key, value in _TERM.findall(text):
        if key not in FILTER_KEYS or key in terms:
            raise InvalidInput(f"{key}:{value} is not a valid filter: use each of {', '.join(FILTER_KEYS)} once.")
        terms[key] = value.strip('"')
    if rest := _TERM.sub("", text).strip():
        raise InvalidInput(
            f"{rest[:64]!r} is not a valid filter: write key:value, with one of {', '.join(FILTER_KEYS)}."
        )
    return terms


def _parse_state(text: str) -> JobState:
    try:
        return JobState(text.upper())
    except ValueError:
        raise InvalidInput(f"{text[:64]} is not a job state: use one of {', '.join(JobState)}.") from None


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"label:{text[:64]} is not a valid filter: write label:key=value.")
    return key, value
