"""Model of the agent sets in Redis: two dictionaries with the rules of the scripts."""

from dataclasses import dataclass, field


@dataclass
class Model:
    """Times in milliseconds. `order` is the order of arrival, to break ties."""

    waiting: dict = field(default_factory=dict)
    working: dict = field(default_factory=dict)
    order: list = field(default_factory=list)

    def wait(self, name, due_ms):
        self.waiting[name] = due_ms
        self.order = [other for other in self.order if other != name] + [name]

    def leave(self, name):
        self.waiting.pop(name)
        self.order.remove(name)

    def due(self, now_ms):
        """Names that are due, by due time, then by order of arrival."""
        found = [name for name, due_ms in self.waiting.items() if due_ms <= now_ms]
        return sorted(found, key=lambda name: (self.waiting[name], self.order.index(name)))

    def acquire(self, name, seen, run, now_ms):
        """Whether `run` holds it; `seen` is whether it still waits with the score the caller saw."""
        if name in self.waiting:
            if seen and self.waiting[name] <= now_ms:
                self.leave(name)
                self.working[name] = run
                return True
            return False
        return self.working.get(name) == run

    def finish(self, name, run, due_ms, add):
        if name in self.working:
            if self.working[name] == run:
                del self.working[name]
                if due_ms:
                    self.wait(name, due_ms)
        elif add and due_ms and name not in self.waiting:
            self.wait(name, due_ms)

    def repopulate(self, name, due_ms):
        if name in self.working or self.waiting.get(name, due_ms + 1) <= due_ms:
            return
        self.wait(name, due_ms)
