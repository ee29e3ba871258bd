//! What the tests of the shared object need: where it is, and a C compiler.
// Not `expect`: what is unused differs from one test binary to the next.
#![allow(clippy::allow_attributes, dead_code, reason = "each test binary uses its own part of this")]

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of the crate.
pub fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The shared object that cargo built for this test: beside the test itself.
pub fn shared_object() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let deps = test.parent().expect("a test lies in a folder");
    let found = [deps, deps.parent().expect("target/<profile>/deps")]
        .map(|folder| folder.join("libwarpool_torch.so"))
        .into_iter()
        .find(|path| path.exists());
    found.unwrap_or_else(|| panic!("libwarpool_torch.so is neither in {} nor above it", deps.display()))
}

/// A folder of its own, empty.
pub fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder for this test");
    folder
}

/// Runs a command that must work.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
    output
}

/// Whether there is such a compiler. The tests need one; without it nothing of what they are about was checked, and
/// that is said.
pub fn has(compiler: &str) -> bool {
    let there = Command::new(compiler).arg("--version").output().is_ok_and(|output| output.status.success());
    if !there {
        // Not by `eprintln`, which nobody sees of a test that passes.
        let _ =
            writeln!(io::stderr(), "\n!!! NOT CHECKED: there is no {compiler} here, so this test did nothing !!!\n");
    }
    there
}

/// A compiler with the header at hand.
pub fn compiler(name: &str) -> Command {
    let mut command = Command::new(name);
    command.args(["-Wall", "-Wextra", "-Werror", "-g", "-pthread"]).arg("-I").arg(crate_folder().join("include"));
    command
}

/// A program in a clean environment, on the simulated GPU.
pub fn simulated(program: &Path) -> Command {
    let mut command = Command::new(program);
    for variable in ["WARPOOL_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "WARPOOL_SIM"] {
        command.env_remove(variable);
    }
    command.env("WARPOOL_DRIVER", "sim");
    command
}
