-- How many frames of queue $3 at priority $4 go before the first that waits of layer $2 of job $1.
-- Lanes are claimed in their order, and in each what was returned before what follows. Bounded: of a layer with more than
-- $5 entries the first that were written are looked at, of returned turns the first thousand; no row when none is found.
WITH lane AS MATERIALIZED (
  SELECT l.lane_id, coalesce(c.waiting - c.parked, 0) AS waiting
  FROM rota.queue_lanes l
  LEFT JOIN rota.queue_candidates(ARRAY[$3::text]) AS c ON c.lane_id = l.lane_id
  WHERE l.queue = $3 AND l.priority = $4::smallint
), at AS MATERIALIZED (
  SELECT k.lane_id, k.cursor FROM rota.queue_cursors(ARRAY(SELECT lane_id FROM lane)) AS k
), back AS MATERIALIZED (
  SELECT r.lane_id, r.first_seq, r.n, e.layer_id = $2::uuid AS mine
  FROM (SELECT * FROM rota.queue_returned u
        WHERE u.parked_job IS NULL AND u.lane_id = ANY (ARRAY(SELECT lane_id FROM lane))
        ORDER BY u.lane_id, u.first_seq LIMIT 1000) AS r
  LEFT JOIN LATERAL (
    SELECT x.layer_id FROM rota.ready_entries x
    WHERE x.ready_slot = r.ready_slot AND x.lane_id = r.lane_id AND x.lane_seq <= r.first_seq
    ORDER BY x.lane_seq DESC LIMIT 1) AS e ON true
), own AS MATERIALIZED (
  SELECT e.lane_id, e.layer_id, e.lane_seq, e.n FROM rota.ready_entries e WHERE e.job_id = $1::uuid LIMIT $5::integer
), first AS (
  SELECT b.lane_id, min(b.first_seq) AS seq, true AS returned FROM back b WHERE b.mine GROUP BY 1
  UNION ALL
  SELECT o.lane_id, min(greatest(o.lane_seq, at.cursor)), false
  FROM own o JOIN at USING (lane_id) WHERE o.layer_id = $2 AND o.lane_seq + o.n > at.cursor GROUP BY 1
)
SELECT min(
  coalesce((SELECT sum(l.waiting) FROM lane l WHERE l.lane_id < f.lane_id), 0)
  + coalesce((SELECT sum(b.n) FROM back b
              WHERE b.lane_id = f.lane_id AND (b.first_seq < f.seq OR NOT f.returned)), 0)
  + CASE WHEN f.returned THEN 0 ELSE
      f.seq - (SELECT at.cursor FROM at WHERE at.lane_id = f.lane_id)
      - coalesce((SELECT sum(t.n) FROM rota.ready_tombstones t
                  WHERE t.lane_id = f.lane_id AND t.first_seq < f.seq
                    AND t.first_seq >= (SELECT at.cursor FROM at WHERE at.lane_id = f.lane_id)), 0) END
)::bigint AS ahead
FROM first f
