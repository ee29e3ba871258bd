/* Forked children of a process with busy threads. A GPU driver does not survive fork: a child gets an error for GPU
   work, frees what it inherited without effect, and ends; it never hangs. Before the first call, a fork is harmless. */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define THREADS 4
#define CHILDREN 200
/* A child that takes longer hangs. */
#define WATCHDOG_SECONDS 30

static volatile int stop;
static void *inherited;

static void *work(void *argument) {
  unsigned seed = 1 + (unsigned)(size_t)argument;
  void *held[8] = {0};
  for (int round = 0; !stop; round++) {
    void **slot = &held[rand_r(&seed) % 8];
    warpool_free(*slot, 0, 0, NULL);
    *slot = warpool_malloc((ptrdiff_t)(1 + (size_t)rand_r(&seed) % (4 * MIB)), 0, NULL);
    CHECK(*slot != NULL);
    warpool_record_stream(*slot, NULL);
    if (round % 64 == 0) CHECK(warpool_empty_cache() == 0);
    if (round % 16 == 0) CHECK(stat_of(0, "allocation.all.current") > 0);
  }
  for (int i = 0; i < 8; i++) warpool_free(held[i], 0, 0, NULL);
  return NULL;
}

static void ignore(void *user, const char *name, int64_t value) { (void)user, (void)name, (void)value; }

/* What a child does; `kind` chooses which call is first, and how it ends. */
static void child(int kind) {
  alarm(WATCHDOG_SECONDS);
  int count;
  size_t bytes;
  double fraction;
  char text[256];
  char before[4096], after[4096];
  for (int call = kind % 16; call < kind % 16 + 16; call++) {
    switch (call % 16) {
      case 0: CHECK(warpool_malloc(1000, 0, NULL) == NULL && last_error_has("forked")); break;
      case 1: CHECK(warpool_try_malloc(3 * MIB, 0, NULL) == NULL && last_error_has("forked")); break;
      case 2:
        /* Quiet: the last error is what it was before. */
        warpool_last_error(before, sizeof before);
        warpool_free(inherited, 1000, 0, NULL);
        warpool_free(NULL, 0, 0, NULL);
        warpool_last_error(after, sizeof after);
        CHECK(strcmp(before, after) == 0);
        break;
      case 3: warpool_record_stream(inherited, NULL); break;
      case 4: CHECK(warpool_empty_cache() == 1 && last_error_has("forked")); break;
      case 5: CHECK(warpool_stats(0, ignore, NULL) == 1 && last_error_has("forked")); break;
      case 6: CHECK(warpool_set_stack_hook(NULL) == 0); break;
      case 7: CHECK(warpool_device_count(&count) == 1 && last_error_has("forked")); break;
      case 8: CHECK(warpool_snapshot("/nonexistent/snapshot") == 1 && last_error_has("forked")); break;
      case 9: CHECK(warpool_set_settings("max_split_size_mb:200") == 1 && last_error_has("forked")); break;
      case 10: CHECK(warpool_record_history(1, 10, 3, NULL, 0) == 1 && last_error_has("forked")); break;
      case 11: CHECK(warpool_largest_available(0, &bytes) == 1 && warpool_settings(text, sizeof text) == 0); break;
      case 12: CHECK(warpool_get_memory_fraction(0, &fraction) == 1 && warpool_reset_peak_stats(0) == 1); break;
      case 13: warpool_init(1), warpool_reset(), warpool_memory_fraction(0.5, 0); break;
      case 14: CHECK(warpool_base_alloc(inherited, &bytes) == NULL && warpool_start() == 1); break;
      case 15: CHECK(warpool_version() != NULL && strcmp(warpool_driver(), "sim") == 0); break;
    }
  }
  if (kind % 5 == 0) {
    /* A child of a child. */
    pid_t pid = fork();
    if (pid == 0) {
      CHECK(warpool_malloc(1000, 0, NULL) == NULL && last_error_has("forked"));
      _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  /* With exit handlers and destructors, or without. */
  kind % 2 == 0 ? exit(0) : _exit(0);
}

static int run_child(int kind) {
  pid_t pid = fork();
  if (pid == 0) child(kind);
  int status;
  CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
  fprintf(stderr, "child %d: %s %d\n", kind, WIFSIGNALED(status) ? "signal" : "exit status",
          WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  return 1;
}

/* A child of a process that has not used Warpool starts its own. */
static void fork_before_start(void) {
  pid_t pid = fork();
  if (pid == 0) {
    alarm(WATCHDOG_SECONDS);
    void *ptr = warpool_malloc(1000, 0, NULL);
    CHECK(ptr != NULL);
    warpool_free(ptr, 1000, 0, NULL);
    CHECK(stat_of(0, "allocation.all.current") == 0);
    exit(0);
  }
  int status;
  CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
  fork_before_start();
  inherited = warpool_malloc(1000, 0, NULL);
  CHECK(inherited != NULL);
  pthread_t threads[THREADS];
  for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
  int failed = 0;
  /* After a few that hang, the point is made. */
  for (int i = 0; i < CHILDREN && failed < 3; i++) failed += run_child(i);
  stop = 1;
  for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  /* The parent is not affected. */
  warpool_free(inherited, 1000, 0, NULL);
  CHECK(warpool_last_error(NULL, 0) == 0);
  CHECK(warpool_empty_cache() == 0 && stat_of(0, "reserved_bytes.all.current") == 0);
  CHECK(failed == 0);
  puts("passed");
  return 0;
}
