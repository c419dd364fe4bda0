-- Numbers of words by their digests, in their order; null where there is none yet.
CREATE OR REPLACE FUNCTION rota.policy_words(digests bytea[]) RETURNS integer[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
  RETURN (SELECT array_agg((SELECT w.word FROM rota.policy_word w WHERE w.digest = given.digest) ORDER BY given.at)
          FROM unnest(digests) WITH ORDINALITY AS given (digest, at));
END $$;
