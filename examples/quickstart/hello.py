"""A task, and a program that submits it. Any worker that loads this file runs it."""

from __future__ import annotations

from rota import Rota

app = Rota()


@app.task
def greet(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    print(greet.sync.submit("world").result())
    print(*greet.sync.map(["Ada", "Grace"]).result(), sep="\n")
