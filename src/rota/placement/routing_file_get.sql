-- Digest of what was last loaded from pools.yaml.
SELECT digest FROM rota.routing_file
