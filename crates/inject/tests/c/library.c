/* A library that uses the driver. It finds the functions as -DROUTE says: 1 linked to it, 2 by dlsym, 3 by
 * cuGetProcAddress as CUDA's runtime does, 4 through a runtime that is another shared object. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#define NAME(what) JOIN(LIBRARY, what)
#define JOIN(a, b) JOIN_(a, b)
#define JOIN_(a, b) a##_##b

typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                        void **);
typedef int (*address_t)(const char *, void **, int, unsigned long long, int *);

#if ROUTE == 1
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                   void **);
#define FIND(name, version) name##version
#elif ROUTE == 2
static void *find(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name); }
#define FIND(name, version) find(#name #version)
#elif ROUTE == 3
static void *find(const char *name) {
  address_t get = (address_t)dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuGetProcAddress_v2");
  void *found = 0, *again = 0;
  int status = 0;
  /* Through the function that it returns for itself. */
  if (get("cuGetProcAddress", &again, 12000, 0, &status)) return 0;
  ((address_t)again)(name, &found, 12000, 0, &status);
  return found;
}
#define FIND(name, version) find(#name)
#else
void *runtime_find(const char *name);
#define FIND(name, version) runtime_find(#name)
#endif

/* Other names for the same when this is the runtime. */
#ifdef RUNTIME
static int (*alloc_)(uint64_t *, size_t);
static int (*free_)(uint64_t);
static launch_t launch_;
int runtime_malloc(uint64_t *out, size_t bytes) {
  if (!alloc_) alloc_ = (int (*)(uint64_t *, size_t))FIND(cuMemAlloc, _v2);
  /* Not a tail call: the frame must be on the stack. */
  int result = alloc_(out, bytes);
  return result ? result + 1000 : 0;
}
int runtime_free(uint64_t address) {
  if (!free_) free_ = (int (*)(uint64_t))FIND(cuMemFree, _v2);
  int result = free_(address);
  return result ? result + 1000 : 0;
}
int runtime_launch(void *function) {
  if (!launch_) launch_ = (launch_t)FIND(cuLaunchKernel, );
  int result = launch_(function, 1, 2, 3, 4, 5, 6, 7, (void *)8, (void **)9, (void **)10);
  return result ? result + 1000 : 0;
}
#else
#if ROUTE == 4
int runtime_malloc(uint64_t *, size_t);
int runtime_free(uint64_t);
int runtime_launch(void *);
#define ALLOC runtime_malloc
#define FREE runtime_free
#define LAUNCH(function) runtime_launch(function)
#else
#define ALLOC ((int (*)(uint64_t *, size_t))FIND(cuMemAlloc, _v2))
#define FREE ((int (*)(uint64_t))FIND(cuMemFree, _v2))
#define LAUNCH(function) \
  ((launch_t)FIND(cuLaunchKernel, ))(function, 1, 2, 3, 4, 5, 6, 7, (void *)8, (void **)9, (void **)10)
#endif

uint64_t NAME(take)(size_t bytes) {
  uint64_t address = 0;
  int result = ALLOC(&address, bytes);
  return result ? 0 : address;
}
int NAME(give)(uint64_t address) {
  int result = FREE(address);
  return result ? result + 1000 : 0;
}
int NAME(launch)(unsigned function) {
  int result = LAUNCH((void *)(uintptr_t)function);
  return result ? result + 1000 : 0;
}
#endif
