-- Looking at claimed turns without ending them. See docs/adr/0013-the-queue.md.

-- A claim that is not where its number says lives on in slot 7; of one that has ended and was pruned nothing is told.
CREATE FUNCTION rota.queue_look(ids bigint[], masks varbit[])
RETURNS TABLE (token bigint, job_id uuid, layer_id uuid, frame integer, attempt smallint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  found_turns rota.queue_closed[] := '{}';
  more rota.queue_closed[];
  slot integer;
BEGIN
  FOR slot IN SELECT DISTINCT s FROM (SELECT id % 8 AS s FROM unnest(ids) AS id UNION SELECT 7) AS slots ORDER BY 1 LOOP
    EXECUTE format($q$
      SELECT array_agg(ROW(%1$s, c.claim_id, c.lane_id, c.last_seq - c.n + 1, rota.queue_mask(u.mask, c.n))::rota.queue_closed)
      FROM unnest($1, $2) AS u (id, mask) JOIN rota.queue_claims_%1$s c ON c.claim_id = u.id
    $q$, slot) INTO more USING ids, masks;
    found_turns := found_turns || coalesce(more, '{}');
  END LOOP;
  RETURN QUERY SELECT t.token, t.job_id, t.layer_id, t.frame, t.attempt FROM rota.queue_turns(found_turns) AS t;
END $$;

COMMENT ON FUNCTION rota.queue_look IS 'Which frames and attempts claimed turns are.';
