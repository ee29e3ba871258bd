//! The kernels that draw numbers: CUDA C++, and their host implementations.
//!
//! In every fill, number `i` is lane `i % 4` of the block that subsequence `i / 4` has at the call's offset. A thread
//! generates the four numbers of one block, and a fill takes one block of every subsequence, however long it is. So it
//! advances the offset by 4.
//!
//! Three arguments, (slot, seed, offset), define where a kernel's numbers start. Without a slot, these are seed and
//! offset; with one, the slot contains both, and the third argument is added
//! ([`Reservation::args`](super::Reservation::args)).

use warpool_driver::{DevicePtr, HostKernel, KernelFault, KernelScope, KernelSource};

use super::philox;

/// The text of [`PHILOX_CUDA`](crate::generator::PHILOX_CUDA) as a literal, so that `concat!` can put it before a
/// kernel's own text.
#[macro_export]
macro_rules! philox_cuda {
    () => {
        r#"
// Where a kernel's numbers start. The offset is a multiple of 4.
struct WarpoolPosition { unsigned long long seed; unsigned long long offset; };

// From the three arguments of a reservation.
static __device__ __forceinline__ WarpoolPosition warpool_position(
    const unsigned long long *slot, unsigned long long seed, unsigned long long offset) {
    WarpoolPosition position;
    position.seed = slot ? slot[0] : seed;
    position.offset = slot ? slot[1] + offset : offset;
    return position;
}

// The four words of a subsequence at a position: Philox 4x32-10, as in cuRAND.
static __device__ __forceinline__ uint4 warpool_words(WarpoolPosition position, unsigned long long subsequence) {
    unsigned long long block = position.offset / 4;
    unsigned int a = (unsigned int)block, b = (unsigned int)(block >> 32);
    unsigned int c = (unsigned int)subsequence, d = (unsigned int)(subsequence >> 32);
    unsigned int k0 = (unsigned int)position.seed, k1 = (unsigned int)(position.seed >> 32);
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        unsigned int first_high = __umulhi(0xD2511F53u, a), first_low = 0xD2511F53u * a;
        unsigned int second_high = __umulhi(0xCD9E8D57u, c), second_low = 0xCD9E8D57u * c;
        a = second_high ^ b ^ k0;
        c = first_high ^ d ^ k1;
        b = second_low;
        d = first_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(a, b, c, d);
}

// Above 0, at most 1.
static __device__ __forceinline__ float warpool_uniform(unsigned int word) {
    const float step = 2.3283064365386963e-10f;
    return __fadd_rn(__fmul_rn(__uint2float_rn(word), step), step / 2.0f);
}

// Two of mean 0 and deviation 1: the sine, the cosine.
static __device__ __forceinline__ float2 warpool_normals(unsigned int first, unsigned int second) {
    const float step = 6.2831855f * 2.3283064365386963e-10f;
    float angle = __fmaf_rn(__uint2float_rn(second), step, step / 2.0f);
    float radius = __fsqrt_rn(-2.0f * logf(warpool_uniform(first)));
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    return make_float2(radius * sine, radius * cosine);
}
"#
    };
}

/// All kernels of generators.
pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "warpool generator",
    cuda: concat!(
        philox_cuda!(),
        r#"
#define DRAW unsigned long long n, const unsigned long long *slot, unsigned long long seed, unsigned long long offset
#define SUBSEQUENCE ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x)

// Stores four values: at once, if all of them are needed and the address is aligned.
template <typename One, typename Four>
static __device__ __forceinline__ void store(One *out, unsigned long long n, unsigned long long i, Four four) {
    if (i + 4 <= n && (unsigned long long)out % sizeof(Four) == 0) {
        *(Four *)(out + i) = four;
        return;
    }
    out[i] = four.x;
    if (i + 1 < n) out[i + 1] = four.y;
    if (i + 2 < n) out[i + 2] = four.z;
    if (i + 3 < n) out[i + 3] = four.w;
}

extern "C" __global__ void philox_bits(unsigned int *out, DRAW) {
    unsigned long long i = 4 * SUBSEQUENCE;
    if (i >= n) return;
    store(out, n, i, warpool_words(warpool_position(slot, seed, offset), i / 4));
}

extern "C" __global__ void philox_uniform(float *out, DRAW) {
    unsigned long long i = 4 * SUBSEQUENCE;
    if (i >= n) return;
    uint4 words = warpool_words(warpool_position(slot, seed, offset), i / 4);
    store(out, n, i, make_float4(
        warpool_uniform(words.x), warpool_uniform(words.y), warpool_uniform(words.z), warpool_uniform(words.w)));
}

extern "C" __global__ void philox_normal(float *out, DRAW) {
    unsigned long long i = 4 * SUBSEQUENCE;
    if (i >= n) return;
    uint4 words = warpool_words(warpool_position(slot, seed, offset), i / 4);
    float2 first = warpool_normals(words.x, words.y), second = warpool_normals(words.z, words.w);
    store(out, n, i, make_float4(first.x, first.y, second.x, second.y));
}

extern "C" __global__ void philox_dropout(unsigned char *out, DRAW, float keep) {
    unsigned long long i = 4 * SUBSEQUENCE;
    if (i >= n) return;
    uint4 words = warpool_words(warpool_position(slot, seed, offset), i / 4);
    store(out, n, i, make_uchar4(
        warpool_uniform(words.x) <= keep, warpool_uniform(words.y) <= keep,
        warpool_uniform(words.z) <= keep, warpool_uniform(words.w) <= keep));
}

extern "C" __global__ void philox_seed(unsigned long long *slot, unsigned long long seed, unsigned long long offset) {
    slot[0] = seed;
    slot[1] = offset;
}
"#
    ),
    host_kernels: &[
        HostKernel::new(BITS, bits),
        HostKernel::new(UNIFORM, uniform),
        HostKernel::new(NORMAL, normal),
        HostKernel::new(DROPOUT, dropout),
        HostKernel::new(SEED, seed),
    ],
};

pub(crate) const BITS: &str = "philox_bits";
pub(crate) const UNIFORM: &str = "philox_uniform";
pub(crate) const NORMAL: &str = "philox_normal";
pub(crate) const DROPOUT: &str = "philox_dropout";
/// Writes seed and offset into a slot, from its own arguments.
pub(crate) const SEED: &str = "philox_seed";

type KernelResult = Result<(), KernelFault>;

/// How many blocks of four numbers are computed before they are written.
const BLOCKS_AT_ONCE: u64 = 1 << 14;

fn bits(scope: &mut KernelScope<'_>) -> KernelResult {
    fill(scope, |words| words.map(u32::to_le_bytes))
}

fn uniform(scope: &mut KernelScope<'_>) -> KernelResult {
    fill(scope, |words| words.map(|word| philox::uniform(word).to_le_bytes()))
}

fn normal(scope: &mut KernelScope<'_>) -> KernelResult {
    fill(scope, |[a, b, c, d]| {
        let ([first, second], [third, fourth]) = (philox::normals(a, b), philox::normals(c, d));
        [first, second, third, fourth].map(f32::to_le_bytes)
    })
}

fn dropout(scope: &mut KernelScope<'_>) -> KernelResult {
    let keep = scope.arg_f32(5)?;
    fill(scope, |words| words.map(|word| [u8::from(philox::uniform(word) <= keep)]))
}

fn seed(scope: &mut KernelScope<'_>) -> KernelResult {
    let (slot, seed, offset) = (scope.arg_ptr(0)?, scope.arg_u64(1)?, scope.arg_u64(2)?);
    scope.write_u64(slot, &[seed, offset])
}

/// The common part of the fills: `four` converts the words of one block to values.
fn fill<const SIZE: usize>(scope: &mut KernelScope<'_>, four: impl Fn([u32; 4]) -> [[u8; SIZE]; 4]) -> KernelResult {
    let size = SIZE as u64;
    let (out, n) = (scope.arg_ptr(0)?, scope.arg_u64(1)?);
    let (seed, offset) = position(scope, 2)?;
    let mut at = 0;
    while at < n {
        let numbers = (n - at).min(4 * BLOCKS_AT_ONCE);
        let mut bytes: Vec<u8> = (at / 4..(at + numbers).div_ceil(4))
            .flat_map(|subsequence| four(philox::block(seed, subsequence, offset)))
            .flatten()
            .collect();
        bytes.truncate((numbers * size) as usize);
        scope.memory.write(out.offset(at * size), &bytes)?;
        at += numbers;
    }
    Ok(())
}

/// Seed and offset from the three arguments that start at `first`: `warpool_position` for host implementations of
/// kernels that draw numbers of a [`Reservation`](super::Reservation).
pub fn position(scope: &mut KernelScope<'_>, first: usize) -> Result<(u64, u64), KernelFault> {
    let (slot, seed, offset) = (scope.arg_ptr(first)?, scope.arg_u64(first + 1)?, scope.arg_u64(first + 2)?);
    if slot == DevicePtr(0) {
        return Ok((seed, offset));
    }
    let values = scope.read_u64(slot, 2)?;
    Ok((values[0], values[1].wrapping_add(offset)))
}
