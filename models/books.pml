/* The books (docs/adr/0009-the-books.md): counters in Redis, rows in PostgreSQL, and every way the two can part.

   One step here is one script call or one committed transaction; between two steps anybody else may run, and whoever
   stands there may be paused for ever. Three tokens in two buckets; every booking is charged to two levels: the
   subscription (all tokens) and a job (A: tokens 0 and 2, B: token 1).

   A1  no insert takes a key over the cap in force at that commit; lowering a cap below use is legal
   A2  under a current fence Redis never counts less than proc
   A3  after quiet and one recount both are equal, for every key
   A4  nothing is inserted from a booking on an unseeded Redis
   A5  a call repeated changes nothing; no counter falls below 0

   Every job here has limits, and whoever finds an old fence in Redis seeds anew: how limits get there, and how jobs are
   counted from their first one on, is limits.pml; what lifts an old fence otherwise is hands.pml.

   Who takes part is chosen with -D (README.md, run.py); a name starting with BUG_ takes one rule away. What is printed
   tells the story of a trace: the process, then its step. */

#if defined(CAP_LOWERED) || defined(CAP_RAISED_AND_LOWERED) || defined(TWO_CAPS_LOWERED)
#define CAP_CHANGES
#endif
#ifndef BOOKERS
#define BOOKERS 3
#endif
#ifndef TWINS
#define TWINS 0
#endif
#ifndef RELEASES
#define RELEASES 2
#endif
#ifndef RECOUNTERS
#define RECOUNTERS 1
#endif
#ifndef FLUSHES
#define FLUSHES 0
#endif
#ifndef BOOTSTRAPS
#define BOOTSTRAPS FLUSHES
#endif
#ifndef SUB_CAP
#define SUB_CAP 2
#endif
#ifndef JOB_CAP
#define JOB_CAP 1
#endif

#define SUB 0
#define JOB_A 1
#define JOB_B 2
#define JOB(t) (1 + ((t) & 1))
#define CHARGED_TO(k) ((k) == SUB -> 7 : ((k) == JOB_A -> 5 : 2))

/* Sets of tokens are bit masks. */
#define HAS(set, t) (((set) >> (t)) & 1)
#define ADD(set, t) set = set | (1 << (t))
#define DROP(set, t) set = set & (7 - (1 << (t)))
#define WITHOUT(a, b) ((a) & (7 - (b)))
#define SIZE(set) (((set) & 1) + (((set) >> 1) & 1) + (((set) >> 2) & 1))

/* The mark of a recount: 0 none runs, 1 begun, 2 past bucket 0 (tokens 0, 1), 3 past bucket 1 (token 2), 4 past every
   token there will ever be. */
#define BEGUN 1
#define END 4
#define POSITION(t) (2 + ((t) >> 1))
#define RANGE(from, to) (((from) < 2 && (to) >= 2 -> 3 : 0) + ((from) < 3 && (to) >= 3 -> 4 : 0))

/* PostgreSQL. A grave bars its token under the fence it was dug under, and under no later one: `graves` are those of
   the present fence. So it does not matter when a grave of an earlier fence is removed, and here it goes at once. */
byte row, graves;
byte fence_pg = 1;
byte cap_pg[3], version_pg[3];

/* Redis. */
byte tokens;
byte count[3], shadow[3];
byte mark;
byte fence_redis = 1;           /* 0: unseeded */
byte seeding;                   /* the fence of the bootstrap under way; a flush takes it away */
byte cap_redis[3], version_redis[3];

/* Ghosts: what nobody in the protocol may look at. */
bool A1 = 1, A2 = 1, A3 = 1, A4 = 1, A5 = 1;
bool seeded = 1;
bool quiet;                     /* nothing fails any more */
byte hollow;                    /* tokens booked while Redis was not seeded */
bool sent_book;                 /* of token 2: a copy of the call may still be under way */
byte sent_release;              /* of token 2: the fence that such a copy carries */
byte flushes_left = FLUSHES;
byte bookers_left;
hidden byte i;
hidden int before;

#define STANDING (fence_redis != 0 -> fence_redis : seeding)
#define ROWS_OF(k) SIZE(row & CHARGED_TO(k))
#define FITS(k) (count[k] + 1 <= cap_redis[k])
#ifdef BUG_ONE_LEVEL_CHECKED
#define FITS_JOB(t) 1
#else
#define FITS_JOB(t) FITS(JOB(t))
#endif

/* A token that is there was counted, and perhaps never compared with the caps of today: it was booked before one was
   lowered, or adopted. It is booked again only where nothing is over its cap. */
#define OVER(k) (count[k] > cap_redis[k])
#if defined(BUG_THERE_IS_BOOKED)
#define STILL_FITS(t) 1
#else
#define STILL_FITS(t) (!(OVER(SUB) || OVER(JOB(t))))
#endif
#define SHORT(k) (count[k] < ROWS_OF(k))
#define EQUAL(k) (count[k] == ROWS_OF(k))

#if defined(BUG_SHADOW_NOT_ADJUSTED)
#define SHADOWED(t) 0
#elif defined(BUG_MARK_NOT_HONOURED)
#define SHADOWED(t) (mark > 0)
#else
#define SHADOWED(t) (mark >= POSITION(t))
#endif

/* STAMPED: a token carries the fence it was booked under, and a release is compared with that one instead of the
   show's. Safe as well, and fewer releases are void. */
#ifdef STAMPED
byte stamp[3];
inline restamp(t) { stamp[t] = STANDING }
inline forget_stamps() { stamp[0] = 0; stamp[1] = 0; stamp[2] = 0 }
#else
inline restamp(t) { skip }
inline forget_stamps() { skip }
#endif

/* Inside scripts: a token and its counters always change together. */
inline charge(t) {
  ADD(tokens, t);
  restamp(t);
  count[SUB]++; count[JOB(t)]++;
  if :: SHADOWED(t) -> shadow[SUB]++; shadow[JOB(t)]++ :: else fi
}

inline discharge(t) {
  DROP(tokens, t);
#ifdef STAMPED
  stamp[t] = 0;
#endif
  A5 = A5 && count[SUB] > 0 && count[JOB(t)] > 0;
  A5 = A5 && (!SHADOWED(t) || (shadow[SUB] > 0 && shadow[JOB(t)] > 0));
  assert(A5);
  count[SUB]--; count[JOB(t)]--;
  if :: SHADOWED(t) -> shadow[SUB]--; shadow[JOB(t)]-- :: else fi
}

inline book_script(t, fence) {
  if
  :: fence_redis == 0 -> fence = 0
#ifdef BUG_BOOK_NOT_REPEATABLE
  :: fence_redis != 0 && FITS(SUB) && FITS(JOB(t)) -> charge(t); fence = fence_redis
#else
  :: fence_redis != 0 && HAS(tokens, t) && STILL_FITS(t) -> fence = fence_redis; restamp(t)
  :: fence_redis != 0 && !HAS(tokens, t) && FITS(SUB) && FITS_JOB(t) -> charge(t); fence = fence_redis
#endif
  :: else -> fence = 0
  fi;
  if :: fence != 0 && !seeded -> ADD(hollow, t) :: fence != 0 && seeded -> DROP(hollow, t) :: else fi
}

/* A release carries a fence: of the show when the row was deleted, or the one that the token was booked or the recount
   begun under. Under a higher one, or while a higher one is being seeded, it is void: the token may stand for another
   row by then. With EXACT_FENCE it is void under a lower one, too, which is safe and leaves more to the recount. */
#if defined(BUG_RELEASE_NOT_FENCED)
#define MAY_RELEASE(t, fence) 1
#elif defined(EXACT_FENCE)
#define MAY_RELEASE(t, fence) (STANDING == (fence))
#elif defined(STAMPED)
#define MAY_RELEASE(t, fence) (stamp[t] <= (fence))
#else
#define MAY_RELEASE(t, fence) (STANDING != 0 && STANDING <= (fence))
#endif

inline release_script(t, fence) {
#ifdef BUG_RELEASE_NOT_REPEATABLE
  if :: MAY_RELEASE(t, fence) -> discharge(t) :: else fi
#else
  if :: MAY_RELEASE(t, fence) && HAS(tokens, t) -> discharge(t) :: else fi
#endif
}

#define PACKED(c) (c[0] + 4 * c[1] + 16 * c[2])
#define REDIS (tokens + 8 * (PACKED(count) + 64 * (PACKED(shadow) + 64 * (mark + 8 * (fence_redis + 16 * seeding)))))
#ifdef REPEAT
#define TWICE(call) call; before = REDIS; call; A5 = A5 && before == REDIS; assert(A5)
#else
#define TWICE(call) call
#endif

#ifdef LATE
#define SENT(t, call, fence) if :: t == 2 -> call = fence :: else fi
#else
#define SENT(t, call, fence) skip
#endif

inline book(t, fence) {
  d_step {
    TWICE(book_script(t, fence)); SENT(t, sent_book, 1);
    printf("%d: book token %d: fence %d\n", _pid, t, fence)
  }
}

inline release(t, fence) {
  d_step {
    TWICE(release_script(t, fence)); SENT(t, sent_release, fence);
    printf("%d: release token %d with fence %d, tokens (mask %d)\n", _pid, t, fence, tokens)
  }
}

inline release_each(set, fence) {
  i = 0;
  do :: i < 3 -> if :: HAS(set, i) -> release_script(i, fence) :: else fi; i++ :: else -> break od;
  i = 0
}

inline adopt_each(set) {
  i = 0;
  do :: i < 3 -> if :: HAS(set, i) && !HAS(tokens, i) -> charge(i) :: else fi; i++ :: else -> break od;
  i = 0
}

inline release_all(set, fence) {
  d_step {
    TWICE(release_each(set, fence));
    printf("%d: release tokens (mask %d) with fence %d\n", _pid, set, fence);
    set = 0
  }
}

inline adopt_all(set) {
  d_step {
    if :: fence_redis != 0 -> TWICE(adopt_each(set)) :: else fi;
    printf("%d: adopt rows (mask %d)\n", _pid, set);
    set = 0
  }
}

#ifdef BUG_NO_FENCE_CHECK
#define FENCE_STANDS(f) 1
#else
#define FENCE_STANDS(f) (fence_pg == (f))
#endif
#if defined(BUG_NO_GRAVE_CHECK)
#define BURIED(t) 0
#elif defined(BUG_OLD_GRAVE_BARS)
byte old;
#define BURIED(t) HAS(graves | old, t)
#else
#define BURIED(t) HAS(graves, t)
#endif

/* Under the show's lock, exclusive. */
inline raise_fence(fence) {
#ifdef BUG_OLD_GRAVE_BARS
  old = old | graves;
#endif
  fence_pg++; graves = 0; fence = fence_pg;
  printf("%d: the fence rises to %d\n", _pid, fence)
}

inline commit_row(t) {
  ADD(row, t);
  A1 = A1 && ROWS_OF(SUB) <= cap_pg[SUB] && ROWS_OF(JOB(t)) <= cap_pg[JOB(t)];
  A4 = A4 && !HAS(hollow, t);
  assert(A1); assert(A4)
}

/* One transaction under the show's lock, shared: the row goes and its token is buried. */
inline delete_row(t, fence) {
  DROP(row, t);
#ifndef BUG_NO_GRAVE
  ADD(graves, t);
#endif
  fence = fence_pg;
  printf("%d: delete row %d under fence %d\n", _pid, t, fence)
}

/* One transaction under the show's lock, shared: check, then insert. A row that is there already is no refusal. */
inline insert(t, fence, refused) {
  d_step {
    if
#ifdef BUG_THERE_IS_REFUSED
    :: HAS(row, t) -> refused = !FENCE_STANDS(fence)
#else
    :: HAS(row, t) -> refused = 0
#endif
    :: !HAS(row, t) && FENCE_STANDS(fence) && !BURIED(t) -> commit_row(t); refused = 0
    :: else -> refused = 1
    fi;
    printf("%d: insert token %d under fence %d: refused %d\n", _pid, t, fence, refused)
  }
}

proctype Booker(byte t) {
  byte fence;
  bool refused;

  book(t, fence);
#ifdef RETRY
  if
  :: skip                                     /* the reply came */
  :: book(t, fence)                           /* it was lost: ask again, same token */
  fi;
#endif
  if :: fence == 0 -> goto done :: else fi;
#ifdef BUG_INSERT_UNLOCKED
  if :: fence_pg == fence && !HAS(graves, t) -> d_step { commit_row(t) } :: else -> refused = 1 fi;
#else
  if
  :: insert(t, fence, refused)
#ifdef CRASH
  :: goto done                                /* dies between the script and the transaction */
#endif
  fi;
#endif
#ifdef RESEND
  if :: skip :: insert(t, fence, refused) fi; /* the reply of the insert was lost: sent once more */
#endif
#ifdef BUG_UNKNOWN_IS_REFUSED
  if :: skip :: refused = 1 fi;               /* the reply was lost, taken for a refusal */
#endif
  if
  :: refused ->
     if
     :: release(t, fence)                     /* what was not inserted is given back */
#ifdef CRASH
     :: skip
#endif
     fi;
#ifdef REBOOK
     book(t, fence);
     if :: fence != 0 -> insert(t, fence, refused) :: else fi
#endif
  :: else
  fi;
done:
  atomic { fence = 0; refused = 0; bookers_left-- }
}

/* Frames end: any row may go, whoever made it. */
proctype Releaser() {
  byte t, fence, n;
  do
  :: n < RELEASES ->
     if
     :: d_step { HAS(row, 0) -> t = 0; delete_row(0, fence) }
     :: d_step { HAS(row, 1) -> t = 1; delete_row(1, fence) }
     :: d_step { HAS(row, 2) -> t = 2; delete_row(2, fence) }
     :: bookers_left == 0 -> break
     fi;
     if
     :: release(t, fence)
#ifdef CRASH
     :: skip                                  /* dies after the delete */
#endif
     fi;
     n++; d_step { t = 0; fence = 0 }
  :: else -> break
  od;
  n = 0
}

/* One call: the next bucket that holds anything joins the shadow and the mark moves past it; where none is left, past
   everything. It does so only from the mark its caller left, under the fence it began under: another recount, a flush
   or a seeding may have come between. */
#ifdef BUG_MARK_NOT_COMPARED
#define MARK_IS(from, fence) 1
#else
#define MARK_IS(from, fence) (mark == (from) && fence_redis == (fence))
#endif

inline take_bucket(fence, from, to, seen) {
  d_step {
    if
    :: !MARK_IS(from, fence) -> to = 0
    :: MARK_IS(from, fence) && from < 2 && (tokens & 3) -> to = 2
    :: MARK_IS(from, fence) && !(from < 2 && (tokens & 3)) && from < 3 && (tokens & 4) -> to = 3
    :: else -> to = END
    fi;
    seen = tokens & RANGE(from, to);
    if
    :: to != 0 ->
       i = 0;
       do
       :: i < 3 -> if :: HAS(seen, i) -> shadow[SUB]++; shadow[JOB(i)]++ :: else fi; i++
       :: else -> break
       od;
       i = 0;
#ifdef BUG_END_NOT_MARKED
       if :: to != END -> mark = to :: else fi
#else
       mark = to
#endif
    :: else
    fi;
    printf("%d: recount from mark %d to %d, tokens (mask %d)\n", _pid, from, to, seen)
  }
}

#if defined(BUG_SWAPPED_EARLY)
#define MAY_SWAP(fence) (mark >= 2)
#elif defined(BUG_END_NOT_MARKED)
#define MAY_SWAP(fence) (mark > 0)
#elif defined(BUG_SWAP_NOT_COMPARED)
#define MAY_SWAP(fence) 1
#else
#define MAY_SWAP(fence) (mark == END && fence_redis == (fence))
#endif

/* Key by key, in calls of their own: the mark stands at END until the last, and each call asks for it. */
inline swap_key_script(k, fence) { if :: MAY_SWAP(fence) -> count[k] = shadow[k] :: else fi }
inline swap_key(k, fence) {
  d_step { TWICE(swap_key_script(k, fence)); printf("%d: swap key %d, now %d\n", _pid, k, count[k]) }
}

inline end_recount_script(fence) {
  if :: MAY_SWAP(fence) -> shadow[0] = 0; shadow[1] = 0; shadow[2] = 0; mark = 0 :: else fi
}

inline swap(fence) {
  swap_key(SUB, fence);
  swap_key(JOB_A, fence);
  swap_key(JOB_B, fence);
  d_step { TWICE(end_recount_script(fence)) }
}

/* Under the show's lock, exclusive: "no row" and the grave are one step. Which of the suspects lie in a grave already
   is asked first in fact, and those are released sooner; that is this step too, at a grace of nothing. */
inline bury(suspects) {
#if defined(BUG_REMOVED_WITHOUT_GRAVE)
  d_step { suspects = WITHOUT(suspects, row) }
#elif defined(BUG_GRAVE_UNLOCKED)
  d_step { suspects = WITHOUT(suspects, row) };
  d_step { graves = graves | suspects }
#else
  d_step {
    suspects = WITHOUT(suspects, row);
#ifdef BUG_OLD_GRAVE_BARS
    graves = graves | WITHOUT(suspects, old);
#else
    graves = graves | suspects;
#endif
    printf("%d: bury tokens (mask %d)\n", _pid, suspects)
  }
#endif
}

proctype Recounter() {
  byte fence, from, to, seen, strays, suspects;

  if
  :: d_step {
       fence_redis != 0 ->
       fence = fence_redis; mark = BEGUN; shadow[0] = 0; shadow[1] = 0; shadow[2] = 0; from = BEGUN;
       printf("%d: recount begins under fence %d\n", _pid, fence)
     }
  :: fence_redis == 0 -> goto done
  fi;
  do
  :: take_bucket(fence, from, to, seen);
     if :: to == 0 -> suspects = 0; break :: else fi;
     if
     :: d_step {                              /* one range read of proc */
          strays = WITHOUT(row & RANGE(from, to), seen);
          suspects = suspects | WITHOUT(seen, row);
          seen = 0
        }
#ifdef CRASH
     :: !quiet -> to = 0; suspects = 0; break /* dies; the mark and the shadow stay behind */
#endif
     fi;
     if
     :: strays != 0 ->                        /* what is deleted meanwhile is the next recount's suspect */
        adopt_all(strays)
     :: else
     fi;
#ifdef BUG_SWAPPED_EARLY
     swap(fence); to = END;
#endif
     if :: to == END -> break :: else -> from = to fi
  od;
  atomic { from = 0; seen = 0 };
  if :: to == END -> swap(fence) :: else fi;
  to = 0;
  if
  :: suspects != 0 ->
     bury(suspects);
     if
     :: suspects != 0 -> release_all(suspects, fence)
     :: suspects == 0
#ifdef CRASH
     :: suspects != 0 && !quiet -> suspects = 0     /* dies after the burial */
#endif
     fi
  :: else
  fi;
done:
  atomic { fence = 0; from = 0; seen = 0 }
}

proctype Flusher() {
  do
  :: flushes_left > 0 ->
     d_step {
       tokens = 0; forget_stamps(); mark = 0; fence_redis = 0; seeding = 0; seeded = 0;
       count[0] = 0; count[1] = 0; count[2] = 0;
       shadow[0] = 0; shadow[1] = 0; shadow[2] = 0;
       cap_redis[0] = 0; cap_redis[1] = 0; cap_redis[2] = 0;
       version_redis[0] = 0; version_redis[1] = 0; version_redis[2] = 0;
       flushes_left--;
       printf("%d: FLUSH\n", _pid)
     }
  :: else -> break
  od
}

/* A Redis that comes back with an older state of itself: a replica promoted, a file of yesterday. RUN_ID: every
   connection compares the server's run id with the one written beside the fence (and the seeding mark), so that both
   are void afterwards. */
#ifdef RESTORE
byte restores_left = 1;

proctype Restorer() {
  byte tokens_then, mark_then, fence_then, seeding_then;
  byte count_then[3], shadow_then[3];

  d_step {
    tokens_then = tokens; mark_then = mark; fence_then = fence_redis; seeding_then = seeding;
    i = 0; do :: i < 3 -> count_then[i] = count[i]; shadow_then[i] = shadow[i]; i++ :: else -> break od; i = 0
  };
  d_step {
    tokens = tokens_then; mark = mark_then;
#ifdef RUN_ID
    fence_redis = 0; seeding = 0; seeded = 0;
#else
    fence_redis = fence_then; seeding = seeding_then;
#endif
    i = 0; do :: i < 3 -> count[i] = count_then[i]; shadow[i] = shadow_then[i]; i++ :: else -> break od; i = 0;
    restores_left = 0;
    printf("%d: Redis is back, older: tokens (mask %d)\n", _pid, tokens)
  };
  d_step {
    tokens_then = 0; mark_then = 0; fence_then = 0; seeding_then = 0;
    i = 0; do :: i < 3 -> count_then[i] = 0; shadow_then[i] = 0; i++ :: else -> break od; i = 0
  }
}
#else
#define restores_left 0
#endif

#ifdef BUG_PUSH_WITHOUT_VERSION
#define NEWER(k, version) 1
#else
#define NEWER(k, version) ((version) > version_redis[k])
#endif

inline write_limit(k, cap, version) {
  if :: NEWER(k, version) -> cap_redis[k] = cap; version_redis[k] = version :: else fi
}

/* Every call of a seeding asks for its mark. */
#ifdef BUG_NO_SEEDING_MARK
#define STILL_SEEDING(fence) (fence_redis < (fence))
#else
#define STILL_SEEDING(fence) (seeding == (fence))
#endif

inline begin_script(fence) {
  if
  :: fence_redis < fence && seeding <= fence -> fence_redis = 0; mark = 0; seeding = fence
  :: else
  fi
}

inline wipe_script(fence) {
  if
  :: STILL_SEEDING(fence) ->
     tokens = 0; seeded = 0; forget_stamps();
     i = 0;
     do
     :: i < 3 -> count[i] = 0; shadow[i] = 0; cap_redis[i] = 0; version_redis[i] = 0; i++
     :: else -> break
     od;
     i = 0
  :: else
  fi
}

inline seed_rows(set, fence) {
  d_step {
    if :: STILL_SEEDING(fence) -> TWICE(adopt_each(set)) :: else fi;
    printf("%d: seed rows (mask %d)\n", _pid, set);
    set = 0
  }
}

inline write_fence_script(fence) {
  if :: STILL_SEEDING(fence) -> fence_redis = fence; seeding = 0; seeded = 1 :: else fi
}

inline write_fence(fence) {
  d_step { TWICE(write_fence_script(fence)); printf("%d: write fence %d, now %d\n", _pid, fence, fence_redis) }
}

proctype Bootstrap() {
  byte fence, rows;
#ifdef CAP_CHANGES
  byte cap[3], version[3];
#endif

  if
  :: fence_redis != fence_pg                  /* no fence, or an old one: somebody notices */
  :: flushes_left == 0 && restores_left == 0 && fence_redis == fence_pg -> goto done
  fi;
  d_step { raise_fence(fence) };
  d_step { TWICE(begin_script(fence)); printf("%d: seeding begins, mark %d\n", _pid, seeding) };
  if :: !STILL_SEEDING(fence) -> goto done :: else fi;
#ifdef BUG_FENCE_FIRST
  d_step { fence_redis = fence };
#endif
#ifdef CAP_CHANGES
  d_step { TWICE(wipe_script(fence)) };
  d_step { i = 0; do :: i < 3 -> cap[i] = cap_pg[i]; version[i] = version_pg[i]; i++ :: else -> break od; i = 0 };
  d_step {
    i = 0;
    do
    :: i < 3 ->
       if :: STILL_SEEDING(fence) -> write_limit(i, cap[i], version[i]) :: else fi;
       cap[i] = 0; version[i] = 0; i++
    :: else -> break
    od;
    i = 0
  };
#else
  /* Limits stand still in this run: removing what was, reading and writing them is one step. */
  d_step {
    wipe_script(fence);
    i = 0;
    do
    :: i < 3 -> if :: STILL_SEEDING(fence) -> write_limit(i, cap_pg[i], version_pg[i]) :: else fi; i++
    :: else -> break
    od;
    i = 0
  };
#endif
  d_step { rows = row & 3; printf("%d: seeding reads bucket 0 of proc\n", _pid) };
  seed_rows(rows, fence);
  d_step { rows = row & 4; printf("%d: seeding reads bucket 1 of proc\n", _pid) };
  if
  :: seed_rows(rows, fence)
#ifdef CRASH
  :: !quiet -> goto done
#endif
  fi;
#ifdef BUG_FENCE_FIRST
  seeded = 1;
#else
  write_fence(fence);
#endif
done:
  atomic { fence = 0; rows = 0 }
}

/* The fence rises by itself, as upkeep has it when graves are many: the transaction, then the push. */
#ifdef RAISES
proctype Raise() {
  byte fence;
  d_step { raise_fence(fence) };
  if
  :: d_step {
       if :: fence_redis == fence - 1 && fence_redis != 0 -> fence_redis = fence :: else fi;
       printf("%d: push of fence %d, now %d\n", _pid, fence, fence_redis)
     }
#ifdef CRASH
  :: skip
#endif
  fi;
  fence = 0
}
#endif

/* Graves are removed: too soon, or after they barred somebody under a later fence. */
#if defined(BUG_PRUNED_EARLY)
#define PRUNED graves
#elif defined(BUG_OLD_GRAVE_BARS)
#define PRUNED old
#endif
#ifdef PRUNED
proctype Pruner() {
  if
  :: d_step { PRUNED != 0 -> PRUNED = 0; printf("%d: prune graves\n", _pid) }
  :: bookers_left == 0
  fi
}
#endif

/* A change of a cap: the transaction, then the push. Lowering raises the fence in the same transaction; the push moves
   the fence of Redis from the one before to this one, and from no other. */
#ifdef CAP_CHANGES
byte changes;

proctype Change(byte turn; byte k; byte cap) {
  byte version, fence;

  d_step {
    changes == turn ->
    changes++;
#ifndef BUG_LOWERED_WITHOUT_FENCE
    if :: cap < cap_pg[k] -> raise_fence(fence) :: else fi;
#endif
    cap_pg[k] = cap; version_pg[k]++; version = version_pg[k];
    printf("%d: cap of key %d is %d, fence %d\n", _pid, k, cap, fence_pg)
  };
  if
  :: d_step {
       if :: fence_redis != 0 -> write_limit(k, cap, version) :: else fi;
       if
#if defined(BUG_PUSH_SEEDS)
       :: fence > fence_redis -> fence_redis = fence
#elif defined(BUG_PUSH_SKIPS)
       :: fence_redis != 0 && fence > fence_redis -> fence_redis = fence
#else
       :: fence > 1 && fence_redis == fence - 1 -> fence_redis = fence
#endif
       :: else
       fi;
       printf("%d: push of key %d, cap %d, fence now %d\n", _pid, k, cap_redis[k], fence_redis)
     }
#ifdef CRASH
  :: skip
#endif
  fi;
  d_step { version = 0; fence = 0 }
}
#endif

/* A copy of a call that hung in a socket and runs long after its answer was given up. */
#ifdef LATE
proctype Late() {
  byte fence;
  if
  :: d_step { sent_release != 0 -> release_script(2, sent_release); printf("%d: late release of token 2\n", _pid) }
  :: d_step { sent_book -> book_script(2, fence); fence = 0; printf("%d: late book of token 2\n", _pid) }
  :: bookers_left == 0
  fi
}
#endif

active proctype Watch() {
end:
  atomic {
    fence_redis != 0 && fence_redis == fence_pg && (SHORT(SUB) || SHORT(JOB_A) || SHORT(JOB_B)) ->
    A2 = 0; assert(A2)
  }
}

#define ALONE (_nr_pr == 2)                   /* this and Watch */

init {
  byte n;
  atomic {
    cap_pg[SUB] = SUB_CAP; cap_pg[JOB_A] = JOB_CAP; cap_pg[JOB_B] = 2;
    do :: n < 3 -> version_pg[n] = 1; version_redis[n] = 1; cap_redis[n] = cap_pg[n]; n++ :: else -> break od;
#ifdef DRIFT
    count[SUB] = 1; count[JOB_B] = 1;         /* left behind by nobody knows whom */
#endif
    n = 0; do :: n < BOOKERS -> bookers_left++; run Booker((n + 2) % 3); n++ :: else -> break od;   /* tokens 2, 0, 1 */
    n = 0; do :: n < TWINS -> bookers_left++; run Booker(2); n++ :: else -> break od;
    run Releaser();
    n = 0; do :: n < RECOUNTERS -> run Recounter(); n++ :: else -> break od;
    n = 0; do :: n < BOOTSTRAPS -> run Bootstrap(); n++ :: else -> break od;
    if :: FLUSHES > 0 -> run Flusher() :: else fi;
#ifdef RAISES
    n = 0; do :: n < RAISES -> run Raise(); n++ :: else -> break od;
#endif
#ifdef PRUNED
    run Pruner();
#endif
#ifdef LATE
    run Late();
#endif
#ifdef RESTORE
    run Restorer();
#endif
#if defined(CAP_LOWERED)
    run Change(0, SUB, SUB_CAP - 1);
#elif defined(CAP_RAISED_AND_LOWERED)
    run Change(0, SUB, SUB_CAP + 1); run Change(1, SUB, SUB_CAP);
#elif defined(TWO_CAPS_LOWERED)
    run Change(0, SUB, SUB_CAP - 1); run Change(1, JOB_A, JOB_CAP - 1);
#endif
    n = 0
  };
  ALONE;
  /* Quiet. Somebody notices a missing or an old fence, then one recount runs. */
  quiet = 1;
  run Bootstrap();
  ALONE;
  run Recounter();
  ALONE;
  d_step {
    A3 = EQUAL(SUB) && EQUAL(JOB_A) && EQUAL(JOB_B) && fence_redis == fence_pg && mark == 0;
    assert(A3)
  }
}
