"""Explain: why a job is not running, what of it runs, or how it ended. Reads only.

| module | subject |
|---|---|
| `explainer` | answers for one job: reads its state, forecasts dispatch for each layer, sorts the causes |
| `placement_and_quota` | the dispatch forecast: placement, then limits, in dispatch order (pure) |
| `causes`, `policy_causes`, `cause` | sentences, amounts, holders and remedies of each cause (pure) |
| `estimate` | estimated start of the next frame from recent throughput (pure) |
| `ended_jobs` | outcome and first failure of an ended job |
| `queries` | statements besides those of `engine.queries` |

Invariant: explain and dispatch agree, because both use the same placement and quota functions in the same order; a
property test checks every answer against a dispatch round. The cost of an answer does not depend on the backlog. The
HTTP API calls `Explainer` inside a replica; the CLI and dry runs call it on PostgreSQL alone.
"""
