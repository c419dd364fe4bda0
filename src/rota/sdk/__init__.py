"""What user code imports, by way of `from rota import ...`: tasks are declared here and run by `rota worker`."""

from rota.sdk.app import Rota, Task
from rota.sdk.context import Context, context
from rota.sdk.endings import Cancelled, Fatal, Retry

__all__ = ["Cancelled", "Context", "Fatal", "Retry", "Rota", "Task", "context"]
