/* Many threads at once, each with its own last error. Blocks are freed by other threads than those that allocated them,
   and threads end while their blocks are allocated. */
#include <pthread.h>

#include "check.h"

#define THREADS 8
#define ROUNDS 2000
#define SLOTS 64

static void *slots[SLOTS];

static void *work(void *argument) {
  unsigned seed = 1 + (unsigned)(size_t)argument;
  char mine[64];
  snprintf(mine, sizeof mine, "cannot allocate -%u bytes", seed);
  CHECK(warpool_malloc(-(ptrdiff_t)seed, 0, NULL) == NULL && last_error_has(mine));
  for (int round = 0; round < ROUNDS; round++) {
    size_t bytes = 1 + (size_t)rand_r(&seed) % (4 * MIB);
    void *ptr = warpool_malloc((ptrdiff_t)bytes, 0, NULL);
    CHECK(ptr != NULL);
    void *before = __atomic_exchange_n(&slots[rand_r(&seed) % SLOTS], ptr, __ATOMIC_ACQ_REL);
    CHECK(before != ptr);
    warpool_free(before, 0, 0, NULL);
    if (round % 500 == 0) CHECK(warpool_empty_cache() == 0);
  }
  CHECK(last_error_has(mine));
  return NULL;
}

int main(void) {
  pthread_t threads[THREADS];
  for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
  for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  int alive = 0;
  for (int i = 0; i < SLOTS; i++) {
    alive += slots[i] != NULL;
    for (int j = 0; j < i; j++) CHECK(slots[i] == NULL || slots[i] != slots[j]);
  }
  CHECK(stat_of(0, "allocation.all.current") == alive);
  CHECK(stat_of(0, "allocation.all.allocated") == THREADS * ROUNDS);
  for (int i = 0; i < SLOTS; i++) warpool_free(slots[i], 0, 0, NULL);
  CHECK(warpool_last_error(NULL, 0) == 0);
  CHECK(warpool_empty_cache() == 0 && stat_of(0, "reserved_bytes.all.current") == 0);
  puts("passed");
  return 0;
}
