//! The final numbers of texts and stacks. They follow the order of the snapshot, not that of the file, so a snapshot
//! that is written and read again is equal to the first.

use warpool::memory::report::{SegmentInfo, Snapshot, StackId, TextId, Texts};

use super::invalid::Invalid;
use super::stacks::StackTable;
use super::texts::TextTable;
use crate::budget::{Budget, bytes_of};

/// Replaces the reader's numbers of texts and stacks by those of the snapshot, and adds the texts and stacks to it.
pub(super) fn renumber(
    snapshot: &mut Snapshot,
    table: &TextTable,
    stacks: &StackTable,
    budget: &Budget,
) -> Result<(), Invalid> {
    // A text of the snapshot, beside its own bytes: the allocation, and its places in the list and in the map.
    const TEXT_BYTES: u64 = 160;
    budget.take(bytes_of::<Option<TextId>>(table.len()) + bytes_of::<Option<StackId>>(stacks.len()))?;
    budget.take(3 * bytes_of::<StackId>(stacks.len()))?;
    let mut texts = Texts::default();
    let mut text_numbers: Vec<Option<TextId>> = vec![None; table.len()];
    let mut renumber_text = |text: &mut Option<TextId>| {
        if let Some(old) = text.map(TextId::index) {
            let new = text_numbers[old].get_or_insert_with(|| {
                let old = old as u32;
                // If it is refused, the budget keeps the failure; one more text does no harm.
                let _ = budget.take(TEXT_BYTES + table.get(old).len() as u64);
                texts.intern(table.get(old))
            });
            *text = Some(*new);
        }
    };
    let mut order: Vec<StackId> = Vec::new();
    let mut stack_numbers: Vec<Option<StackId>> = vec![None; stacks.len()];
    let mut renumber_stack = |stack: &mut Option<StackId>| {
        if let Some(old) = *stack {
            let new = stack_numbers[old.index()].get_or_insert_with(|| {
                order.push(old);
                StackId::new(order.len() - 1).expect("no more than before")
            });
            *stack = Some(*new);
        }
    };
    let mut renumber_segments = |segments: &mut [SegmentInfo]| {
        for segment in segments {
            renumber_stack(&mut segment.stack);
            segment.blocks.iter_mut().for_each(|block| renumber_stack(&mut block.stack));
        }
    };
    renumber_segments(&mut snapshot.segments);
    renumber_segments(snapshot.host_segments.as_deref_mut().unwrap_or_default());
    for entry in snapshot.traces.iter_mut().chain(&mut snapshot.host_traces).flatten() {
        renumber_text(&mut entry.compile_context);
        renumber_text(&mut entry.user_metadata);
        budget.check()?;
        renumber_stack(&mut entry.stack);
        renumber_stack(&mut entry.forward_stack);
    }
    snapshot.texts = texts;
    snapshot.stacks = stacks.with_texts(&order, table)?;
    Ok(())
}
