-- How frames of these layers are tried again, and whether their jobs are being ended.
SELECT l.pk_layer, l.work, j.pk_job, j.ends_as, j.dispatch_failures, j.word
FROM rota.layer l JOIN rota.job j ON j.pk_job = l.pk_job WHERE l.pk_layer = ANY ($1::uuid[])
