/* A show changes hands (docs/adr/0009-the-books.md): from Redis to PostgreSQL alone and back, while Redis may be
   emptied, seeded by two replicas at once, and brought up to date by reseeds.

   Two tokens, read by a seeding in two pages; one level, whose cap is one. What is counted in Redis is its tokens: how
   counters follow them is in books.pml. The fence rises for two kinds of reasons. Lowering a cap means that Redis must
   be told a limit: a reseed does, and lifts its fence. A seeding or a flip to Redis *founds* the show anew: its tokens
   must be read from rows, and nothing but that seeding, or a later one, may give Redis this fence.

   A1  no insert takes the show over its cap
   A2  under a current fence every row of a managed show has its token in Redis
   A3  after quiet and one look: the fence is current, or Redis has forgotten a show it does not keep */

#ifndef BOOKERS
#define BOOKERS 2
#endif
#ifndef RELEASES
#define RELEASES 1
#endif
#ifndef FLIPS
#define FLIPS 0
#endif
#ifndef FLUSHES
#define FLUSHES 0
#endif
#ifndef LOOKS
#define LOOKS 1
#endif
#ifndef RAISES
#define RAISES 0
#endif

#define CAP 1
#define HAS(set, t) (((set) >> (t)) & 1)
#define ADD(set, t) set = set | (1 << (t))
#define DROP(set, t) set = set & (3 - (1 << (t)))
#define SIZE(set) (((set) & 1) + (((set) >> 1) & 1))

/* PostgreSQL. */
byte row, graves;
byte fence_pg = 1;
byte founded = 1;               /* the fence of the last seeding or flip to Redis */
bool managed = 1;

/* Redis. */
byte tokens;
byte fence_redis = 1;
byte seeding;

bool A1 = 1, A2 = 1, A3 = 1;
byte bookers_left, flips;
byte flushes_left = FLUSHES;

inline raise_fence(fence) {
  fence_pg++; graves = 0; fence = fence_pg;
  printf("%d: the fence rises to %d\n", _pid, fence)
}

inline found(fence) { raise_fence(fence); founded = fence }

inline commit_row(t) {
  ADD(row, t);
  A1 = A1 && SIZE(row) <= CAP;
  assert(A1)
}

inline book(t, fence) {
  d_step {
    if
    :: fence_redis != 0 && HAS(tokens, t) && SIZE(tokens) <= CAP -> fence = fence_redis
    :: fence_redis != 0 && !HAS(tokens, t) && SIZE(tokens) < CAP -> ADD(tokens, t); fence = fence_redis
    :: else -> fence = 0
    fi;
    printf("%d: book token %d: fence %d\n", _pid, t, fence)
  }
}

inline insert(t, fence, refused) {
  d_step {
    if
    :: HAS(row, t) -> refused = 0
    :: !HAS(row, t) && managed && fence_pg == fence && !HAS(graves, t) -> commit_row(t); refused = 0
    :: else -> refused = 1
    fi;
    printf("%d: insert token %d under fence %d: refused %d\n", _pid, t, fence, refused)
  }
}

#define STANDING (fence_redis != 0 -> fence_redis : seeding)

inline release(t, fence) {
  d_step {
    if :: STANDING != 0 && STANDING <= fence -> DROP(tokens, t) :: else fi;
    printf("%d: release token %d with fence %d\n", _pid, t, fence)
  }
}

/* Whoever books asks the one ledger or the other; what it remembers of the flag may be old. */
proctype Booker(byte t) {
  byte fence, tries;
  bool refused;
  do
  :: tries < 2 ->
     if
     :: book(t, fence);
        if
        :: fence != 0 -> insert(t, fence, refused); if :: refused -> release(t, fence) :: else -> break fi
        :: else
        fi;
        fence = 0
     :: FLIPS > 0 ->
        d_step {
          if :: !managed && !HAS(row, t) && !HAS(graves, t) && SIZE(row) < CAP -> commit_row(t) :: else fi;
          printf("%d: book token %d in PostgreSQL: rows (mask %d)\n", _pid, t, row)
        }
     fi;
     tries++
  :: else -> break
  od;
  atomic { fence = 0; refused = 0; tries = 0; bookers_left-- }
}

inline delete_row(t, fence) {
  DROP(row, t); ADD(graves, t); fence = (managed -> fence_pg : 0);
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
     if :: fence != 0 -> release(t, fence) :: else fi;
     n++
  :: else -> break
  od;
  atomic { t = 0; fence = 0; n = 0 }
}

/* Every call of a seeding, or of forgetting a show, asks for the mark of its fence. */
#ifdef BUG_WIPED_WITHOUT_MARK
#define WIPES(fence) 1
#else
#define WIPES(fence) (seeding == (fence))
#endif

inline begin(fence) {
  d_step {
    if :: fence_redis < fence && seeding <= fence -> fence_redis = 0; seeding = fence :: else fi;
    printf("%d: begins with fence %d, mark %d\n", _pid, fence, seeding)
  }
}

inline wipe(fence) {
  d_step { if :: WIPES(fence) -> tokens = 0 :: else fi; printf("%d: wipe, tokens (mask %d)\n", _pid, tokens) }
}

inline seed_page(set, fence) {
  d_step {
    if :: seeding == fence -> tokens = tokens | set :: else fi;
    printf("%d: seed (mask %d)\n", _pid, set);
    set = 0
  }
}

inline seed(fence, rows) {
  d_step { found(fence) };
  begin(fence);
  if
  :: seeding == fence ->
     wipe(fence);
     if
     :: managed ->
        d_step { rows = row & 1 };
        seed_page(rows, fence);
        d_step { rows = row & 2 };
        seed_page(rows, fence);
        d_step {
          if :: seeding == fence -> fence_redis = fence; seeding = 0 :: else fi;
          printf("%d: seeded, fence now %d\n", _pid, fence_redis)
        }
     :: else
     fi
  :: else
  fi;
  fence = 0
}

inline forget(fence) {
  begin(fence);
  if
  :: WIPES(fence) ->
     wipe(fence);
     d_step {
       if :: WIPES(fence) -> fence_redis = 0; seeding = 0 :: else fi;
       printf("%d: forgotten, fence now %d\n", _pid, fence_redis)
     }
  :: else
  fi;
  fence = 0
}

/* All limits are written, then the fence: never to one the show was founded under since. */
#ifdef BUG_LIFTED_OVER_A_FOUNDING
#define LIFTS(fence, base) (fence_redis != 0 && fence_redis <= (fence))
#else
#define LIFTS(fence, base) (fence_redis != 0 && fence_redis <= (fence) && fence_redis >= (base))
#endif

inline reseed(fence, base) {
  d_step { fence = (managed -> fence_pg : 0); base = founded; printf("%d: reads limits, fence %d\n", _pid, fence) };
  d_step {
    if :: fence != 0 && LIFTS(fence, base) -> fence_redis = fence :: else fi;
    printf("%d: reseed, fence now %d\n", _pid, fence_redis);
    fence = 0; base = 0
  }
}

/* What one replica does, again and again; several may believe that they are the one. */
inline look(fence, other) {
  if
  :: managed && fence_redis == 0 -> seed(fence, other)
  :: managed && fence_redis != 0 && fence_redis != fence_pg ->
     reseed(fence, other);
     if :: managed && fence_redis < founded -> seed(fence, other) :: else fi
  :: !managed && STANDING != 0 ->
     d_step { fence = (managed -> 0 : fence_pg) };
     if :: fence != 0 -> forget(fence) :: else fi
  :: managed && fence_redis == fence_pg
  :: !managed && STANDING == 0
  fi
}

proctype Keeper() {
  byte fence, other;
  look(fence, other);
  atomic { fence = 0; other = 0 }
}

/* A flip is one transaction; then Redis is told, or never hears of it. */
proctype Flip(byte turn) {
  byte fence, rows;
  d_step {
    flips == turn ->
    flips++; managed = !managed;
#ifndef BUG_FLIP_WITHOUT_FENCE
    if :: managed -> found(fence) :: else -> raise_fence(fence) fi;
#endif
    fence = fence_pg;
    printf("%d: managed is %d\n", _pid, managed)
  };
  if
  :: skip                                     /* dies, or Redis is away */
  :: turn % 2 == 0 -> forget(fence)
  :: turn % 2 == 1 -> if :: fence_redis != fence -> seed(fence, rows) :: else fi
  fi;
  atomic { fence = 0; rows = 0 }
}

/* A cap is lowered: the fence rises, and the push moves the fence of Redis from the one before. */
proctype Raise() {
  byte fence;
  d_step { raise_fence(fence) };
  if
  :: d_step {
       if :: fence_redis != 0 && fence_redis == fence - 1 -> fence_redis = fence :: else fi;
       printf("%d: push, fence now %d\n", _pid, fence_redis)
     }
  :: skip
  fi;
  fence = 0
}

proctype Flusher() {
  do
  :: flushes_left > 0 ->
     d_step { tokens = 0; fence_redis = 0; seeding = 0; flushes_left--; printf("%d: FLUSH\n", _pid) }
  :: else -> break
  od
}

active proctype Watch() {
end:
  atomic { managed && fence_redis == fence_pg && (row & (3 - tokens)) != 0 -> A2 = 0; assert(A2) }
}

#define ALONE (_nr_pr == 2)                   /* this and Watch */

init {
  byte n;
  atomic {
    do :: n < BOOKERS -> bookers_left++; run Booker(n); n++ :: else -> break od;
    run Releaser();
    n = 0; do :: n < FLIPS -> run Flip(n); n++ :: else -> break od;
    n = 0; do :: n < LOOKS -> run Keeper(); n++ :: else -> break od;
    n = 0; do :: n < RAISES -> run Raise(); n++ :: else -> break od;
    if :: FLUSHES > 0 -> run Flusher() :: else fi;
    n = 0
  };
  ALONE;
  run Keeper();
  ALONE;
  d_step {
    A3 = (managed -> fence_redis == fence_pg : STANDING == 0 && tokens == 0);
    assert(A3)
  }
}
