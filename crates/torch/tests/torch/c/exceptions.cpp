// A failed allocation throws a C++ exception, and the program continues. Opens the allocator as PyTorch does, by path
// and name. argv: the allocator, then "out_of_memory" and the path of the library with that type, or "plain".
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#include "fake_c10.h"

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);      \
      std::exit(1);                                                                     \
    }                                                                                   \
  } while (0)

// Through a std::function and a frame with a destructor, as in PyTorch.
static std::function<void*(size_t, int, void*)> alloc;

struct Guard {
  int& count;
  ~Guard() { count++; }
};

static int unwound = 0;

static void* through_frames(size_t bytes) {
  Guard guard{unwound};
  return alloc(bytes, 0, nullptr);
}

static void out_of_memory_is_thrown(bool has_type) {
  int before = unwound;
  try {
    through_frames(size_t{1} << 40);
    CHECK(!"it returned");
  } catch (const c10::OutOfMemoryError& error) {
    CHECK(has_type);
    CHECK(std::strstr(error.what(), "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has") == error.what());
    CHECK(std::strstr(error.what(), "is held by others") != nullptr);
    CHECK(error.where() == "warpool_malloc in libwarpool_torch.so:0");
    CHECK(c10::errors_alive() == 1);
  } catch (const c10::Error& error) {
    CHECK(!has_type);
    CHECK(std::strstr(error.what(), "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has") == error.what());
  }
  CHECK(unwound == before + 1);
  CHECK(c10::errors_alive() == 0);
}

static void other_failures_are_thrown() {
  try {
    alloc(static_cast<size_t>(-7), 0, nullptr);
    CHECK(!"it returned");
  } catch (const c10::OutOfMemoryError&) {
    CHECK(!"not an out-of-memory error");
  } catch (const c10::Error& error) {
    CHECK(std::strstr(error.what(), "cannot allocate -7 bytes") == error.what());
  }
  CHECK(c10::errors_alive() == 0);
}

int main(int argc, char** argv) {
  CHECK(argc == 3 || argc == 4);
  bool has_type = std::strcmp(argv[2], "out_of_memory") == 0;
  void* allocator = dlopen(argv[1], RTLD_LAZY | RTLD_LOCAL);
  CHECK(allocator != nullptr);
  alloc = reinterpret_cast<void* (*)(size_t, int, void*)>(dlsym(allocator, "warpool_malloc"));
  auto try_alloc = reinterpret_cast<void* (*)(size_t, int, void*)>(dlsym(allocator, "warpool_try_malloc"));
  auto free = reinterpret_cast<void (*)(void*, size_t, int, void*)>(dlsym(allocator, "warpool_free"));
  // Before the library with the type is loaded, out of memory is a plain error.
  out_of_memory_is_thrown(false);
  if (has_type) CHECK(dlopen(argv[3], RTLD_NOW | RTLD_LOCAL) != nullptr);
  for (int round = 0; round < 200; round++) {
    out_of_memory_is_thrown(has_type);
    other_failures_are_thrown();
    CHECK(try_alloc(size_t{1} << 40, 0, nullptr) == nullptr);
    void* ptr = alloc(1 << 20, 0, nullptr);
    CHECK(ptr != nullptr);
    free(ptr, 1 << 20, 0, nullptr);
  }
  for (int round = 0; round < 4; round++) {
    std::thread([&] { out_of_memory_is_thrown(has_type); }).join();
  }
  std::puts("passed");
  return 0;
}
