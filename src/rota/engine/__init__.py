"""The way of a job: submit, gate, place, book, dispatch, finish, recover. See docs/adr/0014-the-pipeline.md."""
