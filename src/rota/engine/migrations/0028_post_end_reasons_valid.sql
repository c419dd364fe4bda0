ALTER TABLE rota.job_done VALIDATE CONSTRAINT job_done_reason;

ALTER TABLE rota.frame_end VALIDATE CONSTRAINT frame_end_code;
