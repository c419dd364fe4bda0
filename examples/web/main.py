"""A web service that runs its work on workers. Its API and its task use the same models."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from rota import Rota, RotaError

app = Rota()


class Text(BaseModel):
    words: str = Field(max_length=100_000)
    most: int = 3


class Counted(BaseModel):
    words: int
    common: list[str]


class Ticket(BaseModel):
    job: UUID


@app.task
def count(text: Text) -> Counted:
    words = text.words.lower().split()
    common = sorted(Counter(words).items(), key=lambda found: (-found[1], found[0]))
    return Counted(words=len(words), common=[word for word, _ in common[: text.most]])


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[None]:
    async with app:
        yield


web = FastAPI(lifespan=lifespan)


@web.post("/counts", status_code=202)
async def submit(text: Text) -> Ticket:
    job = await count.submit(text)
    return Ticket(job=job.id)


@web.get("/counts/{job}")
async def result(job: UUID, wait_s: float = 0) -> Counted:
    return await count.job(job).result(timeout=min(wait_s, 30))


@web.exception_handler(RotaError)
async def refused(_request: object, error: RotaError) -> JSONResponse:
    """Not ended, failed, unknown: each has a code and a sentence."""
    return JSONResponse({"code": error.code, "detail": error.sentence}, status_code=409)
