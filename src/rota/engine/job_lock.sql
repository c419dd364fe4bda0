-- Keep others from admitting job $1 until we are done with it.
SELECT state FROM rota.job WHERE pk_job = $1::uuid AND state IN ('PENDING', 'APPROVAL_REQUIRED') FOR UPDATE
