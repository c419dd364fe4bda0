"""Tasks of the shop. Workers do not need Django."""

from __future__ import annotations

from rota import Rota

app = Rota()


@app.task
def write_invoice(order: int, article: str, cents: int) -> str:
    return f"Order {order}: {article}, {cents / 100:.2f} EUR"
