/* The clock at the end of a sleep, for benchmarks/lock_share.py: ctypes calls it without the
 * interpreter's lock, so that what passes between this time and the caller's next line is the wait
 * for that lock, and not the sleep's own lateness. */
#include <time.h>

double nap(double seconds) {
  struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  nanosleep(&t, NULL);
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
