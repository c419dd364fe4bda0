-- Steps that wait for people: runs hear of what they said. See docs/adr/0021-workflows.md.

ALTER TABLE rota.workflow_news DROP CONSTRAINT workflow_news_kind_check;
ALTER TABLE rota.workflow_news ADD CONSTRAINT workflow_news_kind_check
  CHECK (kind IN ('job', 'undo', 'free', 'run', 'saga', 'cancel', 'approval'));

COMMENT ON COLUMN rota.workflow_news.pk_job IS 'The job, of kind run the run, that has ended; of kind approval what was decided.';
COMMENT ON COLUMN rota.workflow_news.request IS 'Of a job what was submitted; of a run how it failed; of an approval the output of its step.';
