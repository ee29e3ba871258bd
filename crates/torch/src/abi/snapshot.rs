//! The state of the devices and the history for PyTorch's allocator class: visited piece by piece.

use std::ffi::{CString, c_char, c_double, c_int, c_void};
use std::sync::Arc;

use warpool::memory::MemPoolId;
use warpool::memory::report::{
    BlockState, HistoryEntry, SegmentInfo, SegmentKind, Snapshot, Stack, StackId, TextId, TraceEntry,
};
use warpool_driver::DeviceId;

use crate::backend::context_of;
use crate::boundary;
use crate::error::{Error, Result};
use crate::runtime;
use crate::torch_pool::TorchPoolId;

/// A segment. All sizes are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SegmentEntry {
    /// Its device.
    pub device: c_int,
    /// Its first address.
    pub address: usize,
    /// Its size.
    pub total_size: usize,
    /// Its allocated bytes.
    pub allocated_size: usize,
    /// Its bytes that are allocated or pending free.
    pub active_size: usize,
    /// Its requested bytes.
    pub requested_size: usize,
    /// Its stream, a `cudaStream_t`.
    pub stream: *mut c_void,
    /// Whether it serves large requests.
    pub is_large: bool,
    /// Whether it is a part of an expandable segment.
    pub is_expandable: bool,
    /// PyTorch's id of its pool.
    pub pool: TorchPoolId,
    /// The context of the request that it was allocated for, or NULL.
    pub context: *mut c_void,
    /// How many blocks it has.
    pub blocks: usize,
}

/// A block of the segment that was visited last.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlockEntry {
    /// Its size.
    pub size: usize,
    /// The requested size.
    pub requested_size: usize,
    /// Whether it is allocated.
    pub is_allocated: bool,
    /// Whether it is allocated or pending free.
    pub is_active: bool,
    /// The context of its allocation, or NULL.
    pub context: *mut c_void,
}

/// An entry of the history. Texts and the context are valid during the visit only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ActionEntry {
    /// What happened: 0 alloc, 1 free_requested, 2 free_completed, 3 segment_alloc, 4 segment_free, 5 segment_map, 6
    /// segment_unmap, 7 snapshot, 8 oom, 9 annotate.
    pub action: c_int,
    /// The address; of oom, the bytes that were free on the device.
    pub address: usize,
    /// The size.
    pub size: usize,
    /// The stream, a `cudaStream_t`.
    pub stream: *mut c_void,
    /// The time in microseconds since 1970.
    pub time_us: i64,
    /// PyTorch's id of the pool.
    pub pool: TorchPoolId,
    /// The context, or NULL.
    pub context: *mut c_void,
    /// The compiled region of the program; empty for none.
    pub compile_context: *const c_char,
    /// The metadata that the program had set; empty for none.
    pub user_metadata: *const c_char,
}

/// The settings in effect.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SettingsEntry {
    /// The settings string.
    pub conf: *const c_char,
    /// The fraction of the limit above which old segments are released; 0 is never.
    pub garbage_collection_threshold: c_double,
    /// The size from which blocks are not split; all bits set: none.
    pub max_split_size: usize,
    /// How many threads touch pages before they are pinned.
    pub pinned_num_register_threads: usize,
    /// Whether segments are expandable.
    pub expandable_segments: bool,
    /// Whether the lock is released while the driver allocates.
    pub release_lock_on_malloc: bool,
    /// Whether host memory is pinned by registering it.
    pub pinned_use_host_register: bool,
    /// Whether frees inside a capture are reused by graph order.
    pub graph_capture_record_stream_reuse: bool,
    /// Steps between two powers of two, from 1 MiB to 32 GiB.
    pub roundup_power2_divisions: [usize; 16],
}

/// Receives a snapshot: the settings, every segment followed by its blocks, every entry of the history by device,
/// every annotation. What pointers point to is valid during a call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SnapshotVisitor {
    /// The first argument of every function.
    pub user: *mut c_void,
    /// Receives the settings.
    pub settings: unsafe extern "C" fn(user: *mut c_void, settings: *const SettingsEntry),
    /// Receives a segment.
    pub segment: unsafe extern "C" fn(user: *mut c_void, segment: *const SegmentEntry),
    /// Receives a block of that segment.
    pub block: unsafe extern "C" fn(user: *mut c_void, block: *const BlockEntry),
    /// Receives an entry of a device's history, oldest first.
    pub entry: unsafe extern "C" fn(user: *mut c_void, device: c_int, entry: *const ActionEntry),
    /// Receives the start or the end of a named region.
    pub annotation:
        unsafe extern "C" fn(user: *mut c_void, device: c_int, time_us: i64, name: *const c_char, stage: *const c_char),
}

/// Calls `visitor` with the state of all devices, or of `pool` alone unless that is (0, 0); with the history if
/// `traces` is not 0 and the program records it. The functions may call this library.
///
/// # Safety
/// `visitor` is NULL, which is an error, or its functions may be called with its `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_visit_snapshot(
    pool: TorchPoolId,
    traces: c_int,
    visitor: *const SnapshotVisitor,
) -> c_int {
    boundary::status(|| {
        // SAFETY: null or valid by this function's contract.
        let visitor = unsafe { visitor.as_ref() }.ok_or(Error::Null { argument: "visitor" })?;
        let runtime = runtime::get()?;
        let snapshot = runtime.snapshot_of(pool, traces != 0 && runtime.is_history_on())?;
        visit_settings(visitor, runtime)?;
        visit_segments(visitor, &snapshot);
        for (device, trace) in (0..).zip(&snapshot.traces) {
            for entry in trace {
                let texts = EntryTexts::of_trace(&snapshot, entry);
                // SAFETY: callable by this function's contract; the entry lives during the call.
                unsafe { (visitor.entry)(visitor.user, device, texts.entry()) };
            }
        }
        for annotation in &snapshot.annotations {
            let (name, stage) = (c_text(&annotation.name), c_text(&annotation.stage));
            let (device, time_us) = (annotation.device as c_int, annotation.time_us);
            // SAFETY: callable by this function's contract; the texts live during the call.
            unsafe { (visitor.annotation)(visitor.user, device, time_us, name.as_ptr(), stage.as_ptr()) };
        }
        Ok(())
    })
}

fn visit_settings(visitor: &SnapshotVisitor, runtime: &runtime::Runtime) -> Result<()> {
    let settings = runtime.settings();
    let conf = c_text(&settings.text);
    let entry = SettingsEntry {
        conf: conf.as_ptr(),
        garbage_collection_threshold: settings.garbage_collection_threshold,
        max_split_size: settings.max_split_bytes.map_or(usize::MAX, |bytes| bytes as usize),
        pinned_num_register_threads: settings.pinned.num_register_threads as usize,
        expandable_segments: settings.expandable_segments,
        release_lock_on_malloc: settings.release_lock_on_cudamalloc,
        pinned_use_host_register: settings.pinned.use_cuda_host_register,
        graph_capture_record_stream_reuse: settings.graph_capture_record_stream_reuse,
        roundup_power2_divisions: settings.roundup_power2_divisions.map(|divisions| divisions as usize),
    };
    // SAFETY: callable by the contract of `warpool_visit_snapshot`; the entry lives during the call.
    unsafe { (visitor.settings)(visitor.user, &raw const entry) };
    Ok(())
}

fn visit_segments(visitor: &SnapshotVisitor, snapshot: &Snapshot) {
    for segment in &snapshot.segments {
        // SAFETY: callable by the contract of `warpool_visit_snapshot`.
        unsafe { visit_segment(snapshot, segment, visitor.user, visitor.segment, visitor.block) };
    }
}

/// Visits a segment and its blocks.
///
/// # Safety
/// Both functions may be called with `user`.
pub(super) unsafe fn visit_segment(
    snapshot: &Snapshot,
    segment: &SegmentInfo,
    user: *mut c_void,
    visit: unsafe extern "C" fn(*mut c_void, *const SegmentEntry),
    visit_block: unsafe extern "C" fn(*mut c_void, *const BlockEntry),
) {
    let entry = SegmentEntry {
        device: segment.device,
        address: segment.address as usize,
        total_size: segment.total_size as usize,
        allocated_size: segment.allocated_size as usize,
        active_size: segment.active_size as usize,
        requested_size: segment.requested_size as usize,
        stream: handle(segment.stream),
        is_large: segment.kind == SegmentKind::Large,
        is_expandable: segment.is_expandable,
        pool: torch_pool(segment.pool),
        context: context(snapshot, segment.stack),
        blocks: segment.blocks.len(),
    };
    // SAFETY: callable by this function's contract; the entry lives during the call.
    unsafe { visit(user, &raw const entry) };
    for block in &segment.blocks {
        let entry = BlockEntry {
            size: block.size as usize,
            requested_size: block.requested_size as usize,
            is_allocated: block.state == BlockState::ActiveAllocated,
            is_active: block.state != BlockState::Inactive,
            context: context(snapshot, block.stack),
        };
        // SAFETY: as above.
        unsafe { visit_block(user, &raw const entry) };
    }
}

/// An entry with the texts that it points to.
pub(super) struct EntryTexts {
    entry: ActionEntry,
    _compile_context: CString,
    _user_metadata: CString,
    _stack: Option<Stack>,
}

impl EntryTexts {
    fn new(mut entry: ActionEntry, compile_context: &str, user_metadata: &str, stack: Option<Stack>) -> Self {
        let (compile_context, user_metadata) = (c_text(compile_context), c_text(user_metadata));
        entry.compile_context = compile_context.as_ptr();
        entry.user_metadata = user_metadata.as_ptr();
        entry.context = stack.as_ref().map_or(std::ptr::null_mut(), context_of);
        Self { entry, _compile_context: compile_context, _user_metadata: user_metadata, _stack: stack }
    }

    pub(super) fn of_trace(snapshot: &Snapshot, entry: &TraceEntry) -> Self {
        let text = |id: Option<TextId>| id.map_or("", |id| snapshot.texts.get(id));
        let stack = entry.stack.and_then(|id| snapshot.stacks.get(id.index())).map(Arc::clone);
        let plain = ActionEntry {
            action: entry.action as c_int,
            address: entry.addr as usize,
            size: entry.size as usize,
            stream: handle(entry.stream),
            time_us: entry.time_us,
            pool: torch_pool(entry.pool.unwrap_or(MemPoolId::DEFAULT)),
            context: std::ptr::null_mut(),
            compile_context: std::ptr::null(),
            user_metadata: std::ptr::null(),
        };
        Self::new(plain, text(entry.compile_context), text(entry.user_metadata), stack)
    }

    pub(super) fn entry(&self) -> *const ActionEntry {
        &raw const self.entry
    }
}

/// An entry as trackers get it.
pub(super) fn entry_of(device: DeviceId, entry: &HistoryEntry) -> EntryTexts {
    // A tracker is attached to the runtime of the process, which is the one that calls it.
    let pool = runtime::started().map_or(entry.pool, |runtime| match entry.pool {
        MemPoolId::DEFAULT => MemPoolId::DEFAULT,
        pool => runtime.torch_id(device, pool),
    });
    let plain = ActionEntry {
        action: entry.action as c_int,
        address: entry.addr as usize,
        size: entry.size as usize,
        stream: handle(entry.stream),
        time_us: entry.time_us,
        pool: torch_pool(pool),
        context: std::ptr::null_mut(),
        compile_context: std::ptr::null(),
        user_metadata: std::ptr::null(),
    };
    let compile_context = entry.compile_context.as_deref().unwrap_or("");
    EntryTexts::new(plain, compile_context, entry.user_metadata.as_deref().unwrap_or(""), entry.stack.clone())
}

fn context(snapshot: &Snapshot, stack: Option<StackId>) -> *mut c_void {
    let stack = stack.and_then(|id| snapshot.stacks.get(id.index()));
    stack.map_or(std::ptr::null_mut(), context_of)
}

fn handle(stream: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(stream as usize)
}

fn torch_pool(pool: MemPoolId) -> TorchPoolId {
    TorchPoolId { graph: u64::from(pool.graph), user: u64::from(pool.user) }
}

/// A text as a C string. A null character inside, which would end it, is replaced.
fn c_text(text: &str) -> CString {
    CString::new(text)
        .unwrap_or_else(|_| CString::new(text.replace('\0', "\u{fffd}")).expect("null characters are replaced"))
}
