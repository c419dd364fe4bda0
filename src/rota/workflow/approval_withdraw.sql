-- Nobody is asked about the steps $1 any more.
SELECT rota.approvals_close('step', $1::text[])
