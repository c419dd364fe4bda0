"""Which statements a test causes, apart from those of its servers."""

from contextvars import ContextVar

_counting: ContextVar[bool] = ContextVar("counting", default=False)
"""Set in the task of a test and in tasks that it starts; the tasks of its servers run already."""


def count_statements(database, monkeypatch):
    """A list to which the names of this task's statements outside of transactions are added from now on."""
    statements = []

    def counted(read):
        async def fetch(query, *args, **more):
            if _counting.get():
                statements.append(query.name)
            return await read(query, *args, **more)

        return fetch

    for name in ("row", "rows", "value", "run"):
        monkeypatch.setattr(database, name, counted(getattr(database, name)))
    _counting.set(True)
    return statements
