/* A process with a page, and a forked child. Says "ready", and waits to be killed; the child ends when its standard
   input is closed. */
#include <unistd.h>

#include "check.h"

int main(void) {
  void *block = warpool_malloc(3 * MIB, 0, NULL);
  CHECK(block != NULL);
  CHECK(warpool_malloc((ptrdiff_t)1 << 50, 0, NULL) == NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    /* The page is the parent's: an error of the child does not reach it. */
    CHECK(warpool_malloc((ptrdiff_t)1 << 51, 0, NULL) == NULL);
    char byte;
    while (read(0, &byte, 1) > 0) {
    }
    _exit(0);
  }
  printf("ready\n");
  fflush(stdout);
  for (;;) pause();
}
