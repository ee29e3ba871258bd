// Makes Warpool the allocator of PyTorch's CUDA and pinned memory. Called once, before CUDA is initialized.
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <string>

#include "convert.h"
#include "device_allocator.h"
#include "host_allocator.h"

namespace warpool_torch {

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Higher than the priority that PyTorch itself registers with.
constexpr uint8_t priority = 100;

std::string error_text;

// Memory that PyTorch keeps only for later, such as that of tensors sent to other processes.
int relieve(int device) {
    (void)device;
    try {
        bool freed = false;
        for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
            freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
        }
        return freed ? 1 : 0;
    } catch (...) {
        return 0;
    }
}

void apply_settings(const std::string& settings) {
    if (warpool_set_settings(settings.c_str()) != 0) {
        std::string text(warpool_last_error(nullptr, 0) + 1, '\0');
        text.resize(warpool_last_error(text.data(), text.size()));
        TORCH_CHECK_VALUE(false, text);
    }
}

// Settings that the program changes at run time reach Warpool too, after PyTorch has checked them.
void follow_settings() {
    using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
#if WARPOOL_TORCH_AT_LEAST(2, 11)
    auto& hook = Config::getConfigParserHook();
    hook = [before = hook](const std::string& settings) {
        if (before) {
            before(settings);
        }
        apply_settings(settings);
    };
#else
    // The hook that is replaced here cannot be read, but it makes this call.
    const auto hook = [](const std::string& settings) {
        caching::CUDAAllocatorConfig::instance().parseArgs(settings);
        apply_settings(settings);
    };
    Config::registerDeviceConfigParserHook(hook, {});
#endif
}

void install() {
    TORCH_CHECK(caching::allocator.load() != &device_allocator(), "Warpool is installed already");
    TORCH_CHECK(
        !caching::allocator.load()->initialized(),
        "CUDA is in use already, and its memory belongs to the allocator that is in use");
    check(warpool_start());
    check(warpool_attach_pressure_callback(&relieve));
    follow_settings();
    caching::allocator.store(&device_allocator());
    c10::SetAllocator(c10::kCUDA, &device_allocator(), priority);
    at::setHostAllocator(at::kCUDA, &host_allocator(), priority);
}

}  // namespace

}  // namespace warpool_torch

// 0, or 1 with a text in warpool_backend_error.
extern "C" __attribute__((visibility("default"))) int warpool_backend_install() {
    try {
        warpool_torch::install();
        return 0;
    } catch (const c10::Error& error) {
        warpool_torch::error_text = error.what_without_backtrace();
    } catch (const std::exception& error) {
        warpool_torch::error_text = error.what();
    }
    return 1;
}

// Why the installation failed.
extern "C" __attribute__((visibility("default"))) const char* warpool_backend_error() {
    return warpool_torch::error_text.c_str();
}

// The version of Warpool whose C interface this was compiled for.
extern "C" __attribute__((visibility("default"))) const char* warpool_backend_interface() {
    return WARPOOL_VERSION;
}

// The version of PyTorch that this was compiled for.
extern "C" __attribute__((visibility("default"))) const char* warpool_backend_torch_version() {
    return TORCH_VERSION;
}
