-- script: limits
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, seeding, reseed, uncounted
-- key index     hash    acct:limits:{show}    short name -> version of the limits that are written
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}
-- arg fence     int     of the show in the read of PostgreSQL that these limits come from
-- arg how       str     push: a change, of one fence up at most; mark: a reseed begins; reseed: all limits, under its
--                       mark; seed: of a seeding
-- arg mark      str     names the reseed; another that begins takes it away
-- arg last      bool    of a reseed: everything is written, the fence may rise
-- arg entries   packed  {short name, version, fields and values or nothing: removed}, one per place
-- reply written seq:int
-- reply unseeded                               a booking would be refused, too: the show must be seeded
-- reply newer                                  what Redis has is newer
-- reply missed                                 an earlier change was not told: all limits must be sent
-- reply uncounted                              a job or layer has a limit for the first time, and its frames were not
--                                              counted before: the fence rises after a recount

local held = read_show()
if how == 'seed' then
  if held.seeding ~= fence then return {'newer'} end
else
  if not held.fence then return {'unseeded'} end
  if how == 'mark' then
    redis.call('HSET', show, 'reseed', mark)
    return {'written', last_seq()}
  end
  if held.fence > fence then return {'newer'} end
  if how == 'push' and held.fence < fence - 1 then return {'missed'} end
  if how == 'reseed' and redis.call('HGET', show, 'reseed') ~= mark then return {'newer'} end
end

if redis.call('TYPE', index).ok ~= 'hash' then redis.call('DEL', index) end
for place, entry in ipairs(entries) do
  local name, version, fields = entry[1], entry[2], entry[3]
  local written = tonumber(redis.call('HGET', index, name) or nil)
  if not written or version >= written then
    local key, level = places[place], string.match(name, '^%a+')
    if redis.call('TYPE', key).ok ~= 'hash' then redis.call('DEL', key) end
    if #fields > 0 then
      -- Its frames were not counted before, and there may be some.
      if how ~= 'seed' and not written and (level == 'job' or level == 'layer') then
        redis.call('HINCRBY', show, 'uncounted', 1)
      end
      redis.call('HSET', index, name, whole(version))
      redis.call('HSET', key, unpack(fields))
      redis.call('HSETNX', key, 'int_cores', '0')
      redis.call('HSETNX', key, 'int_gpus', '0')
    else
      local own = level == 'sub' and {'size', 'burst', 'gpu_burst'}
        or {'int_min_cores', 'int_max_cores', 'int_min_gpus', 'int_max_gpus', 'int_priority', 'show_id'}
      redis.call('HDEL', key, unpack(own))
      local used = redis.call('HMGET', key, 'int_cores', 'int_gpus')
      if (used[1] or '0') == '0' and (used[2] or '0') == '0' then redis.call('DEL', key) end
      -- The version of a push stays behind, so that an older push does not bring it back.
      if how == 'push' then
        redis.call('HSET', index, name, whole(version))
      else
        redis.call('HDEL', index, name)
      end
    end
  end
end
if how == 'push' or (how == 'reseed' and last) then
  if fence > held.fence and redis.call('HEXISTS', show, 'uncounted') == 1 then
    next_seq()
    return {'uncounted'}
  end
  redis.call('HSET', show, 'fence', whole(fence))
end
if how == 'reseed' and last then redis.call('HDEL', show, 'reseed') end
return {'written', next_seq()}
