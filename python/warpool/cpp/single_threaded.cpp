// Newer versions of libstdc++ ask glibc whether the process has one thread, by a variable that glibc has since 2.32,
// and PyTorch runs with 2.28. Our own variable says that there may be several threads, as there are with PyTorch.
extern "C" {

extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

}
