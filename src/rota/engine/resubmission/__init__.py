"""Resubmission: runs failed or denied work again as a new job linked to the old one.

| module | subject |
|---|---|
| `resubmitter` | retries jobs, dead letters and failed frames; resubmits denied jobs with a remediation |
| `plan` | builds the submission of the new job from the rows of the old one (pure) |
| `remediation` | applies a remediation of the policy to that submission (pure) |

Recorded ends are final, so an ended job is never reopened. Removing the failures and submitting the new job is one
transaction: of two concurrent retries of a frame one wins. Called by the HTTP API and the CLI.
"""
