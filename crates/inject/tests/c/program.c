/* Takes memory as the steps in its arguments say, one after the other:
 *   cublas|cudnn|nccl|torch take MIB | small KIB | launch NUMBER | give      (give: the last that was taken)
 *   context, release, graph, ungraph, module, async MIB, create MIB, uncreate, refused, fork, threads, next, others MIB
 *   show: prints what was counted */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define CHECK(holds) \
  do { \
    if (!(holds)) { \
      fprintf(stderr, "line %d: %s\n", __LINE__, #holds); \
      exit(1); \
    } \
  } while (0)

static void *cuda;

#define CALL(name, types, ...) ((int (*) types)dlsym(cuda, #name))(__VA_ARGS__)

static void *function(const char *library, const char *what) {
  char name[64];
  snprintf(name, sizeof name, "%s_%s", library, what);
  void *found = dlsym(RTLD_DEFAULT, name);
  CHECK(found);
  return found;
}

static void show(void) {
  size_t (*read)(char *, size_t) = (size_t(*)(char *, size_t))dlsym(RTLD_DEFAULT, "warpool_injected_account");
  CHECK(read);
  size_t length = read(NULL, 0);
  char *text = malloc(length + 4096);
  CHECK(read(text, length + 4096) < length + 4096);
  puts(text);
  free(text);
}

/* Takes and gives, and launches, in turns. */
static void *busy(void *library) {
  void *made;
  CHECK(!CALL(cuDevicePrimaryCtxRetain, (void **, int), &made, 0));
  CHECK(!CALL(cuCtxSetCurrent, (void *), made));
  uint64_t (*take)(size_t) = (uint64_t(*)(size_t))function(library, "take");
  int (*give)(uint64_t) = (int (*)(uint64_t))function(library, "give");
  int (*launch)(unsigned) = (int (*)(unsigned))function(library, "launch");
  for (unsigned round = 0; round < 200; round++) {
    uint64_t address = take(4 * MIB);
    CHECK(address);
    CHECK(!launch(round % 50));
    CHECK(!give(address));
  }
  CHECK(take(8 * MIB));
  return NULL;
}

int main(int count, char **words) {
  uint64_t taken = 0, created = 0;
  void *made = NULL, *exec = NULL;
  cuda = dlopen("libcuda.so.1", RTLD_LAZY);
  CHECK(cuda);
  CHECK(!CALL(cuInit, (unsigned), 0));
  for (int at = 1; at < count; at++) {
    const char *word = words[at];
    if (!strcmp(word, "context")) {
      CHECK(!CALL(cuDevicePrimaryCtxRetain, (void **, int), &made, 0));
      CHECK(!CALL(cuCtxSetCurrent, (void *), made));
    } else if (!strcmp(word, "release")) {
      CHECK(!CALL(cuDevicePrimaryCtxRelease_v2, (int), 0));
    } else if (!strcmp(word, "graph")) {
      CHECK(!CALL(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long), &exec, NULL, 0));
    } else if (!strcmp(word, "ungraph")) {
      CHECK(!CALL(cuGraphExecDestroy, (void *), exec));
    } else if (!strcmp(word, "module")) {
      CHECK(!CALL(cuModuleLoadData, (void **, void *), &exec, NULL));
    } else if (!strcmp(word, "async")) {
      CHECK(!CALL(cuMemAllocAsync, (uint64_t *, size_t, void *), &taken, atoi(words[++at]) * MIB, NULL));
    } else if (!strcmp(word, "create")) {
      int properties[8] = {1, 0, 1, 0};
      size_t bytes = atoi(words[++at]) * MIB;
      CHECK(!CALL(cuMemCreate, (uint64_t *, size_t, int *, unsigned long long), &created, bytes, properties, 0));
    } else if (!strcmp(word, "uncreate")) {
      /* Released while it is mapped. */
      CHECK(!CALL(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long), 1, 1, 0, created, 0));
      CHECK(!CALL(cuMemRelease, (uint64_t), created));
      CHECK(!CALL(cuMemUnmap, (uint64_t, size_t), 1, 1));
    } else if (!strcmp(word, "refused")) {
      CHECK(((uint64_t(*)(size_t))function("cublas", "take"))(5000 * MIB) == 0);
    } else if (!strcmp(word, "next")) {
      /* The caller decides what it means: it must not find the driver's, nor fail. */
      CHECK(dlsym(RTLD_NEXT, "malloc") && !dlsym(RTLD_NEXT, "cuNothing") && !dlsym(cuda, "cuNothing"));
      CHECK(dlsym(RTLD_DEFAULT, "warpool_injected_account"));
    } else if (!strcmp(word, "others")) {
      char text[32];
      snprintf(text, sizeof text, "%s", words[++at]);
      setenv("FAKE_OTHERS_MIB", text, 1);
    } else if (!strcmp(word, "fork")) {
      pid_t child = fork();
      if (child == 0) {
        /* Only passes through: it counts nothing, and does not hang. */
        _exit(((uint64_t(*)(size_t))function("cublas", "take"))(MIB) ? 0 : 1);
      }
      int status;
      CHECK(waitpid(child, &status, 0) == child && status == 0);
    } else if (!strcmp(word, "threads")) {
      pthread_t threads[4];
      const char *libraries[4] = {"cublas", "cudnn", "nccl", "torch"};
      for (int i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], NULL, busy, (void *)libraries[i]));
      for (int i = 0; i < 4; i++) CHECK(!pthread_join(threads[i], NULL));
    } else if (!strcmp(word, "show")) {
      show();
    } else {
      const char *what = words[++at];
      if (!strcmp(what, "give")) {
        CHECK(!((int (*)(uint64_t))function(word, "give"))(taken));
      } else if (!strcmp(what, "launch")) {
        CHECK(!((int (*)(unsigned))function(word, "launch"))(atoi(words[++at])));
      } else {
        size_t unit = strcmp(what, "small") ? MIB : 1024;
        taken = ((uint64_t(*)(size_t))function(word, "take"))(atoi(words[++at]) * unit);
        CHECK(taken);
      }
    }
  }
  return 0;
}
