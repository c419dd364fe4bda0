-- Tell every server to look at its policy file.
SELECT pg_notify($1, 'look')
