-- script: settle
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, recount, uncounted, recounted
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}
-- arg show_id   str
-- arg fence     int     under which the recount began
-- arg step      str     begin: an empty shadow and a mark before everything; swap: these places take their value from
--                       the shadow, or 0; finish: the shadow goes
-- arg names*    str     short names of the places
-- reply settled drifted:int seq:int            places whose counters were not what their tokens hold
-- reply lost                                   the recount is not where this step belongs: another one came between
-- reply damaged where:str

local held = read_show()
if held.fence ~= fence then return {'lost'} end
if step == 'begin' then
  redis.call('UNLINK', shadow)
  redis.call('HSET', show, 'recount', whole(BEGUN), 'recounted', redis.call('HGET', show, 'uncounted') or '0')
  return {'settled', 0, next_seq()}
end
if held.recount ~= ENDED then return {'lost'} end
if step == 'finish' then
  redis.call('UNLINK', shadow)
  -- Limits that came while we counted may have missed tokens: they stay uncounted.
  local came = redis.call('HMGET', show, 'uncounted', 'recounted')
  if came[1] == came[2] then redis.call('HDEL', show, 'uncounted') end
  redis.call('HDEL', show, 'recount', 'recounted')
  return {'settled', 0, next_seq()}
end

local LEVEL_OF = {sub = 1, folder = 2, job = 3, layer = 4, point = 5}
local drifted = 0
for at, place in ipairs(places) do
  local each = standing(place, LEVEL_OF[string.match(names[at], '^%a+')])
  if not each then return damaged(place) end
  local cast = redis.call('HMGET', shadow, names[at] .. ':cores', names[at] .. ':gpus')
  local cores, gpus = tonumber(cast[1] or '0'), tonumber(cast[2] or '0')
  if each.counted and (each.used[1] ~= cores or each.used[2] ~= gpus) then
    drifted = drifted + 1
    each.used = {cores, gpus}
    write_standing(each)
  end
end
return {'settled', drifted, next_seq()}
