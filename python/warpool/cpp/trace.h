// Entries of the history as PyTorch's, with the call stacks that PyTorch collects.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>

#include "convert.h"

namespace warpool_torch {

using Context = std::shared_ptr<c10::GatheredContext>;
using TraceEntry = c10::cuda::CUDACachingAllocator::TraceEntry;
using CreateContext = c10::cuda::CUDACachingAllocator::CreateContextFn;

// Called where a history needs a stack, without locks held. Errors cannot be reported from here.
inline void* collect_context(const std::atomic<CreateContext>& recorder) noexcept {
    return without_exception<void*>(nullptr, [&]() -> void* {
        const auto create = recorder.load(std::memory_order_acquire);
        auto context = create != nullptr ? create() : nullptr;
        return context != nullptr ? new Context(std::move(context)) : nullptr;
    });
}

inline void release_context(void* context) {
    delete static_cast<Context*>(context);
}

inline Context context_of(void* context) {
    return context != nullptr ? *static_cast<Context*>(context) : nullptr;
}

// Later actions have no name in earlier versions.
inline bool has_action(int action) {
#if WARPOOL_TORCH_AT_LEAST(2, 14)
    return action <= TraceEntry::ANNOTATE;
#else
    return action <= TraceEntry::OOM;
#endif
}

inline TraceEntry trace_entry(int device, const warpool_entry& entry) {
    // By PyTorch's name if there is none.
    const auto* compile_context = entry.compile_context[0] != '\0' ? entry.compile_context : "N/A";
    TraceEntry result(
        static_cast<TraceEntry::Action>(entry.action),
        static_cast<c10::DeviceIndex>(device),
        entry.address,
        entry.size,
        static_cast<decltype(TraceEntry::stream_)>(entry.stream),
        mempool_id(entry.pool),
        c10::getApproximateTime(),
        context_of(entry.context),
#if WARPOOL_TORCH_AT_LEAST(2, 10)
        compile_context,
        entry.user_metadata);
#else
        compile_context);
#endif
    return result;
}

}  // namespace warpool_torch
