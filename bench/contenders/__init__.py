"""The queues that `bench queue` and `bench e2e` race, each in a process of its own and all through three requests."""
