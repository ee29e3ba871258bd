//! Reads the steps of a program from bytes: five little-endian numbers of 64 bits each per step.

use super::{Request, Requests, Step};

/// The bytes of a step: its kind with device and stream, and four arguments.
const STEP_BYTES: usize = 40;

/// Why bytes are not a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step} of the program is wrong: {reason}")]
pub struct RequestsError {
    step: usize,
    reason: &'static str,
}

impl Requests {
    /// Reads the steps. Each is kind + 256 · device + 65536 · stream, an allocation's number, an argument, the number
    /// of a stack and a time in microseconds. Kinds: 0 an allocation of as many bytes as the argument says, 1 a free,
    /// 2 a free of memory in use, 3 its work has completed, 4 all work has completed, 5 the cache is emptied, 6 the
    /// limit is as many millionths of the device's memory as the argument says.
    ///
    /// `stacks` are those that steps refer to, with number 0 for the first.
    ///
    /// # Errors
    /// If a step is none of these, refers to what there is not, or frees what is not allocated.
    pub fn from_bytes(bytes: &[u8], stacks: Vec<warpool::memory::report::Stack>) -> Result<Self, RequestsError> {
        let mut program = Self { devices: 1, streams: 1, allocations: 0, steps: Vec::new(), stacks };
        program.steps.reserve(bytes.len() / STEP_BYTES);
        let mut allocated: Vec<bool> = Vec::new();
        let mut in_use = 0_u64;
        for (number, step) in bytes.chunks(STEP_BYTES).enumerate() {
            let wrong = |reason| RequestsError { step: number, reason };
            let step = <[u8; STEP_BYTES]>::try_from(step).map_err(|_| wrong("it is cut off"))?;
            let field = |at: usize| {
                let field: [u8; 8] = step[at * 8..][..8].try_into().expect("eight bytes");
                u64::from_le_bytes(field)
            };
            let (head, id, argument, stack) = (field(0), field(1), field(2), field(3));
            let (kind, device, stream) = (head & 0xff, (head >> 8 & 0xff) as u32, (head >> 16) as u32);
            program.devices = program.devices.max(device + 1);
            program.streams = program.streams.max(stream.saturating_add(1));
            let small = |number: u64| u32::try_from(number).ok().filter(|&number| number < u32::MAX);
            let request = match kind {
                0 => {
                    let id = small(id).ok_or_else(|| wrong("its number is too large"))?;
                    if id as usize != allocated.len() {
                        return Err(wrong("allocations are not numbered in their order"));
                    }
                    allocated.push(true);
                    let stack = small(stack).filter(|&stack| (stack as usize) < program.stacks.len());
                    let stack = stack.ok_or_else(|| wrong("there is no such stack"))?;
                    Request::Alloc { id, bytes: argument, device, stream, stack }
                }
                1 | 2 => {
                    let found = usize::try_from(id).ok().and_then(|id| allocated.get_mut(id));
                    match found {
                        Some(allocated) if *allocated => *allocated = false,
                        _ => return Err(wrong("it frees what is not allocated")),
                    }
                    in_use += kind - 1;
                    Request::Free { id: id as u32, in_use: kind == 2 }
                }
                3 => {
                    in_use = in_use.checked_sub(1).ok_or_else(|| wrong("nothing is in use"))?;
                    Request::Complete
                }
                4 => {
                    in_use = 0;
                    Request::Synchronize
                }
                5 => Request::EmptyCache { device },
                6 => {
                    let millionths = small(argument).filter(|&share| share <= 1_000_000);
                    Request::Limit { device, millionths: millionths.ok_or_else(|| wrong("a limit above 1"))? }
                }
                _ => return Err(wrong("there is no such kind")),
            };
            program.steps.push(Step { time_us: field(4).cast_signed(), request });
        }
        program.allocations = allocated.len() as u32;
        Ok(program)
    }
}
