-- script: settle
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, recount, recounter, uncounted, recounted
-- key charges   hash    acct:charges:{show}
-- key buckets   zset    acct:buckets:{show}   numbers of buckets that hold tokens
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}
-- arg show_id   str
-- arg fence     int     fence under which the reconciliation began
-- arg recounter str     id of this reconciliation; a later one replaces it
-- arg step      str     begin: an empty shadow and a marker above every bucket; swap: these places take the value of
--                       the shadow, or 0; finish: delete the shadow
-- arg names*    str     short names of the places
-- reply begun mark:int seq:int
-- reply settled drifted:int seq:int            places whose counters differed from the sum of their tokens
-- reply lost                                   the reconciliation is not at this step: another one interfered
-- reply damaged where:str

local held = read_show()
if held.fence ~= fence then return {'lost'} end
if step == 'begin' then
  local found = redis.pcall('ZREVRANGE', buckets, 0, 0)
  local highest = not found.err and (found[1] and natural(found[1]) or not found[1] and -1)
  -- Charges are held by tokens, and tokens are in buckets.
  if not highest or (highest < 0 and redis.call('EXISTS', charges) == 1) then return damaged(buckets) end
  redis.call('UNLINK', shadow)
  -- Distinguishes an empty shadow from a deleted one.
  redis.call('HSET', shadow, 'begun', '1')
  redis.call('HSET', show, 'recounter', recounter)
  redis.call('HSET', show, 'recount', whole(highest + 1), 'recounted', redis.call('HGET', show, 'uncounted') or '0')
  return {'begun', highest + 1, next_seq()}
end
if held.recount ~= ENDED or held.recounter ~= recounter then return {'lost'} end
if step == 'finish' then
  redis.call('UNLINK', shadow)
  -- Limits that arrived during the scan may have missed tokens: they stay uncounted.
  local came = redis.call('HMGET', show, 'uncounted', 'recounted')
  if came[1] == came[2] then redis.call('HDEL', show, 'uncounted') end
  redis.call('HDEL', show, 'recount', 'recounted', 'recounter')
  return {'settled', 0, next_seq()}
end

local LEVEL_OF = {sub = 1, folder = 2, job = 3, layer = 4, point = 5}
local drifted = 0
for at, place in ipairs(places) do
  local level = LEVEL_OF[string.match(names[at], '^%a+')]
  local each = standing(place, level)
  if not each then return damaged(place) end
  local cast = redis.pcall('HMGET', shadow, names[at] .. ':cores', names[at] .. ':gpus', 'begun')
  local cores, gpus = pieces(cast[1] or '0'), pieces(cast[2] or '0')
  -- Negative where the limits of a job or layer arrived during the scan: it stays uncounted until the next one.
  local apart = level == 3 or level == 4
  if cast.err or not cores or not gpus or not cast[3] or (not apart and math.min(cores, gpus) < 0) then
    redis.call('HDEL', show, 'recount')
    return {'lost'}
  end
  cores, gpus = math.max(0, cores), math.max(0, gpus)
  if each.counted and (each.used[1] ~= cores or each.used[2] ~= gpus) then
    drifted = drifted + 1
    each.used = {cores, gpus}
    write_standing(each)
  end
end
return {'settled', drifted, next_seq()}
