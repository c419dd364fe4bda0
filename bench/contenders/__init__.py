"""The queues that `bench queue` races, each in a process of its own and all through the same three requests."""
