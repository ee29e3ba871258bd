// Which PyTorch this is compiled against, by the macros that it ships, and what its allocator classes have.
#pragma once

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/csrc/api/include/torch/version.h>
#endif

#define WARPOOL_TORCH_AT_LEAST(major, minor) \
    (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !WARPOOL_TORCH_AT_LEAST(2, 9)
#error "Warpool's PyTorch backend needs PyTorch 2.9 or later"
#endif

// A function that PyTorch's class has since a version: it overrides, or is one of our own.
#if WARPOOL_TORCH_AT_LEAST(2, 10)
#define WARPOOL_SINCE_2_10 override
#else
#define WARPOOL_SINCE_2_10
#endif
#if WARPOOL_TORCH_AT_LEAST(2, 11)
#define WARPOOL_SINCE_2_11 override
#else
#define WARPOOL_SINCE_2_11
#endif
#if WARPOOL_TORCH_AT_LEAST(2, 12)
#define WARPOOL_SINCE_2_12 override
#else
#define WARPOOL_SINCE_2_12
#endif
#if WARPOOL_TORCH_AT_LEAST(2, 13)
#define WARPOOL_SINCE_2_13 override
#else
#define WARPOOL_SINCE_2_13
#endif
#if WARPOOL_TORCH_AT_LEAST(2, 14)
#define WARPOOL_SINCE_2_14 override
#else
#define WARPOOL_SINCE_2_14
#endif
