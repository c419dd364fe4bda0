-- script: limits
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, seeding, reseed, uncounted, limits
-- key index     hash    acct:limits:{show}    short name -> version of the written limits, followed by a minus where a
--                                             push removed them
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}
-- arg fence     int     fence of the show in the PostgreSQL read that these limits come from
-- arg how       str     push: a change; teach: limits requested by a booking; mark: begin a reseed; reseed: all limits,
--                       under its marker; seed: part of a seeding
-- arg raised    int     push: the fence that this change raised the show to; 0: it did not
-- arg founded   int     Redis must have been seeded under this fence or a higher one; under a lower it may lack procs
-- arg mark      str     the marker of the reseed; a later reseed replaces it
-- arg last      bool    reseed: everything is written, the fence may rise
-- arg entries   packed  {short name, version, fields and values, or nothing: removed}, one per place
-- reply written seq:int
-- reply unseeded                               a booking would be refused too: the show must be seeded
-- reply newer                                  Redis has a newer state
-- reply missed                                 an earlier change did not arrive: all limits must be sent
-- reply uncounted                              a job or layer has its first limits, and its frames were not counted
--                                              before: a reconciliation is needed, and the fence rises after it. Items
--                                              of a teach have no frames yet, so they can wait until a fence rises

-- Damage is repaired by seeding the show again.
local function unseeded()
  redis.call('HDEL', show, 'fence', 'seeding')
  return {'unseeded'}
end

local held = read_show()
if how == 'seed' then
  if held.seeding ~= fence then return {'newer'} end
else
  if not held.fence then return {'unseeded'} end
  if how == 'mark' then
    redis.call('HSET', show, 'reseed', mark)
    return {'written', last_seq()}
  end
  if held.fence < founded then return unseeded() end
  if held.fence > fence then return {'newer'} end
  -- A change that raised the fence beyond that of Redis must arrive with it, and only its own push brings it.
  local own = how == 'push' and raised == fence and held.fence == fence - 1
  if (how == 'push' or how == 'teach') and held.fence < fence and not own then return {'missed'} end
  if how == 'reseed' and redis.call('HGET', show, 'reseed') ~= mark then return {'newer'} end
end

if how ~= 'seed' and not is_whole(held) then return unseeded() end

local first_limits = false
for place, entry in ipairs(entries) do
  local name, version, fields = entry[1], entry[2], entry[3]
  local key, level = places[place], string.match(name, '^%a+')
  -- The version of removed limits ends with a minus.
  local had = redis.call('HGET', index, name) or ''
  local written, removed = natural(string.match(had, '^%d+')), string.match(had, '-$')
  local apart = level == 'job' or level == 'layer'
  if how == 'seed' and not written then
    redis.call('DEL', key)
  elseif not is_a('hash', key) then
    return unseeded()
  end
  if not written or version >= written then
    if #fields > 0 then
      if not written or removed then
        -- Its frames were not counted before, and there may be some.
        if apart and how ~= 'seed' then
          redis.call('HSET', show, 'uncounted', whole((natural(redis.call('HGET', show, 'uncounted')) or 0) + 1))
          first_limits = true
        end
        redis.call('HSETNX', key, 'int_cores', '0')
        redis.call('HSETNX', key, 'int_gpus', '0')
      end
      redis.call('HSET', index, name, whole(version))
      redis.call('HSET', key, unpack(fields))
    else
      local own = level == 'sub' and {'size', 'burst', 'gpu_burst'}
        or {'int_min_cores', 'int_max_cores', 'int_min_gpus', 'int_max_gpus', 'int_priority', 'show_id'}
      redis.call('HDEL', key, unpack(own))
      local used = redis.call('HMGET', key, 'int_cores', 'int_gpus')
      -- Jobs and layers without limits are not counted, so the remaining values would never return to 0.
      if apart or ((used[1] or '0') == '0' and (used[2] or '0') == '0') then redis.call('DEL', key) end
      -- A push keeps the version, so that an older push does not restore the limits.
      if how ~= 'reseed' then
        redis.call('HSET', index, name, whole(version) .. '-')
      else
        redis.call('HDEL', index, name)
      end
    end
  end
end
redis.call('HSET', show, 'limits', redis.call('HLEN', index))
if how == 'push' or how == 'teach' or (how == 'reseed' and last) then
  if first_limits and how == 'push' or fence > held.fence and redis.call('HEXISTS', show, 'uncounted') == 1 then
    next_seq()
    return {'uncounted'}
  end
  redis.call('HSET', show, 'fence', whole(fence))
end
if how == 'reseed' and last then redis.call('HDEL', show, 'reseed') end
return {'written', next_seq()}
