/* Elastic memory through the C interface. */
#include "check.h"

int main(void) {
  void *cache = NULL, *other = NULL;
  struct warpool_elastic_values info;
  int64_t room = 0;
  int all = 7;

  CHECK(warpool_start_with("paged") == 0);
  CHECK(warpool_elastic_reserve(0, NULL, 2, 100, 4 * MIB, "kv", &cache) == 0 && cache != NULL);
  CHECK(warpool_elastic_reserve(0, NULL, 1, 10, 100, NULL, &other) == 0 && other != cache);
  CHECK(warpool_headroom(0, &room) == 0 && room > 0);
  CHECK(warpool_elastic_commit(cache, 0, 20, NULL) == 0);
  CHECK(warpool_elastic_decommit(cache, 5, 10, NULL) == 0);
  CHECK(warpool_elastic_info(cache, &info) == 0);
  CHECK(info.blocks == 100 && info.committed == 15 && info.bytes_committed == 120 * MIB);
  CHECK(info.bytes == 800 * MIB && info.page_bytes == 8 * MIB && info.blocks_per_page == 2);
  CHECK(warpool_elastic_committed(cache, 10, 20, &all) == 0 && all == 1);
  CHECK(warpool_elastic_committed(cache, 4, 6, &all) == 0 && all == 0);
  CHECK(stat_of(0, "allocated_bytes.all.current") == 120 * MIB);
  CHECK(warpool_elastic_record_stream(cache, NULL) == 0);

  /* All or nothing. */
  CHECK(warpool_elastic_commit(cache, 0, 100, NULL) == WARPOOL_OUT_OF_MEMORY && last_error_has("out of memory"));
  CHECK(warpool_elastic_info(cache, &info) == 0 && info.committed == 15);

  /* A tensor for other libraries owns the memory. */
  int64_t shape[3] = {2, 100, 4 * MIB};
  CHECK(warpool_elastic_tensor(cache, 0, 16, 3, shape) == NULL && last_error_has("is not the elastic memory of"));
  void *tensor = warpool_elastic_tensor(cache, 0, 8, 3, shape);
  CHECK(tensor != NULL && *(void **)tensor == cache);
  CHECK(warpool_elastic_tensor(cache, 0, 8, 3, shape) == NULL && last_error_has("has a tensor already"));
  warpool_elastic_tensor_free(tensor);
  CHECK(stat_of(0, "allocated_bytes.all.current") == 0);

  CHECK(warpool_elastic_commit(cache, 0, 1, NULL) == 1 && last_error_has("no elastic memory begins at"));
  CHECK(warpool_elastic_commit(other, 5, 11, NULL) == 1 && last_error_has("elastic memory that has 10"));
  CHECK(warpool_elastic_reserve(0, NULL, 1, 0, 100, NULL, &cache) == 1 && last_error_has("at least one block"));
  CHECK(warpool_elastic_reserve(0, NULL, 1, 1, 100, NULL, NULL) == 1 && last_error_has("'ptr' is null"));
  CHECK(warpool_elastic_info(other, NULL) == 1 && last_error_has("'info' is null"));
  CHECK(warpool_elastic_tensor(other, 0, 8, 1, NULL) == NULL && last_error_has("'shape' is null"));
  warpool_elastic_release(other);
  warpool_elastic_tensor_free(NULL);
  puts("passed");
  return 0;
}
