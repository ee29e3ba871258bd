//! The matrix product of the simulated cuBLAS, as a kernel: its arguments and its host implementation.
//!
//! Sums run over `k` upwards, without fused multiply-add, so that a product gives the same bits on every machine.

use crate::{BlasMath, BlasMatrix, DevicePtr, HostKernel, KernelArg, KernelFault, KernelScope, LaunchShape, Sgemm};

/// The product as a kernel.
pub static SGEMM: HostKernel = HostKernel::new("sgemm", run);

/// How many bytes a product writes at the start and at the end of its workspace, so that hazards of other users and a
/// wrong size are detected.
const WORKSPACE_TOUCHED: u64 = 16;

/// The workspace of a product, if one was set: its address and its size.
pub type Workspace = Option<(DevicePtr, u64)>;

/// The shape of its launch: one thread for each element of the result, up to the maximal grid.
pub fn shape(product: &Sgemm) -> LaunchShape {
    let blocks = |n: u32| n.div_ceil(16).clamp(1, 65_535);
    LaunchShape { grid: [blocks(product.m), blocks(product.n), 1], block: [16, 16, 1], shared_bytes: 0 }
}

/// The arguments of its launch.
pub fn arguments(product: &Sgemm, math: BlasMath, workspace: Workspace) -> Vec<KernelArg> {
    let Sgemm { m, n, k, alpha, a, b, beta, c } = *product;
    let (scratch, scratch_bytes) = workspace.unwrap_or((DevicePtr(0), 0));
    let mut args: Vec<KernelArg> = vec![m.into(), n.into(), k.into(), alpha.into(), beta.into()];
    for BlasMatrix { ptr, stride, transposed } in [a, b, c] {
        args.extend([KernelArg::Ptr(ptr), KernelArg::U32(stride), KernelArg::U32(u32::from(transposed))]);
    }
    let tf32 = u32::from(math == BlasMath::Tf32);
    args.extend([KernelArg::U32(tf32), KernelArg::Ptr(scratch), KernelArg::U64(scratch_bytes)]);
    args
}

fn run(kernel: &mut KernelScope<'_>) -> Result<(), KernelFault> {
    let matrix = |at: usize| -> Result<BlasMatrix, KernelFault> {
        let (ptr, stride) = (kernel.arg_ptr(at)?, kernel.arg_u32(at + 1)?);
        Ok(BlasMatrix { ptr, stride, transposed: kernel.arg_u32(at + 2)? != 0 })
    };
    let (a, b, c) = (matrix(5)?, matrix(8)?, matrix(11)?);
    let (m, n, k) = (kernel.arg_u32(0)?, kernel.arg_u32(1)?, kernel.arg_u32(2)?);
    let (alpha, beta) = (kernel.arg_f32(3)?, kernel.arg_f32(4)?);
    let tf32 = kernel.arg_u32(14)? != 0;
    let (scratch, scratch_bytes) = (kernel.arg_ptr(15)?, kernel.arg_u64(16)?);
    touch_workspace(kernel, scratch, scratch_bytes)?;
    // As in every BLAS, what is multiplied by 0 is not read.
    let k = if alpha == 0.0 { 0 } else { k };
    let mut left = load(kernel, &a, m, k)?;
    let mut right = load(kernel, &b, k, n)?;
    if tf32 {
        left.round();
        right.round();
    }
    for column in 0..n {
        let at = start_of(&c, column);
        let old = if beta == 0.0 { Vec::new() } else { kernel.read_f32(at, m as usize)? };
        let new: Vec<f32> = (0..m)
            .map(|row| {
                let product = alpha * (0..k).fold(0.0, |sum, i| sum + left.at(row, i) * right.at(i, column));
                old.get(row as usize).map_or(product, |old| product + beta * old)
            })
            .collect();
        kernel.write_f32(at, &new)?;
    }
    Ok(())
}

fn touch_workspace(kernel: &mut KernelScope<'_>, ptr: DevicePtr, bytes: u64) -> Result<(), KernelFault> {
    let touched = WORKSPACE_TOUCHED.min(bytes);
    if touched == 0 {
        return Ok(());
    }
    let bytes_written = [0xb1; WORKSPACE_TOUCHED as usize];
    kernel.memory.write(ptr, &bytes_written[..touched as usize])?;
    kernel.memory.write(ptr.offset(bytes - touched), &bytes_written[..touched as usize])
}

/// The address of a column of a matrix.
fn start_of(matrix: &BlasMatrix, column: u32) -> DevicePtr {
    matrix.ptr.offset(u64::from(column) * u64::from(matrix.stride) * 4)
}

/// The elements of a matrix by columns, as in memory but without the gaps.
struct Elements {
    values: Vec<f32>,
    rows: u32,
    transposed: bool,
}

impl Elements {
    /// The element in that row and column of the matrix as the product uses it.
    fn at(&self, row: u32, column: u32) -> f32 {
        let (row, column) = if self.transposed { (column, row) } else { (row, column) };
        self.values[column as usize * self.rows as usize + row as usize]
    }

    fn round(&mut self) {
        for value in &mut self.values {
            *value = to_tf32(*value);
        }
    }
}

/// Reads a matrix that the product uses as `rows` by `columns`.
fn load(kernel: &mut KernelScope<'_>, matrix: &BlasMatrix, rows: u32, columns: u32) -> Result<Elements, KernelFault> {
    let (rows, columns) = if matrix.transposed { (columns, rows) } else { (rows, columns) };
    let mut values = Vec::new();
    if rows != 0 {
        for column in 0..columns {
            values.extend(kernel.read_f32(start_of(matrix, column), rows as usize)?);
        }
    }
    Ok(Elements { values, rows, transposed: matrix.transposed })
}

/// Rounds to 10 bits of mantissa, ties to even.
fn to_tf32(number: f32) -> f32 {
    const DROPPED: u32 = 13;
    if !number.is_finite() {
        return number;
    }
    let bits = number.to_bits();
    let even = (bits >> DROPPED) & 1;
    let rounded = bits.wrapping_add((1 << (DROPPED - 1)) - 1 + even);
    f32::from_bits(rounded >> DROPPED << DROPPED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_rounds_to_ten_bits_of_mantissa() {
        let bit = |n: i32| 2_f32.powi(-n);
        for (number, rounded) in [
            (1.0, 1.0),
            (1.0 + bit(10), 1.0 + bit(10)),
            (1.0 + bit(11), 1.0),
            (1.0 + bit(11) + bit(20), 1.0 + bit(10)),
            (1.0 + bit(10) + bit(11), 1.0 + bit(9)),
            (-1.0 - bit(10) - bit(11), -1.0 - bit(9)),
            (2.0 - bit(23), 2.0),
            (0.0, 0.0),
            (f32::INFINITY, f32::INFINITY),
            (f32::MAX, f32::INFINITY),
        ] {
            assert_eq!(to_tf32(number), rounded, "{number}");
        }
        assert!(to_tf32(f32::NAN).is_nan());
    }
}
