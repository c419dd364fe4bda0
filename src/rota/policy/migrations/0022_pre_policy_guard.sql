-- Whether servers ask a policy before jobs run: then nobody queues a job without a word, whatever it was told itself.
CREATE TABLE rota.policy_guard (
  only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
  asks     boolean NOT NULL
);

INSERT INTO rota.policy_guard (asks) VALUES (false);

COMMENT ON TABLE rota.policy_guard IS 'What the server that started last says: rota.job_submit refuses to queue jobs without a word while it asks.';
