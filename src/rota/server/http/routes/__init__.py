"""The handlers of the HTTP API, one module per resource.

Each route declares its role and scope with `permissions.requires`. Handlers decode, check visibility, call the engine,
accounting or the queue, and map the result to a view; they hold no rules. A handler's docstring is its OpenAPI summary,
and its function name the operationId.

jobs, layers, job_results, outputs   jobs and what they leave
events                               server-sent events
workflows, approvals, agents         runs, votes, recurring agents
shows, pools, queues                 tenants and quotas; pools, topics and workers; queues and dead letters
policy, admin                        the policy; ledger, keys, audit log and settings
"""
