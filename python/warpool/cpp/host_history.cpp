// The history of pinned memory, and its segments in snapshots, which PyTorch has since 2.14.
#include "host_allocator.h"

#if WARPOOL_TORCH_AT_LEAST(2, 14)

#include "trace.h"

namespace warpool_torch {

namespace {

using c10::CachingDeviceAllocator::HostSegmentInfo;

std::atomic<CreateContext> recorder{nullptr};

void* collect() {
    return collect_context(recorder);
}

struct Visited {
    std::vector<HostSegmentInfo> blocks;
    std::vector<TraceEntry> trace;
    size_t address = 0;
    bool failed = false;
};

// An exception (no host memory) is kept, and the visit fails.
template <typename F>
void add(void* user, F&& act) noexcept {
    auto& visited = *static_cast<Visited*>(user);
    if (!visited.failed) {
        visited.failed = guarded(true, [&] {
            act(visited);
            return false;
        });
    }
}

void begin_segment(void* user, const warpool_segment* segment) {
    static_cast<Visited*>(user)->address = segment->address;
}

// PyTorch's segments of pinned memory are blocks of ours.
void add_block(void* user, const warpool_block* block) {
    add(user, [&](Visited& visited) {
        auto& info = visited.blocks.emplace_back();
        info.address = visited.address;
        info.size = block->size;
        info.allocated = block->is_allocated;
        info.active = block->is_active;
        info.context_when_allocated = context_of(block->context);
        visited.address += block->size;
    });
}

void add_entry(void* user, int device, const warpool_entry* entry) {
    if (!has_action(entry->action)) {
        return;
    }
    add(user, [&](Visited& visited) {
        visited.trace.push_back(trace_entry(device, *entry));
        visited.trace.back().time_.t_ = entry->time_us;
    });
}

Visited visit() {
    Visited visited;
    const warpool_pinned_visitor visitor{&visited, &begin_segment, &add_block, &add_entry};
    check(warpool_visit_pinned(&visitor));
    if (visited.failed) {
        throw_last_error();
    }
    return visited;
}

}  // namespace

void HostAllocator::record_history(
    bool enabled,
    c10::CachingDeviceAllocator::CreateContextFn context_recorder,
    size_t max_entries,
    c10::CachingDeviceAllocator::RecordContext when,
    bool clear_history) {
    if (enabled) {
        recorder.store(context_recorder, std::memory_order_release);
    }
    const int level = enabled ? static_cast<int>(when) : 0;
    check(warpool_pinned_record_history(
        enabled ? 1 : 0, max_entries, level, &collect, &release_context, clear_history ? 1 : 0));
}

bool HostAllocator::is_history_enabled() const {
    return warpool_pinned_is_history_on() != 0;
}

std::vector<HostSegmentInfo> HostAllocator::get_segments() {
    return visit().blocks;
}

std::vector<TraceEntry> HostAllocator::get_traces() {
    return visit().trace;
}

}  // namespace warpool_torch

#endif
