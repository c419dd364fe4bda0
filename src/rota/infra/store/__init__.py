"""One store for what is too large to travel: inputs, results and artifacts, named by pointers."""

from rota.infra.store.files import Files
from rota.infra.store.pointers import Pointer, Where, pointer_to
from rota.infra.store.store import Store, StoreTarget
from rota.infra.store.table import PUT, put_arguments

__all__ = ["PUT", "Files", "Pointer", "Store", "StoreTarget", "Where", "pointer_to", "put_arguments"]
