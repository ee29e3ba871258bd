// Snapshots, the history with PyTorch's own call stacks, annotations, trackers and observers.
#include <c10/cuda/CUDAFunctions.h>

#include "device_allocator.h"
#include "trace.h"

#include <map>
#include <mutex>
#include <utility>

namespace warpool_torch {

namespace caching = c10::cuda::CUDACachingAllocator;

namespace {

std::atomic<CreateContext> recorder{nullptr};

void* collect() {
    return collect_context(recorder);
}

// A number for each segment, as PyTorch's own allocator gives them in the order in which segments are made: its process
// group registers the memory of a pool in that order. Ours are given when a snapshot first shows a segment.
class SegmentNumbers {
   public:
    int32_t of(const warpool_segment& segment) {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto& [size, number] = numbers_[{segment.device, segment.address}];
        if (size != segment.total_size) {
            size = segment.total_size;
            number = next_++;
        }
        return number;
    }

    // Forgets segments that a snapshot of all pools does not show.
    void keep_only(const std::vector<caching::SegmentInfo>& segments) {
        std::map<Key, std::pair<uint64_t, int32_t>> kept;
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& segment : segments) {
            if (const auto found = numbers_.find({segment.device, segment.address}); found != numbers_.end()) {
                kept.insert(*found);
            }
        }
        numbers_.swap(kept);
    }

   private:
    using Key = std::pair<int32_t, uint64_t>;
    std::mutex mutex_;
    std::map<Key, std::pair<uint64_t, int32_t>> numbers_;
    int32_t next_ = 0;
};

SegmentNumbers& segment_numbers() {
    static SegmentNumbers numbers;
    return numbers;
}

// Of a PyTorch whose segments have a number, and of one whose have none.
template <typename Info>
auto set_number(Info& info, const warpool_segment& segment, int) -> decltype(info.registration_counter, void()) {
    info.registration_counter = segment_numbers().of(segment);
}
template <typename Info>
void set_number(Info&, const warpool_segment&, long) {}

// A callback adds to a snapshot; an exception (no host memory) is kept, and the snapshot fails.
struct SnapshotBuilder {
    caching::SnapshotInfo snapshot;
    bool failed = false;

    template <typename F>
    static void add(void* user, F&& act) noexcept {
        auto& builder = *static_cast<SnapshotBuilder*>(user);
        if (!builder.failed) {
            builder.failed = guarded(true, [&] {
                act(builder.snapshot);
                return false;
            });
        }
    }
};

void add_settings(void* user, const warpool_settings_values* settings) {
    SnapshotBuilder::add(user, [&](caching::SnapshotInfo& snapshot) {
        auto& config = snapshot.config_metadata;
        config.garbage_collection_threshold = settings->garbage_collection_threshold;
        config.max_split_size = settings->max_split_size;
        config.pinned_num_register_threads = settings->pinned_num_register_threads;
        config.expandable_segments = settings->expandable_segments;
        config.release_lock_on_malloc = settings->release_lock_on_malloc;
        config.pinned_use_host_register = settings->pinned_use_host_register;
        config.graph_capture_record_stream_reuse = settings->graph_capture_record_stream_reuse;
        config.last_allocator_settings = settings->conf;
        const auto& divisions = settings->roundup_power2_divisions;
        config.roundup_power2_divisions.assign(std::begin(divisions), std::end(divisions));
    });
}

void add_segment(void* user, const warpool_segment* segment) {
    SnapshotBuilder::add(user, [&](caching::SnapshotInfo& snapshot) {
        auto& info = snapshot.segments.emplace_back();
        info.device = static_cast<c10::DeviceIndex>(segment->device);
        info.address = segment->address;
        info.total_size = segment->total_size;
        info.requested_size = segment->requested_size;
        info.allocated_size = segment->allocated_size;
        info.active_size = segment->active_size;
        info.stream = static_cast<decltype(info.stream)>(segment->stream);
        info.is_large = segment->is_large;
        info.is_expandable = segment->is_expandable;
        info.owner_private_pool_id = mempool_id(segment->pool);
        info.context_when_allocated = context_of(segment->context);
        info.blocks.reserve(segment->blocks);
        set_number(info, *segment, 0);
    });
}

void add_block(void* user, const warpool_block* block) {
    SnapshotBuilder::add(user, [&](caching::SnapshotInfo& snapshot) {
        auto& info = snapshot.segments.back().blocks.emplace_back();
        info.size = block->size;
        info.requested_size = block->requested_size;
        info.allocated = block->is_allocated;
        info.active = block->is_active;
        info.context_when_allocated = context_of(block->context);
    });
}

void add_entry(void* user, int device, const warpool_entry* entry) {
    if (!has_action(entry->action)) {
        return;
    }
    SnapshotBuilder::add(user, [&](caching::SnapshotInfo& snapshot) {
        const auto index = static_cast<size_t>(device);
        if (snapshot.device_traces.size() <= index) {
            snapshot.device_traces.resize(index + 1);
        }
        auto& added = snapshot.device_traces[index].emplace_back(trace_entry(device, *entry));
        added.time_.t_ = entry->time_us;
    });
}

void add_annotation(void* user, int device, int64_t time_us, const char* name, const char* stage) {
    SnapshotBuilder::add(user, [&](caching::SnapshotInfo& snapshot) {
        auto& added = snapshot.external_annotations.emplace_back(
            static_cast<c10::DeviceIndex>(device), c10::getApproximateTime());
        added.time_.t_ = time_us;
        added.recordUserMetadata("name", name);
        added.recordUserMetadata("stage", stage);
    });
}

void track(void* user, int device, const warpool_entry* entry) {
    if (!has_action(entry->action)) {
        return;
    }
    // Errors cannot be reported from here, and the entry is already made.
    try {
        (*static_cast<caching::AllocatorTraceTracker*>(user))(trace_entry(device, *entry));
    } catch (...) {
    }
}

void observe_oom(void* user, const warpool_oom* oom) {
    if (oom->is_rejection) {
        return;
    }
    try {
        auto& observer = *static_cast<caching::OutOfMemoryObserver*>(user);
        observer(oom->device, oom->requested, oom->limit, oom->bytes_free);
    } catch (...) {
        keep_exception();
    }
}

#if WARPOOL_TORCH_AT_LEAST(2, 12)
void observe_rejection(void* user, const warpool_oom* oom) {
    if (!oom->is_rejection) {
        return;
    }
    try {
        auto& observer = *static_cast<caching::OomRejectionObserver*>(user);
        observer(oom->device, oom->requested, oom->allocated, oom->bytes_total);
    } catch (...) {
        keep_exception();
    }
}
#endif

}  // namespace

#if !WARPOOL_TORCH_AT_LEAST(2, 11)
caching::SnapshotInfo DeviceAllocator::snapshot(c10::MempoolId_t pool) {
    return snapshot(pool, true);
}

void DeviceAllocator::recordHistory(
    bool enabled,
    caching::CreateContextFn context_recorder,
    size_t max_entries,
    caching::RecordContext when,
    bool clear_history) {
    recordHistory(enabled, context_recorder, max_entries, when, clear_history, {});
}
#endif

caching::SnapshotInfo DeviceAllocator::snapshot(c10::MempoolId_t pool, bool include_traces) {
    SnapshotBuilder builder;
    // One list per device, also of those without entries.
    builder.snapshot.device_traces.resize(static_cast<size_t>(c10::cuda::device_count()));
    const warpool_snapshot_visitor visitor{
        &builder, &add_settings, &add_segment, &add_block, &add_entry, &add_annotation};
    check(warpool_visit_snapshot(pool_id(pool), include_traces ? 1 : 0, &visitor));
    if (builder.failed) {
        throw_last_error();
    }
    if (pool == c10::MempoolId_t{0, 0}) {
        segment_numbers().keep_only(builder.snapshot.segments);
    }
    return std::move(builder.snapshot);
}

bool DeviceAllocator::isHistoryEnabled() {
    return warpool_is_history_on() != 0;
}

void DeviceAllocator::recordHistory(
    bool enabled,
    caching::CreateContextFn context_recorder,
    size_t max_entries,
    caching::RecordContext when,
    bool clear_history,
    const std::vector<std::string>& skip_actions) {
    TORCH_CHECK(
        when == caching::RecordContext::NEVER || context_recorder != nullptr,
        "a history with call stacks needs a function that collects them");
    std::string skipped;
    for (const auto& action : skip_actions) {
        skipped += action + ",";
    }
    const int level = enabled ? static_cast<int>(when) : 0;
    if (level > 0) {
        recorder.store(context_recorder, std::memory_order_release);
        check(warpool_set_context_collector(&collect, &release_context));
    }
    check(warpool_record_history(enabled ? 1 : 0, max_entries, level, skipped.c_str(), clear_history ? 1 : 0));
    if (level == 0) {
        check(warpool_set_context_collector(nullptr, nullptr));
    }
}

void DeviceAllocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) {
    std::string name;
    std::string stage;
    for (const auto& [key, value] : metadata) {
        (key == "name" ? name : stage) = value;
    }
    c10::DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    check(warpool_record_annotation(device, name.c_str(), stage.c_str()));
}

void DeviceAllocator::pushCompileContext(std::string& name) {
    check(warpool_push_compile_context(name.c_str()));
}

void DeviceAllocator::popCompileContext() {
    warpool_pop_compile_context();
}

bool DeviceAllocator::supportsUserMetadata() {
    return true;
}

void DeviceAllocator::setUserMetadata(const std::string& metadata) {
    check(warpool_set_user_metadata(metadata.c_str()));
}

std::string DeviceAllocator::getUserMetadata() {
    std::string text(warpool_user_metadata(nullptr, 0) + 1, '\0');
    text.resize(warpool_user_metadata(text.data(), text.size()));
    return text;
}

void DeviceAllocator::annotateMemory(const void* ptr, const std::string& metadata) {
    check(warpool_annotate(const_cast<void*>(ptr), metadata.c_str()));
}

std::shared_ptr<c10::GatheredContext> DeviceAllocator::getContextForPointer(const void* ptr) {
    const auto address = reinterpret_cast<size_t>(ptr);
    for (const auto& segment : snapshot({0, 0}, false).segments) {
        size_t start = segment.address;
        for (const auto& block : segment.blocks) {
            if (block.allocated && address >= start && address < start + block.size) {
                return block.context_when_allocated;
            }
            start += block.size;
        }
    }
    return nullptr;
}

void DeviceAllocator::attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) {
    using Observer = caching::OutOfMemoryObserver;
    check(warpool_attach_oom_observer(&observe_oom, user_data(std::move(observer)), &delete_user<Observer>));
}

#if WARPOOL_TORCH_AT_LEAST(2, 12)
void DeviceAllocator::attachOomRejectionObserver(caching::OomRejectionObserver observer) {
    using Observer = caching::OomRejectionObserver;
    check(warpool_attach_oom_observer(&observe_rejection, user_data(std::move(observer)), &delete_user<Observer>));
}
#endif

void DeviceAllocator::attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) {
    using Tracker = caching::AllocatorTraceTracker;
    check(warpool_attach_tracker(&track, user_data(std::move(tracker)), &delete_user<Tracker>));
}

}  // namespace warpool_torch
