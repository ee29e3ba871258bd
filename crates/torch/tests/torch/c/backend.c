// The calls of PyTorch's allocator class: blocks, pools with filters, checkpoints, snapshots, observers, pinned memory.
#include "check.h"

static const warpool_pool_id DEFAULT_POOL = {0, 0}, POOL = {0, 7};
static int deleted, accepts = 1;

static int filter(void *user, const void *stream) {
  (void)stream;
  return *(int *)user;
}

static void delete_user(void *user) {
  (void)user;
  deleted++;
}

static void *last_block[2];
static int visited[2];

static void freed(void *user, void *ptr) {
  (void)user;
  last_block[0] = ptr;
  visited[0]++;
}

static void restored(void *user, void *ptr) {
  (void)user;
  last_block[1] = ptr;
  visited[1]++;
}

static int segments, blocks, entries, settings_seen;

static void on_settings(void *user, const warpool_settings_values *settings) {
  (void)user;
  settings_seen += settings->conf != NULL;
}

static void on_segment(void *user, const warpool_segment *segment) {
  (void)user;
  segments += segment->pool.user == POOL.user;
}

static void on_block(void *user, const warpool_block *block) {
  (void)user;
  blocks += block->is_allocated;
}

static void on_entry(void *user, int device, const warpool_entry *entry) {
  (void)user, (void)device;
  entries += entry->action == 0 && strcmp(entry->user_metadata, "step") == 0 && entry->context != NULL;
}

static void on_annotation(void *user, int device, int64_t time_us, const char *name, const char *stage) {
  (void)user, (void)device, (void)time_us, (void)name, (void)stage;
}

static int contexts;

static void *collect(void) {
  contexts++;
  return &contexts;
}

static void release(void *context) {
  (void)context;
  contexts--;
}

static int tracked, ooms;

static void track(void *user, int device, const warpool_entry *entry) {
  (void)user, (void)device;
  tracked += entry->action == 0;
}

static void observe(void *user, const warpool_oom *oom) {
  (void)user;
  ooms += oom->requested >= (size_t)1 << 42 && !oom->is_rejection;
}

static void blocks_and_pools(void) {
  void *plain = warpool_allocate(MIB, 0, NULL);
  CHECK(plain != NULL && warpool_allocate(0, 0, NULL) == NULL);
  warpool_block_description block;
  CHECK(warpool_describe_block(plain, &block) == 0 && block.bytes == MIB && block.device == 0);
  CHECK(warpool_record_use(plain, 0, NULL) == 0);
  CHECK(warpool_keep_stream(0, NULL) == 0 && warpool_keep_stream(99, NULL) != 0);
  CHECK(warpool_pool_create(0, POOL) == 0 && warpool_pool_uses(0, POOL) == 1);
  CHECK(warpool_pool_begin(0, POOL, filter, &accepts, delete_user) == 0);
  CHECK(warpool_pool_begin(0, POOL, filter, &accepts, delete_user) == 1 && deleted == 1);
  void *inside = warpool_allocate(MIB, 0, NULL);
  accepts = 0;
  void *outside = warpool_allocate(MIB, 0, NULL);
  accepts = 7;
  CHECK(warpool_allocate(MIB, 0, NULL) == NULL && !warpool_last_error_is_out_of_memory());
  accepts = 1;
  CHECK(warpool_pool_end(0, POOL) == 0 && deleted == 2 && warpool_pool_end(0, POOL) == 1);
  int equal = 0;
  CHECK(warpool_pool_has_exactly(0, POOL, &inside, 1, &equal) == 0 && equal == 1);
  CHECK(warpool_pool_has_exactly(0, POOL, NULL, 0, &equal) == 0 && equal == 0);

  warpool_checkpoint_state *checkpoint = NULL;
  CHECK(warpool_checkpoint(0, POOL, &checkpoint) == 0 && checkpoint != NULL);
  CHECK(warpool_free_block(inside) == 0);
  CHECK(warpool_restore(checkpoint, freed, restored, NULL) == 0);
  CHECK(visited[0] == 0 && visited[1] == 1 && last_block[1] == inside);
  warpool_delete_checkpoint(checkpoint);

  warpool_snapshot_visitor visitor = {NULL, on_settings, on_segment, on_block, on_entry, on_annotation};
  CHECK(warpool_visit_snapshot(POOL, 0, &visitor) == 0 && segments == 1 && blocks == 1 && settings_seen == 1);
  CHECK(warpool_free_block(inside) == 0 && warpool_free_block(outside) == 0 && warpool_free_block(plain) == 0);
  CHECK(warpool_pool_release(0, POOL) == 0 && warpool_pool_release(0, POOL) == 0);
  CHECK(warpool_pool_release(0, POOL) == 1);
  CHECK(warpool_trim(POOL, 0, NULL) == 0 && warpool_trim(DEFAULT_POOL, 0, NULL) == 0);
  warpool_device_stats_values stats;
  CHECK(warpool_device_stats(0, &stats, NULL, NULL) == 0 && stats.reserved_bytes.all.current == 0);
}

static void caching(void) {
  CHECK(warpool_set_caching(0) == 0);
  void *direct = warpool_allocate(MIB, 0, NULL);
  warpool_device_stats_values stats;
  CHECK(direct != NULL && warpool_device_stats(0, &stats, NULL, NULL) == 0);
  CHECK(stats.allocated_bytes.all.current == 0);
  CHECK(warpool_set_caching(1) == 0 && warpool_free_block(direct) == 0 && warpool_free_block(direct) == 1);
}

static void history(void) {
  warpool_snapshot_visitor visitor = {NULL, on_settings, on_segment, on_block, on_entry, on_annotation};
  CHECK(warpool_attach_tracker(track, NULL, NULL) == 0 && warpool_attach_oom_observer(observe, NULL, NULL) == 0);
  CHECK(warpool_set_context_collector(collect, release) == 0 && !warpool_is_history_on());
  CHECK(warpool_record_history(1, 100, 3, NULL, 1) == 0 && warpool_is_history_on());
  CHECK(warpool_set_user_metadata("step") == 0);
  char text[8];
  CHECK(warpool_user_metadata(text, sizeof text) == 4 && strcmp(text, "step") == 0);
  void *block = warpool_allocate(MIB, 0, NULL);
  CHECK(warpool_visit_snapshot(DEFAULT_POOL, 1, &visitor) == 0 && entries == 1 && tracked == 1 && contexts > 0);
  CHECK(warpool_free_block(block) == 0);
  CHECK(warpool_allocate((size_t)1 << 42, 0, NULL) == NULL && warpool_last_error_is_out_of_memory() && ooms == 1);
  CHECK(warpool_record_history(0, 0, 0, NULL, 0) == 0 && warpool_trim(DEFAULT_POOL, 0, NULL) == 0);
  CHECK(warpool_set_context_collector(NULL, NULL) == 0 && contexts == 0);
}

static void pinned(void) {
  warpool_pinned_block first, second;
  CHECK(warpool_pinned_allocate(1000, NULL, &first) == 0 && first.ptr != NULL);
  memset(first.ptr, 1, 1000);
  int found = 0;
  CHECK(warpool_pinned_record_use((char *)first.ptr + 5, 0, NULL, NULL, &found) == 0 && found == 1);
  CHECK(warpool_pinned_record_use(&found, 0, NULL, NULL, &found) == 0 && found == 0);
  warpool_pinned_free(first.block);
  warpool_pinned_free(NULL);

  accepts = 1;
  CHECK(warpool_pinned_pool_begin(POOL, filter, &accepts, delete_user) == 0);
  CHECK(warpool_pinned_allocate(64, NULL, &first) == 0);
  warpool_pinned_free(first.block);
  CHECK(warpool_pinned_allocate(64, NULL, &second) == 0 && second.ptr == first.ptr);
  CHECK(warpool_pinned_record_use(second.ptr, 0, NULL, NULL, &found) == 0 && found == 1);
  warpool_pinned_free(second.block);
  CHECK(warpool_pinned_allocate(64, NULL, &first) == 0 && second.ptr != first.ptr);
  warpool_pinned_free(first.block);
  CHECK(warpool_pinned_pool_end(POOL) == 0 && warpool_pinned_pool_end(POOL) == 1);
  CHECK(warpool_pinned_pool_release(POOL) == 0 && warpool_pinned_pool_release(POOL) == 1);
  CHECK(warpool_pinned_empty_cache() == 0);
  warpool_pinned_stats_values stats;
  CHECK(warpool_pinned_stats(&stats) == 0);
  CHECK(stats.active_requests.current == 0 && stats.allocated_bytes.current == 0 && stats.num_host_alloc > 0);
}

static int pinned_segments, pinned_blocks, pinned_entries;

static void pinned_segment(void *user, const warpool_segment *segment) {
  CHECK(user == &pinned_segments && segment->device == -1);
  pinned_segments += 1;
}

static void pinned_block(void *user, const warpool_block *block) {
  CHECK(user == &pinned_segments);
  pinned_blocks += block->is_allocated;
}

static void pinned_entry(void *user, int device, const warpool_entry *entry) {
  CHECK(user == &pinned_segments && device == -1 && entry->size > 0);
  pinned_entries += 1;
}

static void pinned_history(void) {
  const warpool_pinned_visitor visitor = {&pinned_segments, pinned_segment, pinned_block, pinned_entry};
  warpool_pinned_block block = {0};
  CHECK(warpool_pinned_is_history_on() == 0);
  CHECK(warpool_pinned_record_history(1, 10, 7, NULL, NULL, 0) == 1);
  CHECK(warpool_pinned_record_history(1, 10, 0, NULL, NULL, 0) == 0 && warpool_pinned_is_history_on() == 1);
  CHECK(warpool_pinned_allocate(64, NULL, &block) == 0);
  CHECK(warpool_visit_pinned(NULL) == 1 && warpool_visit_pinned(&visitor) == 0);
  CHECK(pinned_segments > 0 && pinned_blocks == 1 && pinned_entries > 0);
  warpool_pinned_free(block.block);
  CHECK(warpool_pinned_record_history(0, 0, 0, NULL, NULL, 1) == 0 && warpool_pinned_is_history_on() == 0);
  pinned_entries = 0;
  CHECK(warpool_visit_pinned(&visitor) == 0 && pinned_entries == 0);
  CHECK(warpool_pinned_empty_cache() == 0);
}

struct shared {
  uint8_t handle[256];
  size_t length, offset;
};

static void write_handle(void *user, const uint8_t *handle, size_t length, size_t offset) {
  struct shared *shared = user;
  CHECK(length <= sizeof shared->handle);
  memcpy(shared->handle, handle, length);
  shared->length = length;
  shared->offset = offset;
}

static void sharing(void) {
  void *block = warpool_allocate(3 * MIB, 0, NULL);
  struct shared shared = {0};
  void *opened = NULL;
  CHECK(warpool_share(block, 2, NULL, NULL) == 1);
  if (warpool_share(block, 2, write_handle, &shared) == 0) {
    if (warpool_open_shared(0, shared.handle, shared.length, &opened) == 0) {
      // Mapped memory can be opened by the process that shared it, too.
      CHECK(shared.length != 64 && opened != NULL && (char *)opened + shared.offset != block);
      CHECK(warpool_close_shared(opened) == 0);
      CHECK(warpool_close_shared(opened) == 1);
    } else {
      CHECK(shared.length == 64);
    }
  } else {
    CHECK(last_error_has("cannot be shared with other processes"));
  }
  CHECK(warpool_open_shared(0, shared.handle, 3, &opened) == 1);
  CHECK(last_error_has("no handle of shared memory"));
  CHECK(warpool_close_shared(block) == 1);
  CHECK(warpool_free_block(block) == 0);
}

int main(void) {
  blocks_and_pools();
  caching();
  history();
  pinned();
  pinned_history();
  sharing();
  puts("passed");
  return 0;
}
