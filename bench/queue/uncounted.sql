-- The success path of the queue without any counting: what `bench queue` compares the ways of counting with.
CREATE OR REPLACE FUNCTION rota.insert_done_rows_tx(ids bigint[], masks varbit[])
RETURNS TABLE (claim_id bigint, refused varbit)
LANGUAGE plpgsql AS $$
DECLARE
  ended rota.queue_closed[] := rota.queue_close(1, ids, masks);
BEGIN
  RETURN QUERY SELECT * FROM rota.queue_refused(ids, masks, ended);
END $$
