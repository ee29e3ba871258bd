/* CHECK and helpers of the C programs: a failed check prints its location and exits. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "warpool_torch.h"

#define CHECK(condition)                                                                                         \
  do {                                                                                                           \
    if (!(condition)) {                                                                                          \
      char why[4096];                                                                                            \
      warpool_last_error(why, sizeof why);                                                                       \
      fprintf(stderr, "%s:%d: failed: %s\nlast error: %s\n", __FILE__, __LINE__, #condition, why);               \
      exit(1);                                                                                                   \
    }                                                                                                            \
  } while (0)

#define MIB (1024 * 1024)

/* Whether the thread's last error contains `words`. */
static inline int last_error_has(const char *words) {
  char text[4096];
  warpool_last_error(text, sizeof text);
  return strstr(text, words) != NULL;
}

struct stat_query {
  const char *name;
  int64_t value;
  int found;
};

static inline void find_stat(void *user, const char *name, int64_t value) {
  struct stat_query *query = user;
  if (strcmp(name, query->name) == 0) {
    query->value = value;
    query->found++;
  }
}

/* One statistic of a device. */
static inline int64_t stat_of(int device, const char *name) {
  struct stat_query query = {name, 0, 0};
  CHECK(warpool_stats(device, find_stat, &query) == 0);
  CHECK(query.found == 1);
  return query.value;
}

#endif
