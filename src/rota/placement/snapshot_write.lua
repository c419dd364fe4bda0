-- script: snapshot_write
-- key writer    string  rota:scheduler:snapshot:writer   token of who may write
-- key snapshot  string  sys:workers:snapshot             the document
-- arg token     str
-- arg document  bytes
-- reply written                                          and the lock is free for the next one
-- reply lost                                             the lock ran out, or somebody else has it: nothing changed

if redis.call('GET', writer) ~= token then return {'lost'} end
redis.call('SET', snapshot, document)
redis.call('DEL', writer)
return {'written'}
