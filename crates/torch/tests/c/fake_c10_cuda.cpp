// Stands for libc10_cuda.so, which knows the type of the exception because it throws it itself.
#include "fake_c10.h"

extern "C" void throw_out_of_memory() { throw c10::OutOfMemoryError({"f", "f.cpp", 1}, "of its own"); }
