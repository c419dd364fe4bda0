-- Reserved for another branch, which replaces this file.
SELECT 1;
