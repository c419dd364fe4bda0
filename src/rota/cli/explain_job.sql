-- What holds job $1 besides its frames, and which server leads, by the lease $2.
SELECT j.ends_as, j.dispatch_failures,
       (SELECT l.holder FROM rota.lease l WHERE l.name = $2::text AND l.expires_at > clock_timestamp()) AS leader
FROM rota.job j WHERE j.pk_job = $1::uuid
