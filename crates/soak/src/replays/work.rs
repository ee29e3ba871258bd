//! Work of a stream, on variables of [`WORDS`] words: how it is queued, and what it does, as the host computes it.

use std::collections::BTreeMap;

use warpool::driver::sim::SimDriver;
use warpool::driver::{
    DeviceId, FunctionId, HostKernel, KernelFault, KernelScope, KernelSource, Kernels as _, ModuleId, Pattern,
};
use warpool::generator::{philox, position};

/// The length of every variable.
pub const WORDS: usize = 16;
pub const BYTES: u64 = 4 * WORDS as u64;
pub type Words = [u32; WORDS];

/// A variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Var {
    /// Lives as long as the program, and is compared with the model.
    Outside(usize),
    /// Lives in one run of one section.
    Temp(usize),
    /// Belongs to a graph, which writes it; later graphs in its pool read it.
    Left(usize),
}

#[derive(Clone, Copy, Debug)]
pub enum Work {
    Fill { to: Var, value: u32, width: usize },
    Copy { to: Var, from: Var },
    Mix { to: Var, a: Var, b: Var },
    Limit { to: Var, from: Var, most: u32 },
    CountDown { flag: Var },
    Tame { to: Var, from: Var },
    Multiply { to: Var, a: Var, b: Var, size: [u32; 3], transposed: [bool; 2], beta: f32 },
    Draw { to: Var, generator: usize, words: u64 },
    Salt { to: Var, generator: usize, increment: u64 },
}

impl Work {
    pub fn reads(self) -> Vec<Var> {
        match self {
            Self::Fill { .. } => vec![],
            Self::Copy { from, .. } | Self::Limit { from, .. } | Self::Tame { from, .. } => vec![from],
            Self::CountDown { flag: to } | Self::Draw { to, .. } | Self::Salt { to, .. } => vec![to],
            Self::Mix { a, b, .. } => vec![a, b],
            Self::Multiply { to, a, b, .. } => vec![to, a, b],
        }
    }

    pub fn writes(self) -> Var {
        match self {
            Self::Fill { to, .. }
            | Self::Copy { to, .. }
            | Self::Mix { to, .. }
            | Self::Limit { to, .. }
            | Self::CountDown { flag: to }
            | Self::Tame { to, .. }
            | Self::Multiply { to, .. }
            | Self::Draw { to, .. }
            | Self::Salt { to, .. } => to,
        }
    }
}

/// A fill of a whole variable.
pub fn fill(value: u32, width: usize) -> (Pattern, u64) {
    match width {
        1 => (Pattern::U8(value as u8), BYTES),
        2 => (Pattern::U16(value as u16), BYTES / 2),
        _ => (Pattern::U32(value), BYTES / 4),
    }
}

/// Seed and offset of a generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub seed: u64,
    pub offset: u64,
}

impl State {
    fn advance(&mut self, by: u64) -> Self {
        let before = *self;
        self.offset += by.next_multiple_of(4);
        before
    }
}

/// What all variables contain, and the generators' states: work is done one after the other.
pub struct Model {
    pub values: BTreeMap<Var, Words>,
    pub states: Vec<State>,
    /// The state of each generator. Two may share one.
    pub state_of: Vec<usize>,
}

impl Model {
    pub fn apply(&mut self, work: Work) {
        let value = |var: Var| self.values.get(&var).copied().unwrap_or_default();
        let mut to = value(work.writes());
        match work {
            Work::Fill { value, width: 1, .. } => to = [u32::from(value as u8) * 0x0101_0101; WORDS],
            Work::Fill { value, width: 2, .. } => to = [u32::from(value as u16) * 0x0001_0001; WORDS],
            Work::Fill { value, .. } => to = [value; WORDS],
            Work::Copy { from, .. } => to = value(from),
            Work::Mix { a, b, .. } => to = mix(value(a), value(b)),
            Work::Limit { from, most, .. } => to = limit(value(from), most),
            Work::CountDown { .. } => to[0] = to[0].saturating_sub(1),
            Work::Tame { from, .. } => to = tame(value(from)).map(f32::to_bits),
            Work::Multiply { a, b, size, transposed, beta, .. } => {
                to = multiply([to, value(a), value(b)], size, transposed, beta);
            }
            Work::Draw { generator, words, .. } => {
                let State { seed, offset } = self.states[self.state_of[generator]].advance(4);
                let numbers = (0..).flat_map(|at| philox::block(seed, at, offset)).take(words as usize);
                to.iter_mut().zip(numbers).for_each(|(word, number)| *word = number);
            }
            Work::Salt { generator, increment, .. } => {
                let State { seed, offset } = self.states[self.state_of[generator]].advance(increment);
                to = salt(to, seed, offset);
            }
        }
        self.values.insert(work.writes(), to);
    }
}

/// A hash of both, word by word.
fn mix(a: Words, b: Words) -> Words {
    std::array::from_fn(|at| a[at].wrapping_mul(0x9e37_79b1) ^ b[at].rotate_left(13).wrapping_add(7 + at as u32))
}

/// A number below `most` in every word.
fn limit(from: Words, most: u32) -> Words {
    [from.iter().fold(0_u32, |sum, word| sum.wrapping_add(*word)) % most; WORDS]
}

/// Small whole numbers, whose products are exact.
fn tame(from: Words) -> [f32; WORDS] {
    from.map(|word| (word % 17) as f32 - 8.0)
}

/// `a * b + beta * c`, by columns of four.
fn multiply([c, a, b]: [Words; 3], [m, n, k]: [u32; 3], [ta, tb]: [bool; 2], beta: f32) -> Words {
    let at = |words: Words, row: u32, column: u32, transposed: bool| {
        let (row, column) = if transposed { (column, row) } else { (row, column) };
        f32::from_bits(words[(row + 4 * column) as usize])
    };
    let mut result = c;
    for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
        // From 0, as the simulated GPU does: the sum of an iterator begins with -0.
        let product = (0..k).fold(0.0, |sum, inner| sum + at(a, row, inner, ta) * at(b, inner, column, tb));
        let sum = if beta == 0.0 { product } else { product + beta * at(c, row, column, false) };
        result[(row + 4 * column) as usize] = sum.to_bits();
    }
    result
}

fn salt(words: Words, seed: u64, offset: u64) -> Words {
    std::array::from_fn(|at| words[at] ^ philox::block(seed, at as u64, offset)[0])
}

static SOURCE: KernelSource = KernelSource {
    name: "replays",
    cuda: "",
    host_kernels: &[
        HostKernel::new("mix", |k| {
            let result = mix(read(k, 1)?, read(k, 2)?);
            k.write_u32(k.arg_ptr(0)?, &result)
        }),
        HostKernel::new("limit", |k| {
            let result = limit(read(k, 1)?, k.arg_u32(2)?);
            k.write_u32(k.arg_ptr(0)?, &result)
        }),
        HostKernel::new("count_down", |k| {
            let flag = k.arg_ptr(0)?;
            let left = k.read_u32(flag, 1)?[0];
            k.write_u32(flag, &[left.saturating_sub(1)])
        }),
        HostKernel::new("tame", |k| {
            let result = tame(read(k, 1)?);
            k.write_f32(k.arg_ptr(0)?, &result)
        }),
        HostKernel::new("salt", |k| {
            let (seed, offset) = position(k, 1)?;
            let result = salt(read(k, 0)?, seed, offset);
            k.write_u32(k.arg_ptr(0)?, &result)
        }),
    ],
};

fn read(k: &mut KernelScope<'_>, arg: usize) -> Result<Words, KernelFault> {
    let from = k.arg_ptr(arg)?;
    Ok(k.read_u32(from, WORDS)?.try_into().expect("so many were read"))
}

/// The loaded kernels.
pub struct LoadedKernels {
    module: ModuleId,
    pub mix: FunctionId,
    pub limit: FunctionId,
    pub count_down: FunctionId,
    pub tame: FunctionId,
    pub salt: FunctionId,
}

impl LoadedKernels {
    pub fn load(sim: &SimDriver) -> Self {
        let module = sim.module_load(DeviceId(0), &SOURCE).unwrap();
        let [mix, limit, count_down, tame, salt] =
            ["mix", "limit", "count_down", "tame", "salt"].map(|name| sim.function_get(module, name).unwrap());
        Self { module, mix, limit, count_down, tame, salt }
    }

    pub fn unload(self, sim: &SimDriver) {
        sim.module_unload(self.module).unwrap();
    }
}

/// The function and the arguments of work that is a kernel; `at` gives the argument of a variable.
pub fn kernel<A: From<u32>>(
    kernels: &LoadedKernels,
    work: Work,
    at: &mut dyn FnMut(Var) -> Option<A>,
) -> Option<(FunctionId, Vec<A>)> {
    Some(match work {
        Work::Mix { to, a, b } => (kernels.mix, vec![at(to)?, at(a)?, at(b)?]),
        Work::Limit { to, from, most } => (kernels.limit, vec![at(to)?, at(from)?, most.into()]),
        Work::CountDown { flag } => (kernels.count_down, vec![at(flag)?]),
        Work::Tame { to, from } => (kernels.tame, vec![at(to)?, at(from)?]),
        _ => return None,
    })
}
