//! A failed `warpool_malloc` becomes a C++ exception if PyTorch's libraries are loaded. Here stand-ins with the same
//! class names are loaded, compiled with the machine's C++ compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shared_object::{compiler, crate_folder, has, passed, run, scratch, shared_object, simulated};

fn source(name: &str) -> PathBuf {
    crate_folder().join("tests/torch/c").join(name)
}

/// A shared object with the soname of PyTorch's.
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

/// The program that catches the exceptions, linked to the stand-in for libc10.so.
fn program(folder: &Path) -> Command {
    let c10 = library(folder, "libc10.so", "fake_c10.cpp");
    let path = folder.join("exceptions");
    run(compiler("c++")
        .args(["-std=c++17", "-O1"])
        .arg(source("exceptions.cpp"))
        .arg(&c10)
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .args(["-ldl", "-o"])
        .arg(&path));
    let mut command = simulated(&path);
    command.arg(shared_object());
    command
}

#[test]
fn out_of_memory_has_its_own_type() {
    if !has("c++") {
        return;
    }
    let folder = scratch("exceptions");
    let mut program = program(&folder);
    let cuda = library(&folder, "libc10_cuda.so", "fake_c10_cuda.cpp");
    passed(program.arg("out_of_memory").arg(cuda));
}

#[test]
fn out_of_memory_without_the_type_is_a_plain_error() {
    if !has("c++") {
        return;
    }
    passed(program(&scratch("exceptions_plain")).arg("plain"));
}
