"""Job submissions: what users submit, its validation, and the form that is stored and sent to workers.

Every entry point (SDK, HTTP, CLI, bus) decodes a `Submission` and calls `validate_submission`; nothing is written
before both have succeeded. The engine stores the resulting `ValidatedSubmission` without further checks.

| module | subject |
|---|---|
| `submission` | `Submission`, `LayerSpec` and their encoding |
| `validation` | all limits of a submission; `ValidatedSubmission` |
| `frame_ranges` | frame specs such as `1-100x2`, and the mapping to queue numbers |
| `work` | `Work`: what a worker runs for a layer |
"""
