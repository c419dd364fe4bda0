"""`rota demo`: a temporary stack, two shows, three workers, and a series of failures, checked line by line.

| module | content |
|---|---|
| `run` | the scenarios and the final checks |
| `stack` | servers, a replica in this process, worker processes |
| `policy`, `trip` | the policy and the workflow scenario |
| `tasks` | the app that the workers run |
| `view` | the report and the live dashboard |
"""
