-- script: seed
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, seeding
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}|acct:tokens:{show}:{bucket}|acct:limits:{show}|acct:charges:{show}|acct:buckets:{show}|acct:shadow:{show}
-- arg fence     int     to which the show was raised in PostgreSQL for this seeding
-- arg step      str     begin: refuse bookings and set the marker; wipe: remove these places; finish: accept bookings;
--                       drop: remove a show that Redis no longer keeps; doubt: remove a fence above this one, which
--                       PostgreSQL has by now: it did not come from there
-- reply done seq:int
-- reply newer                                  seeded or being seeded under this or a higher fence; or flushed since

local held = read_show()
if step == 'doubt' then
  if math.max(held.fence or 0, held.seeding or 0) <= fence then return {'newer'} end
  redis.call('HDEL', show, 'fence', 'seeding')
  return {'done', next_seq()}
end
if step == 'begin' then
  if (held.fence or 0) >= fence or (held.seeding or 0) > fence then return {'newer'} end
  redis.call('HDEL', show, 'fence', 'recount', 'recounter', 'recounted', 'reseed', 'uncounted', 'limits')
  redis.call('HSET', show, 'seeding', whole(fence), 'run', run_id())
  return {'done', next_seq()}
end
if held.seeding ~= fence then return {'newer'} end
if step == 'wipe' then
  for _, place in ipairs(places) do redis.call('UNLINK', place) end
elseif step == 'drop' then
  redis.call('UNLINK', show)
else
  redis.call('HSET', show, 'fence', whole(fence))
  redis.call('HDEL', show, 'seeding')
end
return {'done', next_seq()}
