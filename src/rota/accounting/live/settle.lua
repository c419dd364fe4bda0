-- script: settle
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, recount, uncounted, recounted
-- key charges   hash    acct:charges:{show}
-- key buckets   zset    acct:buckets:{show}   buckets that hold tokens, by their number
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}
-- arg show_id   str
-- arg fence     int     under which the recount began
-- arg step      str     begin: an empty shadow and a mark above every bucket; swap: these places take their value from
--                       the shadow, or 0; finish: the shadow goes
-- arg names*    str     short names of the places
-- reply begun mark:int seq:int
-- reply settled drifted:int seq:int            places whose counters were not what their tokens hold
-- reply lost                                   the recount is not where this step belongs: another one came between
-- reply damaged where:str

local held = read_show()
if held.fence ~= fence then return {'lost'} end
if step == 'begin' then
  local found = redis.pcall('ZREVRANGE', buckets, 0, 0)
  local highest = not found.err and (found[1] and natural(found[1]) or not found[1] and -1)
  -- Charges are held by tokens, and tokens lie in buckets.
  if not highest or (highest < 0 and redis.call('EXISTS', charges) == 1) then return damaged(buckets) end
  redis.call('UNLINK', shadow)
  redis.call('HSET', show, 'recount', whole(highest + 1), 'recounted', redis.call('HGET', show, 'uncounted') or '0')
  return {'begun', highest + 1, next_seq()}
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
  local cast = redis.pcall('HMGET', shadow, names[at] .. ':cores', names[at] .. ':gpus')
  local cores, gpus = pieces(cast[1] or '0'), pieces(cast[2] or '0')
  if cast.err or not cores or not gpus then
    redis.call('HDEL', show, 'recount')
    return {'lost'}
  end
  -- Below 0 if its limits came while we counted: then it stays uncounted, and the next recount has it right.
  cores, gpus = math.max(0, cores), math.max(0, gpus)
  if each.counted and (each.used[1] ~= cores or each.used[2] ~= gpus) then
    drifted = drifted + 1
    each.used = {cores, gpus}
    write_standing(each)
  end
end
return {'settled', drifted, next_seq()}
