-- script: count
-- key hits   string  bench:hits   how often this ran
-- arg by     int
-- arg label  str     carried along, as real scripts carry a token
-- reply counted hits:int label:str

return {'counted', redis.call('INCRBY', hits, by), label}
