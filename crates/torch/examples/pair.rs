//! The cost of a `warpool_malloc` and `warpool_free` pair through the shared object on the simulated GPU, relative to
//! an uncontended mutex.
//!
//! ```text
//! cargo build --release -p warpool-torch && cargo run --release -p warpool-torch --example pair
//! ```
//! Takes the path of the shared object; by default the one in cargo's target folder. The target is 20 mutexes.

use std::error::Error;
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use libloading::Library;

type Malloc = unsafe extern "C-unwind" fn(isize, c_int, *mut c_void) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);

const ROUNDS: usize = 25;
const PAIRS: u32 = 40_000;

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: the program has no other thread yet.
    unsafe { std::env::set_var("WARPOOL_DRIVER", "sim") };
    let path = std::env::args_os().nth(1).map_or_else(default_path, |path| Ok(path.into()))?;
    // SAFETY: the library has no initializers.
    let library = unsafe { Library::new(&path) }?;
    // SAFETY: the type is that of the header.
    let malloc: Malloc = *unsafe { library.get("warpool_malloc") }?;
    // SAFETY: the type is that of the header.
    let free: Free = *unsafe { library.get("warpool_free") }?;
    let pairs = |bytes: isize| {
        move || {
            // SAFETY: a null stream is the default stream.
            let ptr = unsafe { malloc(bytes, 0, null_mut()) };
            assert!(!black_box(ptr).is_null());
            // SAFETY: allocated above, and not used.
            unsafe { free(ptr, bytes, 0, null_mut()) };
        }
    };
    println!("{}", path.display());
    for (name, bytes) in [("512 B", 512), ("64 KiB", 64 << 10), ("8 MiB", 8 << 20), ("64 MiB", 64 << 20)] {
        let (mutex, pair) = compare(pairs(bytes));
        println!("pair of {name:>6}: {pair:6.1} ns, mutex {mutex:5.1} ns, ratio {:5.1}", pair / mutex);
    }
    let concurrent = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| round(pairs(64 << 10)))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum::<f64>() / 4.0
    });
    println!("pair of 64 KiB on 4 threads at once: {concurrent:6.1} ns");
    Ok(())
}

/// The fastest round of each, measured in turns, so that other load on the machine affects both.
fn compare(pair: impl Fn()) -> (f64, f64) {
    let mutex = Mutex::new(0_u64);
    let lock = || *black_box(&mutex).lock().expect("no panic") += 1;
    (0..ROUNDS)
        .map(|_| (round(lock), round(&pair)))
        .fold((f64::MAX, f64::MAX), |best, now| (best.0.min(now.0), best.1.min(now.1)))
}

/// Nanoseconds per call.
fn round(operation: impl Fn()) -> f64 {
    let begun = Instant::now();
    for _ in 0..PAIRS {
        operation();
    }
    begun.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
}

fn default_path() -> Result<PathBuf, Box<dyn Error>> {
    let example = std::env::current_exe()?;
    let profile = example.parent().and_then(|folder| folder.parent()).ok_or("the executable has no folder")?;
    Ok(profile.join("libwarpool_torch.so"))
}
