/*
 * Warpool as PyTorch's allocator: the C interface of libwarpool_torch.so. Made by cbindgen; do not edit.
 *
 * Any thread may call anything at any time, also one without a CUDA context. Unless it says otherwise, a function that returns
 * int gives 0 for success and 1 for failure, and warpool_last_error then says why. Only warpool_malloc throws, and only into a process that
 * has PyTorch. Streams are cudaStream_t, and live as long as memory for them does.
 */

#ifndef WARPOOL_TORCH_H
#define WARPOOL_TORCH_H

#include <stddef.h>
#include <stdint.h>

// Sees one counter. The name is valid during the call only.
typedef void (*warpool_stat_visitor)(void *user, const char *name, int64_t value);

// A function that pushes the frames of the calling thread with `warpool_push_frame`, innermost first.
typedef void (*warpool_stack_hook)(void);

// PyTorch's name of a pool: two numbers, by value.
typedef struct warpool_pool_id {
  // The number among those of graphs, or 0.
  uint64_t graph;
  // The number among those of users, or 0.
  uint64_t user;
} warpool_pool_id;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Reads the environment and opens the driver, unless that is done. Without it the first call that needs a driver does it. After a failure it can be called again.
int warpool_start(void);

// `warpool_start`, as PyTorch calls it. The number of devices is the driver's own; 0 of them is the call that PyTorch makes before it knows any, and starts nothing.
void warpool_init(int device_count);

// How many devices the driver has.
//
// # Safety
// `count` can be written to.
int warpool_device_count(int *count);

// Writes what went wrong last on the calling thread to `buffer`, with a zero at its end, cut off where the buffer ends. Returns the length of the whole text
// without the zero. It stays until the thread's next failure; before the first it is empty.
//
// # Safety
// `buffer` is NULL or has `length` writable bytes.
size_t warpool_last_error(char *buffer,
                          size_t length);

// The version of the library.
const char *warpool_version(void);

// The driver that is open, `cuda` or `sim`; NULL before the start.
const char *warpool_driver(void);

// Memory of `size` bytes on `device` for work on `stream`, a `cudaStream_t`. 0 bytes are NULL.
//
// On failure it throws into PyTorch, if that is in the process: `c10::OutOfMemoryError` for lack of memory, `c10::Error` otherwise. Without
// PyTorch it returns NULL, and `warpool_last_error` says why.
void *warpool_malloc(ptrdiff_t size,
                     int device,
                     void *stream);

// The same, but it never throws: NULL on failure, and `warpool_last_error` says why.
void *warpool_try_malloc(ptrdiff_t size, int device, void *stream);

// Takes memory back. NULL is nothing. Size, device and stream are those of the allocation; the device says where to look first. An unknown
// address changes nothing; `warpool_last_error` names it.
void warpool_free(void *ptr,
                  ptrdiff_t size,
                  int device,
                  void *stream);

// Notes that work on `stream` uses the memory at `ptr`: freed, it is not given out again before that work is done.
void warpool_record_stream(void *ptr, void *stream);

// Where the segment starts that `ptr` lies in, and, if `size` is not NULL, how many bytes it has. NULL for an unknown address.
//
// # Safety
// `size` is NULL or can be written to.
void *warpool_base_alloc(void *ptr,
                         size_t *size);

// Gives all cached memory that nobody uses back to the driver, on every device.
int warpool_empty_cache(void);

// `warpool_empty_cache`, as PyTorch calls it.
void warpool_reset(void);

// How large a request could be met without giving anything back: the larger of what the device has free and the largest cached block.
//
// # Safety
// `bytes` can be written to.
int warpool_largest_available(int device,
                              size_t *bytes);

// Shows every counter of a device to `visit`, by the name that `torch.cuda.memory_stats` gives it, such as `allocated_bytes.all.peak`. `visit` may call anything here.
//
// # Safety
// `visit` takes `user` and a text.
int warpool_stats(int device,
                  warpool_stat_visitor visit,
                  void *user);

// Makes every peak of a device what is now.
int warpool_reset_peak_stats(int device);

// Zeroes what was counted up on a device.
int warpool_reset_accumulated_stats(int device);

// The share of a device's memory that may be held; 1 is no limit.
//
// # Safety
// `fraction` can be written to.
int warpool_get_memory_fraction(int device, double *fraction);

// Limits what is held from a device to a share of its memory, from 0 to 1.
int warpool_set_memory_fraction(double fraction, int device);

// `warpool_set_memory_fraction`, as PyTorch calls it.
void warpool_memory_fraction(double fraction, int device);

// Writes the state of every device, and the history if one is recorded, to a file, as `torch.cuda.memory._dump_snapshot` would. The file appears whole or not at all.
//
// # Safety
// `path` is a text with a zero at its end.
int warpool_snapshot(const char *path);

// Starts to write down what happens, at most the newest `max_entries` entries per device; or, if `on` is 0, stops and forgets it.
//
// `stack_level` says where call stacks are gathered, each with the ones before: 0 nowhere, 1 on blocks that somebody has, 2 in entries of
// allocations, 3 in entries of frees. `skip_actions` names actions that are not written down, with commas between them, or is NULL. If `clear` is
// not 0, what was written before is forgotten.
//
// # Safety
// `skip_actions` is NULL or a text with a zero at its end.
int warpool_record_history(int on,
                           uint64_t max_entries,
                           int stack_level,
                           const char *skip_actions,
                           int clear);

// Gathers call stacks with `hook`, where the history asks for them; NULL gathers none. It is called on the thread that allocates or frees, without
// any lock held. When this returns, no other thread is in the hook that was there before, unless it stayed in it for two seconds.
int warpool_set_stack_hook(warpool_stack_hook hook);

// One frame of the call stack that the hook running on this thread gathers. Elsewhere it does nothing. Texts that are NULL are empty, and what is no UTF-8 in them is replaced.
//
// # Safety
// `name` and `file` are NULL or texts with a zero at their end.
void warpool_push_frame(const char *name,
                        const char *file,
                        uint64_t line);

// Writes `text` beside everything that the calling thread causes from now on; NULL or an empty text is nothing.
//
// # Safety
// `text` is NULL or a text with a zero at its end.
int warpool_set_user_metadata(const char *text);

// Puts a further settings string in force, on top of what is. If anything in it is wrong nothing changes, and `warpool_last_error` lists all of it.
//
// # Safety
// `conf` is a text with a zero at its end.
int warpool_set_settings(const char *conf);

// Writes the settings that are in force to `buffer`, as the string that gives them from the defaults, with a zero at its end, cut off where the buffer ends. Returns the
// length of the whole string without the zero; an allocator that does not start has none.
//
// # Safety
// `buffer` is NULL or has `length` writable bytes.
size_t warpool_settings(char *buffer,
                        size_t length);

// A capture is about to begin: what it asks for comes from that pool, and nothing else does. PyTorch calls it before `cudaStreamBeginCapture`. The filter is a
// `std::function` by its address, and is not touched.
void warpool_begin_allocate_to_pool(int device,
                                    struct warpool_pool_id id,
                                    void *filter);

// The capture is over.
void warpool_end_allocate_to_pool(int device, struct warpool_pool_id id);

// A graph of that pool is gone. Without the last of its graphs a pool's memory can be given back.
void warpool_release_pool(int device, struct warpool_pool_id id);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* WARPOOL_TORCH_H */
