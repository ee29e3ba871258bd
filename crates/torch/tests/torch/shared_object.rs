//! Helpers for the tests of the shared object: its path, compilers, and running programs with it.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The shared object that cargo built for this test, in the folder of the test or above it.
pub fn shared_object() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let deps = test.parent().expect("a test lies in a folder");
    let found = [deps, deps.parent().expect("target/<profile>/deps")]
        .map(|folder| folder.join("libwarpool_torch.so"))
        .into_iter()
        .find(|path| path.exists());
    found.unwrap_or_else(|| panic!("libwarpool_torch.so is neither in {} nor above it", deps.display()))
}

/// An empty folder for one test.
pub fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder for this test");
    folder
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
    output
}

/// Runs a test program, which must succeed and print "passed".
pub fn passed(program: &mut Command) -> Output {
    let output = run(program);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "passed\n");
    output
}

/// Whether the compiler is installed. If not, prints that the test checks nothing.
pub fn has(compiler: &str) -> bool {
    let installed = Command::new(compiler).arg("--version").output().is_ok_and(|output| output.status.success());
    if !installed {
        // Not `eprintln`, which is captured in a test that passes.
        let _ =
            writeln!(io::stderr(), "\n!!! NOT CHECKED: {compiler} is not installed, so this test did nothing !!!\n");
    }
    installed
}

/// A compiler command that finds the header.
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
    let pages = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pages");
    command.env("WARPOOL_DRIVER", "sim").env("WARPOOL_PAGES", pages);
    command
}
