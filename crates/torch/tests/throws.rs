//! A failed `warpool_malloc` becomes a C++ exception where PyTorch's libraries are in the process. Here stand-ins for
//! them are: the same classes under the same names, compiled with whatever C++ compiler the machine has.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{compiler, crate_folder, has, run, scratch, shared_object, simulated};

fn source(name: &str) -> PathBuf {
    crate_folder().join("tests/c").join(name)
}

/// A shared object by the name that the loader knows PyTorch's by.
fn library(folder: &Path, name: &str, from: &str) -> PathBuf {
    let path = folder.join(name);
    run(compiler("c++")
        .args(["-std=c++17", "-O1", "-fPIC", "-shared"])
        .arg(format!("-Wl,-soname,{name}"))
        .arg(source(from))
        .arg("-o")
        .arg(&path));
    path
}

/// The program that catches, linked to the stand-in for libc10.so.
fn program(folder: &Path) -> Command {
    let c10 = library(folder, "libc10.so", "fake_c10.cpp");
    let path = folder.join("throws");
    run(compiler("c++")
        .args(["-std=c++17", "-O1"])
        .arg(source("throws.cpp"))
        .arg(&c10)
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .args(["-ldl", "-o"])
        .arg(&path));
    let mut command = simulated(&path);
    command.arg(shared_object());
    command
}

#[test]
fn lack_of_memory_has_its_own_type() {
    if !has("c++") {
        return;
    }
    let folder = scratch("throws");
    let mut program = program(&folder);
    let cuda = library(&folder, "libc10_cuda.so", "fake_c10_cuda.cpp");
    let output = run(program.arg("out_of_memory").arg(cuda));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all is well\n");
}

#[test]
fn without_the_type_it_is_an_error_like_others() {
    if !has("c++") {
        return;
    }
    let output = run(program(&scratch("throws_plain")).arg("plain"));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all is well\n");
}
