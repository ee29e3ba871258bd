/* The paged allocator as the default backend, and the statistics of its pages. */
#include "check.h"

static int64_t page_stat(const char *name) {
  struct stat_query query = {name, 0, 0};
  CHECK(warpool_page_stats(0, find_stat, &query) == 0);
  CHECK(query.found == 1);
  return query.value;
}

int main(void) {
  CHECK(warpool_start_with(NULL) != 0 && last_error_has("'backend' is null"));
  CHECK(warpool_start_with("pages") != 0 && last_error_has("choose native, paged or cudaMallocAsync"));
  CHECK(warpool_driver() == NULL);
  CHECK(warpool_start_with("paged") == 0);
  char text[64];
  warpool_settings(text, sizeof text);
  /* The second run: a backend in the settings takes precedence. */
  if (getenv("WARPOOL_CONF")) {
    CHECK(strcmp(text, "") == 0);
    CHECK(warpool_page_stats(0, find_stat, NULL) != 0 && last_error_has("choose backend:paged"));
    puts("passed");
    return 0;
  }
  CHECK(strcmp(text, "backend:paged") == 0);
  CHECK(warpool_start_with("native") == 0 && warpool_start() == 0); /* too late: nothing changes */

  void *one = warpool_malloc(64 * MIB, 0, NULL), *two = warpool_malloc(8 * MIB, 0, NULL);
  CHECK(page_stat("pages") == 18 && page_stat("reserved_bytes") == 72 * MIB);
  CHECK(stat_of(0, "reserved_bytes.all.current") == 72 * MIB);
  warpool_free(one, 64 * MIB, 0, NULL);
  CHECK(page_stat("active_bytes") == 8 * MIB && page_stat("free_mapped_bytes") == 64 * MIB);
  /* Larger than what is free in one piece: its pages are taken, and two are new. */
  void *three = warpool_malloc(72 * MIB, 0, NULL);
  CHECK(three != NULL && page_stat("reserved_bytes") == 80 * MIB);
  warpool_free(two, 8 * MIB, 0, NULL);
  warpool_free(three, 72 * MIB, 0, NULL);
  CHECK(warpool_empty_cache() == 0 && page_stat("reserved_bytes") == 0 && page_stat("pages") == 0);
  CHECK(page_stat("pages_created") == 20 && page_stat("pages_released") == 20);
  CHECK(warpool_page_stats(7, find_stat, NULL) != 0 && last_error_has("device index 7 is out of range"));
  CHECK(warpool_page_stats(0, NULL, NULL) != 0 && last_error_has("'visit' is null"));
  puts("passed");
  return 0;
}
