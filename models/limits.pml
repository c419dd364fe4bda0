/* Limits on their way to Redis, and jobs that are counted from their first limit on
   (docs/adr/0011-what-redis-counts.md).

   Two tokens, each in a bucket of its own, are charged to a subscription and to one job. The subscription is always
   counted. The job has no limit at first and is not counted; the cap it gets later (FIRST_CAP) must be compared with
   all its tokens. Beside it the subscription's cap is lowered (LOWERED) or the subscription goes (REMOVED). Changes
   push themselves, TEACHERS tell Redis of one thing because a booking asked for it, RESEEDERS tell it of everything.

   Redis stays up and seeded here, and what becomes of tokens without rows is in books.pml; A1, A2 and A5 are those of
   books.pml, and
   A3  after quiet, a reseed and a recount: counters are what tokens hold, limits and fence are those of PostgreSQL. */

#ifndef BOOKERS
#define BOOKERS 2
#endif
#ifndef RELEASES
#define RELEASES 1
#endif
#ifndef RECOUNTERS
#define RECOUNTERS 1
#endif
#ifndef RESEEDERS
#define RESEEDERS 0
#endif
#ifndef TEACHERS
#define TEACHERS 0
#endif

#define SUB 0
#define JOB 1
#ifndef TAUGHT
#define TAUGHT SUB
#endif
#define NONE 9                  /* no limit at all */

#define HAS(set, t) (((set) >> (t)) & 1)
#define ADD(set, t) set = set | (1 << (t))
#define DROP(set, t) set = set & (3 - (1 << (t)))
#define SIZE(set) (((set) & 1) + (((set) >> 1) & 1))

/* The mark of a recount: 0 none runs, 1 begun, 2 past token 0, 3 past everything. */
#define BEGUN 1
#define END 3
#define SHADOWED(t) (mark >= 2 + (t))

/* PostgreSQL. What has no limit has cap NONE; a subscription that is gone has cap 0: nothing may be booked on it. */
byte row, graves;
byte fence_pg = 1;
byte cap_pg[2], version_pg[2];
bool there_pg[2];

/* Redis. */
byte tokens;
byte count[2], shadow[2];
byte fence_redis = 1;
byte cap_redis[2], version_redis[2];
bool known[2];                  /* limits of it are written; a job is counted from then on */
byte mark, recounter;           /* how far a recount is, and whose it is */
byte uncounted, recounted;      /* first limits since the last recount; how many of them the recount began after */
byte reseeder;                  /* whose reseed is under way */

bool A1 = 1, A2 = 1, A3 = 1, A5 = 1;
byte bookers_left;

#define ROWS SIZE(row)
#define SHORT(k) (there_pg[k] && count[k] < ROWS)
#define COUNTED(k) ((k) == SUB || known[k])
#define FITS(k) (!known[k] || count[k] + 1 <= cap_redis[k])
#define OVER(k) (known[k] && count[k] > cap_redis[k])

inline charge(t) {
  ADD(tokens, t);
  count[SUB]++;
  if :: COUNTED(JOB) -> count[JOB]++ :: else fi;
  if :: SHADOWED(t) -> shadow[SUB]++; shadow[JOB]++ :: else fi
}

inline discharge(t) {
  DROP(tokens, t);
  A5 = A5 && count[SUB] > 0 && (!SHADOWED(t) || (shadow[SUB] > 0 && shadow[JOB] > 0));
  assert(A5);
  count[SUB]--;
  if :: COUNTED(JOB) && count[JOB] > 0 -> count[JOB]-- :: else fi;   /* it may have been booked before it was counted */
  if :: SHADOWED(t) -> shadow[SUB]--; shadow[JOB]-- :: else fi
}

/* The subscription must be known, the job need not be: the booker believes that it has no limit. */
inline book(t, fence) {
  d_step {
    if
    :: HAS(tokens, t) && known[SUB] && !OVER(SUB) && !OVER(JOB) -> fence = fence_redis
    :: !HAS(tokens, t) && known[SUB] && FITS(SUB) && FITS(JOB) -> charge(t); fence = fence_redis
    :: else -> fence = 0
    fi;
    printf("%d: book token %d: fence %d, job counts %d\n", _pid, t, fence, count[JOB])
  }
}

inline release(t, fence) {
  d_step {
    if :: fence_redis <= fence && HAS(tokens, t) -> discharge(t) :: else fi;
    printf("%d: release token %d with fence %d, job counts %d\n", _pid, t, fence, count[JOB])
  }
}

inline insert(t, fence, refused) {
  d_step {
    if
    :: fence_pg == fence && !HAS(graves, t) ->
       refused = 0; ADD(row, t);
       A1 = A1 && ROWS <= cap_pg[SUB] && ROWS <= cap_pg[JOB];
       assert(A1)
    :: else -> refused = 1
    fi;
    printf("%d: insert token %d under fence %d: refused %d\n", _pid, t, fence, refused)
  }
}

proctype Booker(byte t) {
  byte fence, tries;
  bool refused;
  do
  :: tries < 2 ->
     book(t, fence);
     if :: fence == 0 -> tries++ :: else ->
        insert(t, fence, refused);
        if :: refused -> release(t, fence); tries++ :: else -> break fi
     fi;
     fence = 0
  :: else -> break
  od;
  atomic { fence = 0; refused = 0; tries = 0; bookers_left-- }
}

inline delete_row(t, fence) {
  DROP(row, t); ADD(graves, t); fence = fence_pg;
  printf("%d: delete row %d\n", _pid, t)
}

proctype Releaser() {
  byte t, fence, n;
  do
  :: n < RELEASES ->
     if
     :: d_step { HAS(row, 0) -> t = 0; delete_row(0, fence) }
     :: d_step { HAS(row, 1) -> t = 1; delete_row(1, fence) }
     :: bookers_left == 0 -> break
     fi;
     release(t, fence);
     n++
  :: else -> break
  od;
  atomic { t = 0; fence = 0; n = 0 }
}

/* A first limit of a job finds tokens that were never counted for it: until a recount has, the fence stays. */
inline write_limit(k, cap, version) {
  if
  :: !known[k] && version > 0 && version >= version_redis[k] ->
     if :: k == JOB -> uncounted++ :: else fi;
     known[k] = 1; cap_redis[k] = cap; version_redis[k] = version
  :: known[k] && version >= version_redis[k] -> cap_redis[k] = cap; version_redis[k] = version
  :: else
  fi
}

/* What is gone in PostgreSQL. A push leaves its version behind, so that an older one does not bring it back; a reseed,
   which does not know one, leaves nothing. */
inline remove_limit(k, version) {
  if
  :: version == 0 || version >= version_redis[k] -> known[k] = 0; cap_redis[k] = 0; version_redis[k] = version
  :: else
  fi
}

#ifdef BUG_FENCE_MOVES_UNCOUNTED
#define FENCE_MAY_MOVE 1
#else
#define FENCE_MAY_MOVE (uncounted == 0)
#endif

/* A push: one thing. Only the change that raised the fence may move it in Redis: from the one before, to its own. */
inline push(k, there, cap, version, fence, raised) {
  d_step {
    if
    :: fence_redis > fence || (raised && fence_redis < fence - 1)
    :: else ->
       if :: there -> write_limit(k, cap, version) :: else -> remove_limit(k, version) fi;
       if :: raised && FENCE_MAY_MOVE -> fence_redis = fence :: else fi
    fi;
    printf("%d: push of key %d, cap %d, fence now %d, uncounted %d\n", _pid, k, cap_redis[k], fence_redis, uncounted)
  }
}

/* Lowering a cap, giving a first one and removing a thing raise the fence in the same transaction. */
inline change(k, there, cap, version, fence) {
  d_step {
    fence_pg++; graves = 0; fence = fence_pg;
    cap_pg[k] = cap; there_pg[k] = there; version_pg[k]++; version = version_pg[k];
    printf("%d: cap of key %d is %d, fence %d\n", _pid, k, cap, fence_pg)
  }
}

proctype Change(byte k; bool there; byte cap) {
  byte version, fence;
  if
  :: atomic { there || row == 0 -> change(k, there, cap, version, fence) }    /* nothing goes while frames run on it */
  :: !there && row != 0 -> goto done
  fi;
  if
  :: push(k, there, cap, version, fence, 1)
  :: skip                                     /* dies before it told */
  fi;
done:
  atomic { version = 0; fence = 0 }
}

/* A booking met something unknown: it is read and told, with the fence of that read. */
#ifdef BUG_ANY_PUSH_MOVES_THE_FENCE
#define RAISED 1
#else
#define RAISED 0
#endif

proctype Teacher(byte k) {
  byte cap, version, fence;
  d_step {
    if :: there_pg[k] -> cap = cap_pg[k]; version = version_pg[k] :: else fi; fence = fence_pg;
    printf("%d: reads key %d, cap %d, fence %d\n", _pid, k, cap, fence)
  };
  push(k, 1, cap, version, fence, RAISED);
  atomic { cap = 0; version = 0; fence = 0 }
}

#ifdef NAMELESS
#define MY_RESEED 1
#else
#define MY_RESEED (reseeder == _pid)
#endif
#define RESEEDS(fence) (MY_RESEED && fence_redis <= (fence))

/* Everything, as of one read. What is gone goes in the very call that moves the fence: a push that read it before finds
   a higher fence from then on, and comes too early until then. */
inline reseed() {
  d_step { reseeder = _pid; had = known[SUB]; printf("%d: reseed begins\n", _pid) };
  d_step {
    fence = fence_pg; cap[0] = cap_pg[0]; cap[1] = cap_pg[1];
    version[0] = (there_pg[0] -> version_pg[0] : 0); version[1] = (there_pg[1] -> version_pg[1] : 0);
    printf("%d: reads all limits, fence %d\n", _pid, fence)
  };
  d_step {
    if
    :: RESEEDS(fence) && version[SUB] > 0 -> write_limit(SUB, cap[SUB], version[SUB])
#ifdef BUG_REMOVED_BEFORE_THE_FENCE
    :: RESEEDS(fence) && version[SUB] == 0 && had -> remove_limit(SUB, 0)
#endif
    :: else
    fi;
    printf("%d: reseed of key 0: cap %d\n", _pid, cap_redis[SUB])
  };
  d_step {
    if :: RESEEDS(fence) && version[JOB] > 0 -> write_limit(JOB, cap[JOB], version[JOB]) :: else fi;
    printf("%d: reseed of key 1: cap %d, uncounted %d\n", _pid, cap_redis[JOB], uncounted)
  };
  d_step {
    if
    :: RESEEDS(fence) ->
#ifndef BUG_REMOVED_BEFORE_THE_FENCE
       if :: version[SUB] == 0 && had -> remove_limit(SUB, 0) :: else fi;
#endif
       if :: fence == fence_redis || FENCE_MAY_MOVE -> fence_redis = fence; reseeder = 0 :: else fi
    :: else
    fi;
    had = 0; fence = 0; cap[0] = 0; cap[1] = 0; version[0] = 0; version[1] = 0;
    printf("%d: reseed ends, fence now %d\n", _pid, fence_redis)
  }
}

proctype Reseeder() {
  byte fence, cap[2], version[2];
  bool had;
  reseed()
}

#ifdef BUG_RECOUNT_NOT_NAMED
#define MINE(at, fence) (mark == (at) && fence_redis == (fence))
#else
#define MINE(at, fence) (mark == (at) && fence_redis == (fence) && recounter == _pid)
#endif

inline take_bucket(from, t, fence) {
  d_step {
    if
    :: MINE(from, fence) -> if :: HAS(tokens, t) -> shadow[SUB]++; shadow[JOB]++ :: else fi; mark = from + 1
    :: else -> lost = 1
    fi;
    printf("%d: recount past token %d, lost %d\n", _pid, t, lost)
  }
}

inline swap(k, fence) {
  d_step {
    if :: MINE(END, fence) -> count[k] = shadow[k] :: else -> lost = 1 fi;
    printf("%d: swap key %d, now %d, lost %d\n", _pid, k, count[k], lost)
  }
}

#ifdef BUG_FLAG_CLEARED_BLINDLY
#define ALL_COUNTED 1
#else
#define ALL_COUNTED (uncounted == recounted)
#endif

proctype Recounter() {
  byte fence;
  bool lost, job;
  d_step {
    fence = fence_redis; mark = BEGUN; recounter = _pid; shadow[0] = 0; shadow[1] = 0; recounted = uncounted;
    printf("%d: recount begins, uncounted %d\n", _pid, uncounted)
  };
  take_bucket(1, 0, fence); if :: lost -> goto done :: else fi;
  take_bucket(2, 1, fence); if :: lost -> goto done :: else fi;
  d_step { job = known[JOB] };                /* what has limits is listed before the swap */
  swap(SUB, fence); if :: lost -> goto done :: else fi;
  if :: job -> swap(JOB, fence) :: else fi; if :: lost -> goto done :: else fi;
  d_step {
    if
    :: MINE(END, fence) ->
       if :: ALL_COUNTED -> uncounted = 0 :: else fi;
       mark = 0; recounter = 0; recounted = 0; shadow[0] = 0; shadow[1] = 0
    :: else
    fi;
    printf("%d: recount ends, uncounted %d\n", _pid, uncounted)
  };
done:
  atomic { fence = 0; lost = 0; job = 0 }
}

active proctype Watch() {
end:
  atomic { fence_redis == fence_pg && (SHORT(SUB) || SHORT(JOB)) -> A2 = 0; assert(A2) }
}

#define ALONE (_nr_pr == 2)                   /* this and Watch */

init {
  byte n;
  atomic {
    cap_pg[SUB] = 2; version_pg[SUB] = 1; there_pg[SUB] = 1;
    cap_redis[SUB] = 2; version_redis[SUB] = 1; known[SUB] = 1;
    cap_pg[JOB] = NONE;
    do :: n < BOOKERS -> bookers_left++; run Booker(n); n++ :: else -> break od;
    run Releaser();
    n = 0; do :: n < RECOUNTERS -> run Recounter(); n++ :: else -> break od;
    n = 0; do :: n < RESEEDERS -> run Reseeder(); n++ :: else -> break od;
    n = 0; do :: n < TEACHERS -> run Teacher(TAUGHT); n++ :: else -> break od;
#ifdef FIRST_CAP
    run Change(JOB, 1, 1);
#endif
#ifdef LOWERED
    run Change(SUB, 1, 1);
#endif
#ifdef REMOVED
    run Change(SUB, 0, 0);
#endif
    n = 0
  };
  ALONE;
  run Reseeder();
  ALONE;
  run Recounter();
  ALONE;
  run Reseeder();
  ALONE;
  d_step {
    A3 = fence_redis == fence_pg && uncounted == 0 && mark == 0 && count[SUB] == SIZE(tokens);
    A3 = A3 && known[SUB] == there_pg[SUB] && (!known[SUB] || cap_redis[SUB] == cap_pg[SUB]);
    A3 = A3 && (!there_pg[JOB] || (known[JOB] && cap_redis[JOB] == cap_pg[JOB] && count[JOB] == SIZE(tokens)));
    assert(A3)
  }
}
