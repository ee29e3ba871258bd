// Drives PyTorch's allocator classes, installed over Warpool, on the simulated GPU, through the pointers that PyTorch
// itself would use. Linked against a real libtorch, or as `drive` does; needs no GPU and no CUDA driver. Tested only
// with a GPU: peer access, copies, plain memory of other processes, and a pool with an allocator of its own.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "warpool_torch.h"

extern "C" int warpool_backend_install();
extern "C" const char* warpool_backend_error();
extern "C" const char* warpool_backend_torch_version();

#define EXPECT(condition)                                                      \
    do {                                                                       \
        if (!(condition)) {                                                    \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
            std::exit(1);                                                      \
        }                                                                      \
    } while (0)

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::MempoolId_t;

namespace {

constexpr size_t MB = 1 << 20;

caching::CUDAAllocator& allocator() {
    return *caching::get();
}

int64_t allocated() {
    return allocator().getDeviceStats(0).allocated_bytes[0].current;
}

template <typename F>
std::string thrown(F&& act) {
    try {
        act();
    } catch (const c10::Error& error) {
        return error.what_without_backtrace();
    }
    return "";
}

void memory_and_statistics() {
    void* a = allocator().raw_alloc_with_stream(3 * MB, nullptr);
    EXPECT(a != nullptr && allocated() == static_cast<int64_t>(3 * MB));
    EXPECT(allocator().raw_alloc_with_stream(0, nullptr) == nullptr);
    {
        const auto tensor = allocator().allocate(MB);
        EXPECT(tensor.get() != nullptr && tensor.device() == c10::Device(c10::kCUDA, 0));
        EXPECT(allocated() == static_cast<int64_t>(4 * MB));
        allocator().recordStream(tensor, c10::cuda::getDefaultCUDAStream(0));
        void* raw = allocator().raw_alloc(MB);
        EXPECT(raw != nullptr && raw != tensor.get());
        allocator().raw_delete(raw);
    }
    EXPECT(allocated() == static_cast<int64_t>(3 * MB));
    size_t size = 0;
    EXPECT(allocator().getBaseAllocation(a, &size) <= a && size >= 3 * MB);
    size_t largest = 0;
    allocator().cacheInfo(0, &largest);
    EXPECT(largest > 100 * MB);
    const auto [bytes_free, bytes_total] = allocator().getMemoryInfo(0);
    EXPECT(bytes_free > 0 && bytes_free < bytes_total);
    allocator().raw_delete(a);
    allocator().raw_delete(nullptr);
    EXPECT(allocated() == 0);
    allocator().resetPeakStats(0);
    allocator().resetAccumulatedStats(0);
    EXPECT(allocator().getDeviceStats(0).allocated_bytes[0].peak == 0);
    EXPECT(allocator().getDeviceStats(0).reserved_bytes[0].current >= static_cast<int64_t>(3 * MB));
    EXPECT(!thrown([] { allocator().getBaseAllocation(nullptr, nullptr); }).empty());
    EXPECT(!thrown([] { allocator().getDeviceStats(100); }).empty());

    allocator().setMemoryFraction(0.5, 0);
    EXPECT(allocator().getMemoryFraction(0) == 0.5);
    EXPECT(!thrown([] { allocator().setMemoryFraction(1.5, 0); }).empty());
    allocator().setMemoryFraction(1.0, 0);
    EXPECT(allocator().name() == "warpool" && allocator().initialized());
    EXPECT(allocator().getExpandableSegmentSizes(0).empty());
}

void caching_off() {
    allocator().enable(false);
    EXPECT(!allocator().isEnabled());
    void* direct = allocator().raw_alloc_with_stream(MB, nullptr);
    EXPECT(allocated() == 0);
    allocator().enable(true);
    EXPECT(allocator().isEnabled());
    allocator().raw_delete(direct);
}

void out_of_memory() {
    struct Seen {
        int calls = 0;
        size_t requested = 0;
    };
    auto seen = std::make_shared<Seen>();
    allocator().attachOutOfMemoryObserver([seen](int64_t device, size_t requested, size_t, size_t) {
        EXPECT(device == 0);
        seen->calls += 1;
        seen->requested = requested;
    });
    bool caught = false;
    try {
        allocator().raw_alloc_with_stream(size_t{1} << 42, nullptr);
    } catch (const c10::OutOfMemoryError& error) {
        const auto* begins = "Tried to allocate 4096.00 GiB. GPU 0 has a total capacity of";
        caught = std::strstr(error.what_without_backtrace(), begins) != nullptr;
    }
    EXPECT(caught && seen->calls == 1 && seen->requested == size_t{1} << 42);
    EXPECT(allocator().getDeviceStats(0).num_ooms == 1);
}

struct Recorded : c10::GatheredContext {
    static inline std::atomic<int> alive = 0;
    Recorded() {
        alive += 1;
    }
    ~Recorded() override {
        alive -= 1;
    }
};

std::shared_ptr<c10::GatheredContext> record() {
    return std::make_shared<Recorded>();
}

void history() {
    using Entry = caching::TraceEntry;
    // A tracker stays attached, and is called by all threads.
    static std::atomic<int> tracked = 0;
    allocator().attachAllocatorTraceTracker(
        [](const Entry& entry) { tracked += entry.action_ == Entry::ALLOC ? 1 : 0; });
    EXPECT(!allocator().isHistoryEnabled());
    EXPECT(!thrown([] {
        allocator().recordHistory(true, record, 100, caching::RecordContext::ALL, true, {"no such action"});
    }).empty());
    allocator().recordHistory(true, record, 100, caching::RecordContext::ALL, true, {"free_completed"});
    EXPECT(allocator().isHistoryEnabled());
    allocator().setUserMetadata("step 7");
    EXPECT(allocator().getUserMetadata() == "step 7");
    std::string region = "Region 1";
    allocator().pushCompileContext(region);
    void* block = allocator().raw_alloc_with_stream(MB, nullptr);
    allocator().popCompileContext();
    allocator().setUserMetadata("");
    void* freed = allocator().raw_alloc_with_stream(MB, nullptr);
    allocator().raw_delete(freed);
    EXPECT(tracked == 2);

    auto snapshot = allocator().snapshot({0, 0}, true);
    std::vector<Entry> trace;
    for (const auto& entry : snapshot.device_traces.at(0)) {
        if (entry.action_ == Entry::ALLOC || entry.action_ == Entry::FREE_REQUESTED) {
            trace.push_back(entry);
        }
        EXPECT(entry.action_ != Entry::FREE_COMPLETED);
    }
    EXPECT(trace.size() == 3);
    EXPECT(trace[0].action_ == Entry::ALLOC && trace[0].addr_ == reinterpret_cast<size_t>(block));
    EXPECT(trace[0].user_metadata_ == "step 7" && trace[0].compile_context_ == "Region 1");
    EXPECT(trace[1].user_metadata_.empty() && trace[1].compile_context_ == "N/A");
    EXPECT(trace[2].action_ == Entry::FREE_REQUESTED);
    for (const auto& entry : trace) {
        EXPECT(dynamic_cast<Recorded*>(entry.context_.get()) != nullptr);
    }
    size_t live = 0;
    for (const auto& segment : snapshot.segments) {
        for (const auto& info : segment.blocks) {
            live += info.allocated ? 1 : 0;
            EXPECT(!info.allocated || info.context_when_allocated != nullptr);
        }
    }
    EXPECT(live == 1);
    EXPECT(snapshot.config_metadata.roundup_power2_divisions.size() == 16);
    EXPECT(allocator().snapshot({0, 0}, false).device_traces.at(0).empty());
    snapshot = {};
    trace.clear();
    allocator().raw_delete(block);
    allocator().recordHistory(false, nullptr, 0, caching::RecordContext::NEVER, true, {});
    EXPECT(!allocator().isHistoryEnabled());
    // Segments keep the context of the request that they were allocated for.
    allocator().emptyCache({0, 0});
    allocator().recordHistory(false, nullptr, 0, caching::RecordContext::NEVER, true, {});
    EXPECT(Recorded::alive == 0);
}

void pools() {
    const MempoolId_t graph{0, 7};
    allocator().createOrIncrefPool(0, graph, nullptr);
    EXPECT(allocator().getPoolUseCount(0, graph) == 1);
    const auto here = std::this_thread::get_id();
    allocator().beginAllocateToPool(0, graph, [here](cudaStream_t) { return std::this_thread::get_id() == here; });
    EXPECT(allocator().getPoolUseCount(0, graph) == 2);
    EXPECT(!thrown([&] { allocator().beginAllocateToPool(0, graph, [](cudaStream_t) { return true; }); }).empty());
    void* inside = allocator().raw_alloc_with_stream(MB, nullptr);
    void* outside = nullptr;
    std::thread([&] { outside = allocator().raw_alloc_with_stream(MB, nullptr); }).join();
    allocator().endAllocateToPool(0, graph);
    EXPECT(!thrown([&] { allocator().endAllocateToPool(0, graph); }).empty());
    EXPECT(allocator().checkPoolLiveAllocations(0, graph, {inside}));
    EXPECT(!allocator().checkPoolLiveAllocations(0, graph, {inside, outside}));
    auto segments = allocator().snapshot(graph, false).segments;
    EXPECT(segments.size() == 1 && segments[0].owner_private_pool_id == graph);

    // A filter that throws: its exception reaches the caller of the allocator.
    const MempoolId_t failing{0, 8};
    allocator().beginAllocateToPool(0, failing, [](cudaStream_t) -> bool { TORCH_CHECK(false, "from the filter"); });
    EXPECT(thrown([] { allocator().raw_alloc_with_stream(MB, nullptr); }).find("from the filter") != std::string::npos);
    allocator().endAllocateToPool(0, failing);
    allocator().releasePool(0, failing);

    // Checkpoints.
    const auto state = allocator().getCheckpointState(0, graph);
    allocator().beginAllocateToPool(0, graph, [](cudaStream_t) { return true; });
    void* later = allocator().raw_alloc_with_stream(MB, nullptr);
    allocator().endAllocateToPool(0, graph);
    allocator().releasePool(0, graph);
    auto delta = allocator().setCheckpointPoolState(0, state);
    EXPECT(delta.ptrs_freed.size() == 2 && delta.dataptrs_allocd.size() == 1);
    EXPECT(delta.dataptrs_allocd[0].get() == inside && later != inside);
    EXPECT(delta.dataptrs_allocd[0].get_deleter() == allocator().raw_deleter());
    EXPECT(!thrown([] {
        allocator().setCheckpointPoolState(0, std::make_shared<caching::AllocatorState>());
    }).empty());
    delta = {};
    EXPECT(allocator().checkPoolLiveAllocations(0, graph, {}));

    allocator().releasePool(0, graph);
    allocator().releasePool(0, graph);
    EXPECT(allocator().getPoolUseCount(0, graph) == 0);
    EXPECT(!thrown([&] { allocator().releasePool(0, graph); }).empty());
    allocator().setUseOnOOM(0, graph, false);
    allocator().raw_delete(outside);
}

// Memory from another allocator, as torch.cuda.MemPool(allocator) gets it.
void pool_options() {
    const MempoolId_t whole{0, 9};
    allocator().createOrIncrefPool(0, whole, nullptr);
    allocator().setNoSplit(0, whole);
    allocator().setUseOnOOM(0, whole, true);
    allocator().beginAllocateToPool(0, whole, [](cudaStream_t) { return true; });
    void* first = allocator().raw_alloc_with_stream(MB / 4, nullptr);
    void* second = allocator().raw_alloc_with_stream(MB / 4, nullptr);
    allocator().endAllocateToPool(0, whole);
    // Neighbours of an expandable segment are shown as one.
    const auto distance = static_cast<char*>(second) - static_cast<char*>(first);
    EXPECT(std::abs(distance) >= static_cast<ptrdiff_t>(2 * MB));
    EXPECT(!thrown([&] { allocator().setNoSplit(0, whole); }).empty());
    allocator().raw_delete(first);
    allocator().raw_delete(second);
    allocator().releasePool(0, whole);
    allocator().releasePool(0, whole);
}

void pinned() {
    auto& host = *at::getHostAllocator(at::kCUDA);
    auto block = host.allocate(1000);
    EXPECT(block.get() != nullptr && block.device().is_cpu());
    std::memset(block.get(), 7, 1000);
    EXPECT(host.get_stats().active_requests.current == 1);
    EXPECT(host.allocate(0).get() == nullptr);
    void* address = block.get();
    const auto stream = c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0));
    EXPECT(host.record_event(static_cast<char*>(address) + 8, block.get_context(), stream));
    int unknown = 0;
    EXPECT(!host.record_event(&unknown, nullptr, stream));
    block = {};
    EXPECT(host.allocate(1000).get() != nullptr);

    // In a capture, memory freed without a use serves the next request; memory that was used stays with the graph.
    const MempoolId_t graph{3, 0};
    host.begin_allocate_to_pool(graph, [](c10::Stream) { return true; });
    EXPECT(!thrown([&] { host.begin_allocate_to_pool(graph, [](c10::Stream) { return true; }); }).empty());
    auto unused = host.allocate(64);
    void* first = unused.get();
    unused = {};
    auto used = host.allocate(64);
    EXPECT(used.get() == first);
    EXPECT(host.record_event(used.get(), used.get_context(), stream));
    used = {};
    EXPECT(host.allocate(64).get() != first);
    host.end_allocate_to_pool(graph);
    EXPECT(!thrown([&] { host.end_allocate_to_pool(graph); }).empty());
    host.release_pool(graph);
    EXPECT(!thrown([&] { host.release_pool(graph); }).empty());
    host.empty_cache();
    EXPECT(host.get_stats().active_requests.current == 0);
    EXPECT(host.get_stats().allocated_bytes.current == 0);
    host.reset_accumulated_stats();
    host.reset_peak_stats();
    EXPECT(host.get_stats().allocated_bytes.peak == 0);
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
void pinned_history() {
    using Entry = caching::TraceEntry;
    auto& host = *at::getHostAllocator(at::kCUDA);
    EXPECT(!host.is_history_enabled() && host.get_traces().empty() && host.get_segments().empty());
    host.record_history(true, record, 100, caching::RecordContext::ALL, true);
    EXPECT(host.is_history_enabled());
    auto block = host.allocate(1000);
    const auto address = reinterpret_cast<size_t>(block.get());
    size_t live = 0;
    for (const auto& segment : host.get_segments()) {
        live += segment.allocated ? 1 : 0;
        EXPECT(!segment.allocated || (segment.address == address && segment.active && segment.size >= 1000));
        EXPECT(!segment.allocated || dynamic_cast<Recorded*>(segment.context_when_allocated.get()) != nullptr);
    }
    EXPECT(live == 1);
    block = {};
    std::vector<int> actions;
    for (const auto& entry : host.get_traces()) {
        EXPECT(entry.device_ == -1);
        if (entry.addr_ == address && entry.action_ != Entry::SEGMENT_ALLOC) {
            EXPECT(entry.size_ >= 1000);
            actions.push_back(entry.action_);
        }
    }
    EXPECT((actions == std::vector<int>{Entry::ALLOC, Entry::FREE_REQUESTED, Entry::FREE_COMPLETED}));
    host.record_history(false, nullptr, 0, caching::RecordContext::NEVER, true);
    EXPECT(!host.is_history_enabled() && host.get_traces().empty());
    host.empty_cache();
    host.record_history(false, nullptr, 0, caching::RecordContext::NEVER, true);
    EXPECT(Recorded::alive == 0);
}
#endif

// Mapped memory can be opened by the process that shared it; plain memory only by others.
void sharing() {
    const char* settings = std::getenv("WARPOOL_CONF");
    auto block = allocator().allocate(3 * MB);
    if (settings == nullptr || std::strcmp(settings, "backend:native") == 0) {
        EXPECT(!thrown([&] { allocator().getIpcDevPtr("no handle"); }).empty());
        return;
    }
    const auto shared = allocator().shareIpcHandle(block.get());
    auto opened = allocator().getIpcDevPtr(shared.handle);
    auto* there = static_cast<char*>(opened.get()) + shared.offset;
    EXPECT(opened != nullptr && there != block.get());
    EXPECT(allocator().getIpcDevPtr(shared.handle) == opened);
    opened.reset();
    EXPECT(!thrown([&] { allocator().shareIpcHandle(there); }).empty());
}

// For ThreadSanitizer above all: memory of every kind, with a history, while another thread reads everything.
void threads() {
    constexpr int ROUNDS = 100;
    const auto before = allocated();
    allocator().recordHistory(true, record, 1000, caching::RecordContext::ALL, true, {});
    std::atomic<int> running = 4;
    std::vector<std::thread> workers;
    for (int number = 0; number < 4; ++number) {
        workers.emplace_back([number, &running] {
            auto* host = at::getHostAllocator(at::kCUDA);
            for (int round = 0; round < ROUNDS; ++round) {
                void* raw = allocator().raw_alloc((1 + (number + round) % 5) * MB);
                auto tensor = allocator().allocate(512 << (round % 12));
                allocator().recordStream(tensor, c10::cuda::getDefaultCUDAStream(0));
                auto pinned = host->allocate(4096);
                EXPECT(raw != nullptr && tensor.get() != nullptr && pinned.get() != nullptr);
                if (round % 16 == 0) {
                    // Freed by another thread.
                    std::thread([tensor = std::move(tensor)]() mutable { tensor.clear(); }).join();
                }
                allocator().raw_delete(raw);
            }
            running -= 1;
        });
    }
    while (running > 0) {
        EXPECT(!allocator().snapshot({0, 0}, true).device_traces.empty());
        EXPECT(allocated() >= before);
        allocator().emptyCache({0, 0});
        at::getHostAllocator(at::kCUDA)->empty_cache();
    }
    for (auto& worker : workers) {
        worker.join();
    }
    allocator().recordHistory(false, nullptr, 0, caching::RecordContext::NEVER, true, {});
    allocator().emptyCache({0, 0});
    EXPECT(allocated() == before);
}

void settings() {
    using c10::CachingAllocator::setAllocatorSettings;
    setAllocatorSettings("max_split_size_mb:200");
    EXPECT(allocator().snapshot({0, 0}, false).config_metadata.max_split_size == 200 * MB);
    const auto text = allocator().snapshot({0, 0}, false).config_metadata.last_allocator_settings;
    EXPECT(text.find("max_split_size_mb:200") != std::string::npos);
    EXPECT(!thrown([] { setAllocatorSettings("no_such_key:1"); }).empty());
    setAllocatorSettings("");
}

}  // namespace

int main() {
    if (warpool_backend_install() != 0) {
        std::printf("%s\n", warpool_backend_error());
        return 1;
    }
    EXPECT(std::strncmp(warpool_backend_torch_version(), TORCH_VERSION, 4) == 0);
    EXPECT(c10::GetAllocator(c10::kCUDA) == caching::get());
    EXPECT(std::strcmp(warpool_driver(), "sim") == 0);
    allocator().init(1);
    memory_and_statistics();
    caching_off();
    out_of_memory();
    history();
    pools();
    pool_options();
    pinned();
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
    pinned_history();
#endif
    sharing();
    threads();
    settings();
    EXPECT(warpool_backend_install() != 0 && std::strstr(warpool_backend_error(), "installed already") != nullptr);
    std::printf("passed\n");
    return 0;
}
