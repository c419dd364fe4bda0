/* The protocol the books do not use: no tokens; a recount reads a sequence number, sums the rows, and writes the counter
   if the number has not moved. It watches Redis only, and a booking is two steps in two stores: a recount that falls
   whole between them sees an unmoved number and erases the booking. Must break A1, with no crash and no fault at all. */

#define CAP 2
#define BOOKERS 3

byte count, rows, sequence;
bool A1 = 1;

proctype Booker(bool releases) {
  bool booked;

  d_step {
    if :: count < CAP -> count++; sequence++; booked = 1 :: else fi;
    printf("%d: book: %d, count %d\n", _pid, booked, count)
  };
  if :: !booked -> goto done :: else fi;
  d_step { rows++; printf("%d: insert, rows %d\n", _pid, rows); A1 = rows <= CAP; assert(A1) };
  if
  :: releases -> d_step { rows-- }; d_step { if :: count > 0 -> count-- :: else fi; sequence++ }
  :: else
  fi;
done:
  skip
}

proctype Recounter() {
  byte seen, sum, round;
  do
  :: round < 2 ->
     seen = sequence;
     sum = rows;
     d_step {
       if :: sequence == seen -> count = sum :: else fi;
       printf("%d: recount of %d rows, count %d\n", _pid, sum, count)
     };
     round++
  :: else -> break
  od
}

init {
  byte n;
  atomic {
    do :: n < BOOKERS -> run Booker(n == 0); n++ :: else -> break od;
    run Recounter()
  }
}
