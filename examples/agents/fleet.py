"""Processes an archive of questions in the background while an interactive question overtakes it."""

from __future__ import annotations

import asyncio

from tasks import answer, app

ARCHIVE = [f"What is question {number}?" for number in range(100)]


async def main() -> None:
    async with app:
        archive = await answer.options(name="archive", priority="BATCH", labels={"for": "archive"}).map(ARCHIVE)
        visitor = await answer.options(name="visitor", priority="INTERACTIVE").submit("What is a rota?")
        print("visitor:", (await visitor.result(timeout=60))["answer"])
        print("archive:", "still at it" if not (await archive.state()).terminal else "done before")
        answers = await archive.result(timeout=60)
        print("archive:", sum(each["tokens"] for each in answers), "tokens spent")


if __name__ == "__main__":
    asyncio.run(main())
