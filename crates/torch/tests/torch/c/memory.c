/* Memory, statistics, limits, settings and snapshots. argv[1] is the path of the snapshot. */
#include "check.h"

static int hook_calls;

static void push_frames(void) {
  hook_calls++;
  warpool_push_frame("inner", "model.py", 12);
  /* An allocation inside the hook has no stack and does not call the hook again. */
  void *own = warpool_malloc(512, 0, NULL);
  CHECK(own != NULL);
  warpool_free(own, 512, 0, NULL);
  warpool_push_frame("outer", "train.py", 34);
}

static void check_memory(void) {
  void *one = warpool_malloc(MIB, 0, NULL);
  void *two = warpool_try_malloc(MIB, 0, NULL);
  CHECK(one != NULL && two != NULL && one != two);
  CHECK(stat_of(0, "allocated_bytes.all.current") == 2 * MIB);
  CHECK(stat_of(0, "reserved_bytes.all.current") == 2 * MIB);
  CHECK(stat_of(1, "allocated_bytes.all.current") == 0);

  size_t segment = 0;
  CHECK(warpool_base_alloc(two, &segment) == one && segment == 2 * MIB);
  CHECK(warpool_base_alloc(two, NULL) == one);

  warpool_record_stream(one, NULL);
  warpool_free(one, MIB, 0, NULL);
  CHECK(warpool_malloc(MIB, 0, NULL) == one);
  warpool_free(one, MIB, 0, NULL);
  warpool_free(two, MIB, 0, NULL);
  warpool_free(NULL, 0, 0, NULL);
  CHECK(stat_of(0, "allocated_bytes.all.current") == 0);
  CHECK(stat_of(0, "allocated_bytes.all.peak") == 2 * MIB);
  CHECK(warpool_reset_peak_stats(0) == 0 && stat_of(0, "allocated_bytes.all.peak") == 0);
  CHECK(stat_of(0, "allocation.all.allocated") == 3);
  CHECK(warpool_reset_accumulated_stats(0) == 0 && stat_of(0, "allocation.all.allocated") == 0);

  size_t largest = 0;
  CHECK(warpool_largest_available(0, &largest) == 0 && largest > 1024u * MIB);
  CHECK(warpool_empty_cache() == 0 && stat_of(0, "reserved_bytes.all.current") == 0);
  warpool_reset();
}

static void check_limits(void) {
  double fraction = 0;
  CHECK(warpool_get_memory_fraction(1, &fraction) == 0 && fraction == 1.0);
  warpool_memory_fraction(0.25, 1);
  CHECK(warpool_get_memory_fraction(1, &fraction) == 0 && fraction == 0.25);
  CHECK(warpool_set_memory_fraction(1.5, 1) != 0 && last_error_has("invalid fraction: 1.5"));
  CHECK(warpool_get_memory_fraction(1, &fraction) == 0 && fraction == 0.25);
  CHECK(warpool_malloc(3000L * MIB, 1, NULL) == NULL);
  CHECK(last_error_has("CUDA out of memory. Tried to allocate 2.93 GiB. GPU 1 has a total capacity of 8.00 GiB"));
  CHECK(last_error_has("2.00 GiB allowed"));
  CHECK(warpool_set_memory_fraction(1.0, 1) == 0);
  void *ptr = warpool_malloc(3000L * MIB, 1, NULL);
  CHECK(ptr != NULL);
  warpool_free(ptr, 3000L * MIB, 1, NULL);
  CHECK(stat_of(1, "num_ooms") == 1);
}

static void check_settings(void) {
  char text[256];
  CHECK(warpool_settings(text, sizeof text) == strlen("max_split_size_mb:200"));
  CHECK(strcmp(text, "max_split_size_mb:200") == 0);
  CHECK(warpool_settings(text, 4) == 21 && strcmp(text, "max") == 0);
  CHECK(warpool_settings(NULL, 0) == 21);
  CHECK(warpool_set_settings("max_split_size_mb:1,unknown:2") != 0);
  CHECK(last_error_has("2 problems") && last_error_has("`unknown`"));
  CHECK(warpool_set_settings("expandable_segments:True") == 0);
  warpool_settings(text, sizeof text);
  CHECK(strcmp(text, "expandable_segments:True") == 0); /* as in PyTorch, this key resets the other */
  CHECK(warpool_set_settings("expandable_segments:False") == 0);
}

static void check_history(const char *path) {
  CHECK(warpool_set_stack_hook(push_frames) == 0);
  CHECK(warpool_record_history(1, 100, 7, NULL, 0) != 0 && last_error_has("unknown stack level 7"));
  CHECK(warpool_record_history(1, 100, 3, "segment_alloc, nonsense", 0) != 0);
  CHECK(last_error_has("unknown action \"nonsense\""));
  CHECK(warpool_record_history(1, 100, 3, "segment_alloc,free_completed", 1) == 0);
  CHECK(warpool_set_user_metadata("step 7") == 0);
  void *kept = warpool_malloc(3 * MIB, 0, NULL);
  CHECK(warpool_set_user_metadata(NULL) == 0);
  void *freed = warpool_malloc(3 * MIB, 0, NULL);
  warpool_free(freed, 3 * MIB, 0, NULL);
  CHECK(hook_calls == 3);
  CHECK(warpool_snapshot(path) == 0);
  CHECK(warpool_set_stack_hook(NULL) == 0);
  int calls = hook_calls;
  warpool_free(kept, 3 * MIB, 0, NULL);
  CHECK(hook_calls == calls);
  CHECK(warpool_record_history(0, 0, 0, NULL, 0) == 0);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  CHECK(warpool_driver() == NULL);
  warpool_init(0);
  CHECK(warpool_driver() == NULL);
  int devices = 0;
  CHECK(warpool_device_count(&devices) == 0 && devices == 2);
  CHECK(strcmp(warpool_driver(), "sim") == 0);
  check_memory();
  check_limits();
  check_settings();
  check_history(argv[1]);
  puts("passed");
  return 0;
}
