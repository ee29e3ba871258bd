/* Every error is reported, and the program continues. argv[1] is a writable folder. */
#include "check.h"

/* An address that must not be followed, in place of the filter that PyTorch passes. */
#define FILTER ((void *)8)

int main(int argc, char **argv) {
  CHECK(argc == 2);
  /* A failed start can be repeated. */
  CHECK(warpool_last_error(NULL, 0) == 0);
  setenv("WARPOOL_DRIVER", "vulkan", 1);
  CHECK(warpool_start() != 0 && last_error_has("unknown driver \"vulkan\""));
  CHECK(warpool_malloc(MIB, 0, NULL) == NULL && last_error_has("vulkan"));
  warpool_init(1);
  setenv("WARPOOL_DRIVER", "sim", 1);
  setenv("WARPOOL_SIM", "devices:none", 1);
  CHECK(warpool_start() != 0 && last_error_has("WARPOOL_SIM: devices: \"none\" is not a whole number"));
  unsetenv("WARPOOL_SIM");
  setenv("WARPOOL_CONF", "expandable_segments:maybe", 1);
  CHECK(warpool_start() != 0 && last_error_has("WARPOOL_CONF: settings:") && last_error_has("expandable_segments"));
  unsetenv("WARPOOL_CONF");
  CHECK(warpool_driver() == NULL);
  CHECK(warpool_start() == 0 && warpool_start() == 0);

  CHECK(warpool_malloc(0, 0, NULL) == NULL);
  CHECK(warpool_malloc(-5, 0, NULL) == NULL && last_error_has("cannot allocate -5 bytes"));
  CHECK(warpool_malloc(8, 7, NULL) == NULL && last_error_has("device index 7 is out of range [0, 1)"));
  CHECK(warpool_malloc(8, -1, NULL) == NULL && last_error_has("device index -1 is negative"));
  CHECK(warpool_malloc(8, 0, (void *)0x1230) == NULL && last_error_has("0x1230"));
  CHECK(warpool_malloc(8, 0, (void *)2) == NULL && last_error_has("per-thread default stream"));
  CHECK(warpool_try_malloc(PTRDIFF_MAX, 0, NULL) == NULL && last_error_has("CUDA out of memory. Tried to allocate"));
  CHECK(warpool_try_malloc((ptrdiff_t)1 << 40, 0, NULL) == NULL);
  CHECK(last_error_has("CUDA out of memory. Tried to allocate 1024.00 GiB"));

  void *ptr = warpool_malloc(MIB, 0, NULL);
  CHECK(ptr != NULL);
  warpool_free((char *)ptr + 512, 1, 0, NULL);
  CHECK(last_error_has("invalid device pointer"));
  warpool_free(ptr, MIB, 0, NULL);
  warpool_free(ptr, MIB, 0, NULL);
  warpool_record_stream(ptr, NULL);
  CHECK(last_error_has("invalid device pointer") && warpool_base_alloc((void *)16, NULL) == NULL);

  CHECK(warpool_stats(3, find_stat, NULL) != 0 && last_error_has("device index 3"));
  CHECK(warpool_stats(0, NULL, NULL) != 0 && last_error_has("'visit' is null"));
  CHECK(warpool_device_count(NULL) != 0 && last_error_has("'count' is null"));
  CHECK(warpool_largest_available(0, NULL) != 0 && warpool_get_memory_fraction(0, NULL) != 0);
  CHECK(warpool_reset_peak_stats(-1) != 0 && warpool_reset_accumulated_stats(-1) != 0);
  warpool_memory_fraction(2.0, 0);
  CHECK(last_error_has("invalid fraction: 2"));
  CHECK(warpool_set_settings(NULL) != 0 && last_error_has("'conf' is null"));
  CHECK(warpool_set_settings("\xff\xfe") != 0 && last_error_has("not valid UTF-8"));
  CHECK(warpool_set_settings("backend:cudaMallocAsync") != 0 && last_error_has("backend"));

  warpool_pool_id pool = {1, 0};
  warpool_end_allocate_to_pool(0, pool);
  CHECK(last_error_has("pool (1, 0) is not being allocated to on device 0"));
  warpool_release_pool(0, pool);
  CHECK(last_error_has("pool (1, 0) is unknown on device 0"));
  warpool_begin_allocate_to_pool(9, pool, FILTER);
  CHECK(last_error_has("device index 9"));
  warpool_begin_allocate_to_pool(0, pool, FILTER);
  warpool_end_allocate_to_pool(0, pool);
  warpool_release_pool(0, pool);
  warpool_push_frame("outside a hook", NULL, 0);

  char path[4096];
  CHECK(warpool_snapshot(NULL) != 0 && last_error_has("'path' is null"));
  snprintf(path, sizeof path, "%s/missing/file", argv[1]);
  CHECK(warpool_snapshot(path) != 0 && last_error_has(path));
  CHECK(warpool_snapshot(argv[1]) != 0 && last_error_has("directory"));
  CHECK(warpool_snapshot("/") != 0 && warpool_snapshot("") != 0 && warpool_snapshot("..") != 0);
  CHECK(warpool_snapshot("/dev/full") != 0 && last_error_has("No space left"));

  ptr = warpool_malloc(MIB, 0, NULL);
  CHECK(ptr != NULL && stat_of(0, "allocation.all.current") == 1);
  puts("passed");
  return 0;
}
