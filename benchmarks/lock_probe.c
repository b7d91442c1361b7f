/* Sleep until a time, for benchmarks/lock_share.py, which calls it without the interpreter's lock.
 * What passes between the returned time and the caller's next line is the wait for that lock, and
 * not the lateness of the sleep. */
#include <time.h>

/* Returns the time at the end of the sleep. Both are seconds of the monotonic clock. */
double sleep_until(double seconds) {
  struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
