-- script: snapshot_write
-- key writer    string  rota:scheduler:snapshot:writer   token of the lock holder
-- key snapshot  string  sys:workers:snapshot             the document
-- arg token     str
-- arg document  bytes
-- reply written                                          and the lock is released
-- reply lost                                             the lock expired or has another holder: nothing changed

if redis.call('GET', writer) ~= token then return {'lost'} end
redis.call('SET', snapshot, document)
redis.call('DEL', writer)
return {'written'}
