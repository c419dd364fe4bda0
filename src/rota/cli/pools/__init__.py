"""`rota pool topics|map|unmap|drain|activate` and `rota workers`."""
