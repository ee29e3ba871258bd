// Stand-in for libc10_cuda.so, which contains the type of the exception because it throws it.
#include "fake_c10.h"

extern "C" void throw_out_of_memory() { throw c10::OutOfMemoryError({"f", "f.cpp", 1}, "thrown here"); }
