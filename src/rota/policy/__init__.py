"""May it run, may its output leave: rules in a file, who decides by them, and who asks. See docs/adr/0020-policy.md.

| module | what it does |
|---|---|
| `words` | what the policy said, each distinct word kept once |
| `asking` | what the policy is asked about jobs, alike ones once |
| `approvals` | what waits for people to agree, and who did |
| `output` | may its output leave: rules, scanners, what they say |

Nothing is imported here: gRPC, CEL and RE2 are paid for by those who use them.
"""
