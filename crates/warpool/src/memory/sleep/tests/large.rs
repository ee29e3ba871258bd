//! Segments of odd sizes above a chunk of a copy and above a piece of host memory: their contents survive to the last
//! word.

use super::machine::{Kind, MIB, Machine};
use crate::memory::MemPoolId;
use crate::memory::sleep::Keep;

#[test]
fn contents_of_large_blocks_survive() {
    for kind in Kind::ALL {
        for bytes in [64 * MIB, 64 * MIB + 512, 70 * MIB, 129 * MIB + 12, 258 * MIB + 4] {
            let machine = Machine::new(kind, 600 * MIB);
            let blocks = [bytes, 3 * MIB].map(|bytes| machine.allocate("weights", bytes, 0).unwrap());
            for (block, value) in blocks.iter().zip(1..) {
                machine.write(block, value, 0);
            }
            machine.sleep(&["weights"], Keep::Host).unwrap();
            machine.wake(&["weights"]).unwrap();
            for (block, value) in blocks.iter().zip(1..) {
                machine.expect(block, value, 0);
            }
            assert_eq!(machine.defect(), None, "{kind:?}, {bytes} bytes");
            blocks.iter().for_each(|block| machine.allocator.free(*block).unwrap());
            machine.allocator.trim(super::machine::DEVICE, MemPoolId::DEFAULT).unwrap();
            assert_eq!(machine.finish(), None);
        }
    }
}
