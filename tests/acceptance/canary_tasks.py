"""Tasks that return, store, print and raise their input, so that a canary secret reaches every output channel."""

import os

from rota import Fatal, Rota, context

app = Rota()


@app.task(name="give")
async def give(value):
    return {"value": value, "env": os.environ.get("CANARY", "")}


@app.task(name="give_sync")
def give_sync(value):
    return value


@app.task(name="leave")
async def leave(text):
    (context().folder / "left.txt").write_text(text)
    context().artifact("left.txt")


@app.task(name="break")
async def break_(text):
    raise ValueError(f"no luck with {text}")


@app.task(name="break_sync")
def break_sync(text):
    raise Fatal(f"never with {text}")


@app.task(name="exit")
def exit_(text):
    print(text)
    os._exit(3)
