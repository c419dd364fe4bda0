-- Keep others from deciding about the jobs $1 until the transaction ends.
SELECT pk_job FROM rota.job WHERE pk_job = ANY ($1::uuid[]) AND state = 'PENDING' ORDER BY pk_job FOR UPDATE
