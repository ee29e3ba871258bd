//! The shared object against a CUDA driver in C, with libraries that find its functions in each of the ways that
//! libraries do. The sums are exact: the driver counts its own memory.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

const MIB: i64 = 1 << 20;
const CONTEXT: i64 = 500 * MIB;

/// The shared object that cargo built for this test, in the folder of the test or above it.
fn shared_object() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let deps = test.parent().expect("a test lies in a folder");
    let found = [deps, deps.parent().expect("target/<profile>/deps")]
        .map(|folder| folder.join("libwarpool_inject.so"))
        .into_iter()
        .find(|path| path.exists());
    found.unwrap_or_else(|| panic!("libwarpool_inject.so is neither in {} nor above it", deps.display()))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
    output
}

/// The folder with the driver, the libraries and the program; `None` without a C compiler, which is said.
fn built() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        if !Command::new("cc").arg("--version").output().is_ok_and(|output| output.status.success()) {
            // Not `eprintln`, which is captured in a test that passes.
            let _ = writeln!(io::stderr(), "\n!!! NOT CHECKED: cc is not installed, so this test did nothing !!!\n");
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("inject");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder for this test");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
        let library = |file: &str, source: &str, options: &[&str]| {
            let mut compiler = Command::new("cc");
            compiler.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]);
            compiler.arg(sources.join(source)).arg(format!("-Wl,-soname,{file}")).arg("-o").arg(folder.join(file));
            run(compiler.arg("-L").arg(&folder).args(options));
        };
        library("libcuda.so.1", "fake_cuda.c", &[]);
        library("libnvidia-ml.so.1", "fake_cuda.c", &["-DNVML", "-ldl"]);
        let runtime = ["-DLIBRARY=runtime", "-DROUTE=3", "-DRUNTIME", "-ldl"];
        library("libcudart.so.13", "library.c", &runtime);
        library("libcublas.so.13", "library.c", &["-DLIBRARY=cublas", "-DROUTE=1", "-l:libcuda.so.1"]);
        library("libcudnn.so.9", "library.c", &["-DLIBRARY=cudnn", "-DROUTE=2", "-ldl"]);
        library("libnccl.so.2", "library.c", &["-DLIBRARY=nccl", "-DROUTE=3", "-ldl"]);
        library("libtorch_cuda.so", "library.c", &["-DLIBRARY=torch", "-DROUTE=4", "-l:libcudart.so.13"]);
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]).arg(sources.join("program.c"));
        compiler.arg("-L").arg(&folder).args(["-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]);
        compiler.args(["-l:libcublas.so.13", "-l:libcudnn.so.9", "-l:libnccl.so.2", "-l:libtorch_cuda.so"]);
        run(compiler.args(["-l:libcudart.so.13", "-ldl", "-o"]).arg(folder.join("program")));
        Some(folder)
    };
    FOLDER.get_or_init(build).as_deref()
}

/// A program of these steps.
fn program(folder: &Path, steps: &str) -> Command {
    let mut command = Command::new(folder.join("program"));
    command.args(steps.split_whitespace()).env("LD_LIBRARY_PATH", folder).env("LD_PRELOAD", shared_object());
    command.env_remove("WARPOOL_ACCOUNT_DIR");
    command
}

/// What was counted on the only device.
fn device(text: &str) -> Value {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    value["devices"][0].clone()
}

/// Bytes by owner and kind, without those of nothing; their sum is what the device has in use.
fn rows(device: &Value, rows: &Value) -> BTreeMap<String, i64> {
    let entry = |row: &Value| {
        let name = format!("{} {}", row["owner"].as_str().unwrap(), row["kind"].as_str().unwrap());
        (name, row["bytes"].as_i64().unwrap())
    };
    let found: BTreeMap<String, i64> = rows.as_array().unwrap().iter().map(entry).filter(|row| row.1 != 0).collect();
    assert_eq!(found.len(), rows.as_array().unwrap().iter().filter(|row| row["bytes"] != 0).count(), "{device}");
    found
}

/// Runs the steps; returns what was counted at the end, of which the sum must be what the driver has.
fn counted(steps: &str) -> Option<BTreeMap<String, i64>> {
    let output = run(&mut program(built()?, &format!("{steps} show")));
    let device = device(&String::from_utf8_lossy(&output.stdout));
    let found = rows(&device, &device["rows"]);
    assert_eq!(found.values().sum::<i64>(), device["used"].as_i64().unwrap(), "{device}");
    Some(found)
}

fn expected(rows: &[(&str, i64)]) -> BTreeMap<String, i64> {
    rows.iter().map(|&(name, mib)| (name.to_owned(), mib * MIB)).collect()
}

/// Linked to the driver, by dlsym, by cuGetProcAddress, and through a runtime.
#[test]
fn each_way_to_the_driver_is_seen_and_has_its_owner() {
    let steps = "context cublas take 10 cudnn take 20 nccl take 31 torch take 40 next";
    let Some(found) = counted(steps) else { return };
    let rows = [
        ("CUDA context", 500),
        ("cuBLAS allocations", 10),
        ("cuDNN allocations", 20),
        // As the driver rounds it.
        ("NCCL allocations", 32),
        ("PyTorch allocations", 40),
    ];
    assert_eq!(found, expected(&rows));
}

#[test]
fn what_is_freed_or_refused_is_not_counted() {
    let Some(found) = counted("context cublas take 10 cublas give torch take 8 torch give refused create 50 uncreate")
    else {
        return;
    };
    assert_eq!(found, expected(&[("CUDA context", 500)]));
}

/// Small allocations share pages of 2 MiB: of the first that took one and the last that gave it back, neither owns it.
#[test]
fn small_allocations_share_the_drivers_pages() {
    let Some(found) = counted("context cublas small 100 cudnn small 10") else { return };
    let (cublas, cudnn) = (100 * 1024, 10 * 1024);
    let rows = [
        ("CUDA context", CONTEXT),
        ("CUDA overhead", 2 * MIB - cublas - cudnn),
        ("cuBLAS allocations", cublas),
        ("cuDNN allocations", cudnn),
    ];
    assert_eq!(found, rows.map(|(name, bytes)| (name.to_owned(), bytes)).into());
}

/// Kernels are loaded by their first launch, whose eleven arguments arrive.
#[test]
fn contexts_modules_kernels_and_graphs_are_measured() {
    let steps = "context torch launch 3 torch launch 3 cublas launch 4 cudnn launch 5 nccl launch 5 module graph";
    let Some(found) = counted(steps) else { return };
    let rows = [
        ("CUDA context", 500),
        ("PyTorch modules", 4),
        ("cuBLAS modules", 4),
        ("cuDNN modules", 4),
        ("the program graphs", 6),
        ("the program modules", 10),
    ];
    assert_eq!(found, expected(&rows));
    let Some(found) = counted("context graph ungraph") else { return };
    assert_eq!(found, expected(&[("CUDA context", 500)]));
}

#[test]
fn pools_are_asked_for_what_they_have() {
    let Some(found) = counted("context async 100 cublas take 2 create 50") else { return };
    let rows = [("CUDA context", 500), ("CUDA pools", 128), ("cuBLAS allocations", 2), ("the program allocations", 50)];
    assert_eq!(found, expected(&rows));
}

#[test]
fn threads_count_nothing_twice() {
    for _ in 0..5 {
        let Some(found) = counted("context threads") else { return };
        let kernels: i64 = found.iter().filter(|(name, _)| name.ends_with(" modules")).map(|(_, bytes)| bytes).sum();
        let rounding = found.get("CUDA overhead").copied().unwrap_or(0);
        // Where calls overlap, what the driver took may be counted as the other's.
        assert_eq!(kernels + rounding, 50 * 4 * MIB, "{found:?}");
        for owner in ["cuBLAS", "cuDNN", "NCCL", "PyTorch"] {
            assert_eq!(found[&format!("{owner} allocations")], 8 * MIB, "{found:?}");
        }
    }
}

#[test]
fn a_forked_child_only_passes_through() {
    let Some(found) = counted("context fork cublas take 4") else { return };
    assert_eq!(found, expected(&[("CUDA context", 500), ("cuBLAS allocations", 4)]));
}

/// What others have is not this process's, whether it was there before or came later.
#[test]
fn other_processes_are_not_counted() {
    let Some(folder) = built() else { return };
    let mut command = program(folder, "context cublas take 10 others 700 cublas take 10 others 0 show");
    let output = run(command.env("FAKE_OTHERS_MIB", "300"));
    let device = device(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(device["before"], 300 * MIB);
    let found = rows(&device, &device["rows"]);
    assert_eq!(found, expected(&[("CUDA context", 500), ("cuBLAS allocations", 20)]));
}

/// Without NVIDIA's management library nobody knows what a context takes of what is in use.
#[test]
fn without_the_management_library_the_context_is_with_the_others() {
    let Some(folder) = built() else { return };
    let mut command = program(folder, "context cublas take 10 show");
    let output = run(command.env("FAKE_OTHERS_MIB", "300").env("FAKE_NO_NVML", "1"));
    let device = device(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(device["before"], Value::Null);
    let found = rows(&device, &device["rows"]);
    assert_eq!(found, expected(&[("CUDA context_and_others", 800), ("cuBLAS allocations", 10)]));
}

#[test]
fn the_file_has_the_moment_when_most_was_in_use() {
    let Some(folder) = built() else { return };
    let accounts = folder.join("accounts");
    let _ = std::fs::remove_dir_all(&accounts);
    std::fs::create_dir_all(&accounts).unwrap();
    let mut command = program(folder, "context cublas take 100 cublas give fork nccl take 4");
    run(command.env("WARPOOL_ACCOUNT_DIR", &accounts));
    let files: Vec<PathBuf> = std::fs::read_dir(&accounts).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "of the child there is none: {files:?}");
    let device = device(&std::fs::read_to_string(&files[0]).unwrap());
    let most = rows(&device, &device["most"]["rows"]);
    assert_eq!(most, expected(&[("CUDA context", 500), ("cuBLAS allocations", 100)]));
    let end = rows(&device, &device["rows"]);
    assert_eq!(end, expected(&[("CUDA context", 500), ("NCCL allocations", 4)]));
}

/// What a released context had is gone.
#[test]
fn a_released_context_takes_its_memory_with_it() {
    let Some(folder) = built() else { return };
    let output = run(&mut program(folder, "context cublas take 10 torch launch 1 release context nccl take 4 show"));
    let device = device(&String::from_utf8_lossy(&output.stdout));
    let found = rows(&device, &device["rows"]);
    assert_eq!(found, expected(&[("CUDA context", 500), ("NCCL allocations", 4)]));
}

/// A program that does not use CUDA notices nothing.
#[test]
fn other_programs_run_as_before() {
    if built().is_none() {
        return;
    }
    let output = run(Command::new("cc").arg("--version").env("LD_PRELOAD", shared_object()));
    assert!(!output.stdout.is_empty() && output.stderr.is_empty());
}
