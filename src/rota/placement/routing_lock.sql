-- One change at a time; reading goes on.
LOCK TABLE rota.topic_pool IN SHARE ROW EXCLUSIVE MODE
