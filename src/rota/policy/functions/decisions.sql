-- The numbers of decisions by their digests, in order; NULL for an unknown digest.
CREATE OR REPLACE FUNCTION rota.policy_words(digests bytea[]) RETURNS integer[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
  RETURN (SELECT array_agg((SELECT w.word FROM rota.policy_word w WHERE w.digest = given.digest) ORDER BY given.at)
          FROM unnest(digests) WITH ORDINALITY AS given (digest, at));
END $$;
