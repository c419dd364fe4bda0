-- Layers of live jobs whose ids lie between $1 and $2, a few of them.
SELECT pk_layer AS id FROM rota.layer WHERE pk_layer BETWEEN $1::uuid AND $2::uuid ORDER BY pk_layer LIMIT 6
