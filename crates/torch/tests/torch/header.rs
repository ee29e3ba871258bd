//! The exported symbols are exactly those of `exports.txt`, and the header has them. `.ci/run` compares the header with
//! the code (`crates/torch/header`).

use std::fs;
use std::path::Path;

use object::{Object as _, ObjectSymbol as _};

use crate::shared_object::{crate_folder, shared_object};

#[test]
fn the_header_declares_every_symbol_of_the_list() {
    let header = fs::read_to_string(crate_folder().join("include/warpool_torch.h")).expect("the header");
    for symbol in listed() {
        assert!(header.contains(&format!("{symbol}(")), "{symbol} is not in the header");
    }
}

#[test]
fn exported_symbols_are_those_of_the_list() {
    let exported = exported(&shared_object());
    assert_eq!(exported, listed(), "exports.txt and libwarpool_torch.so differ");
}

fn listed() -> Vec<String> {
    let list = fs::read_to_string(crate_folder().join("exports.txt")).expect("the list");
    list.lines().map(str::to_owned).collect()
}

fn exported(path: &Path) -> Vec<String> {
    let content = fs::read(path).expect("the shared object");
    let file = object::File::parse(&*content).expect("an ELF file");
    let defined = file.dynamic_symbols().filter(|symbol| symbol.is_definition() && symbol.is_global());
    let mut names: Vec<String> = defined.map(|symbol| symbol.name().expect("a name").to_owned()).collect();
    names.sort_unstable();
    names
}
