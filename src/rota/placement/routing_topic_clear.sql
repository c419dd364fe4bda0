-- Unmap topic $1.
DELETE FROM rota.topic_pool WHERE topic = $1
