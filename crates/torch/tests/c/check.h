/* What the C programs check with: a failed check says where, and ends the program. */
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
      fprintf(stderr, "%s:%d: not so: %s\nlast error: %s\n", __FILE__, __LINE__, #condition, why);               \
      exit(1);                                                                                                   \
    }                                                                                                            \
  } while (0)

#define MIB (1024 * 1024)

/* Whether the thread's last error has these words. */
static inline int last_error_has(const char *words) {
  char text[4096];
  warpool_last_error(text, sizeof text);
  return strstr(text, words) != NULL;
}

struct wanted {
  const char *name;
  int64_t value;
  int found;
};

static inline void find_stat(void *user, const char *name, int64_t value) {
  struct wanted *wanted = user;
  if (strcmp(name, wanted->name) == 0) {
    wanted->value = value;
    wanted->found++;
  }
}

/* One counter of a device. */
static inline int64_t stat_of(int device, const char *name) {
  struct wanted wanted = {name, 0, 0};
  CHECK(warpool_stats(device, find_stat, &wanted) == 0);
  CHECK(wanted.found == 1);
  return wanted.value;
}

#endif
