-- Frames that wait again, or ran elsewhere, because worker $1 was lost.
SELECT count(*) FROM rota.frame_end WHERE pk_host = $1::uuid AND code = 'worker_lost'
