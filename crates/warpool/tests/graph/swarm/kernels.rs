//! The kernels of the programs. All of them use [`WORDS`] words, and their output depends on their input.

use warpool::driver::sim::SimDriver;
use warpool::driver::{
    DeviceId, FunctionId, HostKernel, KernelFault, KernelScope, KernelSource, Kernels as _, ModuleId,
};
use warpool::generator::{philox, position};

/// The length of every variable.
pub const WORDS: usize = 16;

pub static SOURCE: KernelSource = KernelSource {
    name: "graph swarm",
    cuda: "",
    host_kernels: &[
        HostKernel::new("add", add),
        HostKernel::new("mix", mix),
        HostKernel::new("sums", sums),
        HostKernel::new("limit", limit),
        HostKernel::new("count_down", count_down),
        HostKernel::new("tame", tame),
        HostKernel::new("salt", salt),
    ],
};

/// The loaded kernels.
pub struct Kernels {
    pub module: ModuleId,
    pub add: FunctionId,
    pub mix: FunctionId,
    pub sums: FunctionId,
    pub limit: FunctionId,
    pub count_down: FunctionId,
    pub tame: FunctionId,
    pub salt: FunctionId,
}

impl Kernels {
    pub fn load(sim: &SimDriver) -> Self {
        let module = sim.module_load(DeviceId(0), &SOURCE).unwrap();
        let [add, mix, sums, limit, count_down, tame, salt] =
            ["add", "mix", "sums", "limit", "count_down", "tame", "salt"]
                .map(|name| sim.function_get(module, name).unwrap());
        Self { module, add, mix, sums, limit, count_down, tame, salt }
    }
}

type KernelResult = Result<(), KernelFault>;

/// `(to, value)`: adds the value to every word.
fn add(k: &mut KernelScope<'_>) -> KernelResult {
    let (to, value) = (k.arg_ptr(0)?, k.arg_u32(1)?);
    let words: Vec<u32> = k.read_u32(to, WORDS)?.iter().map(|word| word.wrapping_add(value)).collect();
    k.write_u32(to, &words)
}

/// `(to, a, b)`: a hash of both, word by word.
fn mix(k: &mut KernelScope<'_>) -> KernelResult {
    let (to, a, b) = (k.arg_ptr(0)?, k.arg_ptr(1)?, k.arg_ptr(2)?);
    let (a, b) = (k.read_u32(a, WORDS)?, k.read_u32(b, WORDS)?);
    let words: Vec<u32> =
        a.iter().zip(&b).map(|(a, b)| a.wrapping_mul(0x9e37_79b1) ^ b.rotate_left(13).wrapping_add(7)).collect();
    k.write_u32(to, &words)
}

/// `(to, from)`: running sums, so that every word counts.
fn sums(k: &mut KernelScope<'_>) -> KernelResult {
    let (to, from) = (k.arg_ptr(0)?, k.arg_ptr(1)?);
    let mut sum = 0_u32;
    let words: Vec<u32> = k
        .read_u32(from, WORDS)?
        .iter()
        .map(|word| {
            sum = sum.wrapping_mul(3).wrapping_add(*word);
            sum
        })
        .collect();
    k.write_u32(to, &words)
}

/// `(to, from, most)`: a number below `most` into every word.
fn limit(k: &mut KernelScope<'_>) -> KernelResult {
    let (to, from, most) = (k.arg_ptr(0)?, k.arg_ptr(1)?, k.arg_u32(2)?);
    let number = k.read_u32(from, WORDS)?.iter().fold(0_u32, |sum, word| sum.wrapping_add(*word)) % most;
    k.write_u32(to, &[number; WORDS])
}

/// `(flag)`: decrements it.
fn count_down(k: &mut KernelScope<'_>) -> KernelResult {
    let flag = k.arg_ptr(0)?;
    let left = k.read_u32(flag, 1)?[0];
    k.write_u32(flag, &[left.saturating_sub(1)])
}

/// `(to, from)`: small whole numbers as floats, whose products are exact.
fn tame(k: &mut KernelScope<'_>) -> KernelResult {
    let (to, from) = (k.arg_ptr(0)?, k.arg_ptr(1)?);
    let floats: Vec<f32> = k.read_u32(from, WORDS)?.iter().map(|word| (word % 17) as f32 - 8.0).collect();
    k.write_f32(to, &floats)
}

/// `(to, slot, seed, offset)`: mixes random numbers in.
fn salt(k: &mut KernelScope<'_>) -> KernelResult {
    let to = k.arg_ptr(0)?;
    let (seed, offset) = position(k, 1)?;
    let words: Vec<u32> =
        (0..).zip(k.read_u32(to, WORDS)?).map(|(i, word)| word ^ philox::block(seed, i, offset)[0]).collect();
    k.write_u32(to, &words)
}
