-- The words of these numbers.
SELECT word, told FROM rota.policy_word WHERE word = ANY ($1::integer[])
