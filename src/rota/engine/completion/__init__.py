"""Completion: ends attempts, frames and jobs, whatever the cause.

| module | responsibility |
|---|---|
| `report_consumer` | results and progress that workers report on the bus |
| `finisher` | the one transaction that ends attempts: queue closure, procs, counts, outputs, the job |
| `canceller` | terminates a job early: cancelled, past its deadline, failed fast |

The `Finisher` is called by the report consumer, by dispatch (unsent or unplaceable frames), by recovery (lost workers,
timeouts) and by admission (denied jobs). Retries are decided here (`decide_retry`, worker losses, dispatch failures).

Invariants: an attempt ends once (J3: the queue's closure under the lock of its claim); a job ends once (J1: the row
deleted from `job` is inserted into `job_done`); a worker ends only its own attempts; a proc is deleted in the
transaction that ends its attempt, and Redis is updated after the commit.
"""
