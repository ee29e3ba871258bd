//! Checks of the source tree that the compiler does not make. `.ci/run` runs them all:
//!
//! ```sh
//! cargo run -p xtask -- modules        # imports between the modules of a crate form no circle
//! cargo run -p xtask -- width          # lines of code and prose within 120 columns
//! cargo run -p xtask -- compile-fail   # examples that must not compile fail for the reason that they name
//! cargo run -p xtask -- reference      # the book's pages of errors and C functions are those of the code; --write
//! cargo run -p xtask -- examples       # every public item of warpool and driver belongs to an example
//! cargo run -p xtask -- defects        # each planted defect is caught by tests and by soak; --short: as CI does it
//! ```
//!
//! Exit status: 0, 1 if a check fails, 2 on bad usage or an unreadable file.

mod circles;
mod compile_fail;
mod defects;
mod examples;
mod imports;
mod reference;
mod tracked;
mod tree;
mod width;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/xtask is two folders down");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let found = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["modules"] => modules(root),
        ["width"] => width::check(root),
        ["compile-fail"] => compile_fail::check(root),
        ["reference"] => reference::check(root, false),
        ["reference", "--write"] => reference::check(root, true),
        ["examples"] => examples::check(root),
        ["defects", options @ ..] => match defects::Options::parse(options) {
            Some(options) => defects::check(root, &options),
            None => Err("usage: xtask defects [--short] [--soak-seconds N] [--only NUMBER[-LAST]] [--jobs N]
                     [--prepare FOLDER | --from FOLDER]"
                .to_owned()),
        },
        _ => {
            eprintln!("usage: cargo run -p xtask -- modules | width | compile-fail | reference | examples | defects");
            return ExitCode::from(2);
        }
    };
    match found {
        Ok(problems) if problems.is_empty() => ExitCode::SUCCESS,
        Ok(problems) => {
            problems.iter().for_each(|problem| eprintln!("{problem}"));
            eprintln!("{} problems", problems.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Every circle of imports, over all crates.
fn modules(root: &Path) -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for source in sources(root)? {
        let tree = tree::Tree::read(&source)?.relative_to(root);
        let imports = imports::between_siblings(&tree);
        let name = source.strip_prefix(root).unwrap_or(&source).display().to_string();
        println!("{name}: {} modules, {} imports between siblings", tree.modules.len(), imports.len());
        problems.extend(circles::find(&imports).into_iter().map(|circle| format!("{name}: {circle}")));
    }
    Ok(problems)
}

/// The root file of every crate: `lib.rs`, or `main.rs` where there is no library.
fn sources(root: &Path) -> Result<Vec<PathBuf>, String> {
    let crates = root.join("crates");
    let entries = std::fs::read_dir(&crates).map_err(|error| format!("{}: {error}", crates.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| {
            let source = entry.ok()?.path().join("src");
            ["lib.rs", "main.rs"].into_iter().map(|file| source.join(file)).find(|path| path.is_file())
        })
        .collect();
    found.sort();
    Ok(found)
}
