-- Complete claimed turns; a row per claim of which something was refused.
SELECT claim_id, refused FROM rota.insert_done_rows_tx($1::bigint[], $2::varbit[])
