//! The committed header is the generated one, and the exported symbols are exactly those of `exports.txt`.

use std::fs;
use std::path::Path;

use object::{Object as _, ObjectSymbol as _};

use crate::shared_object::{crate_folder, shared_object};

/// If set, the header is written instead of compared.
const WRITE: &str = "WARPOOL_WRITE_HEADER";

#[test]
fn committed_header_is_up_to_date() {
    let config = cbindgen::Config::from_file(crate_folder().join("cbindgen.toml")).expect("a configuration");
    let mut builder = cbindgen::Builder::new().with_config(config).with_src(crate_folder().join("src/torch_pool.rs"));
    for name in ["library", "memory", "stats", "history", "settings", "pools"] {
        builder = builder.with_src(crate_folder().join(format!("src/abi/{name}.rs")));
    }
    let mut generated = Vec::new();
    builder.generate().expect("a header").write(&mut generated);
    let generated = String::from_utf8(generated).expect("a header is text");
    let path = crate_folder().join("include/warpool_torch.h");
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, &generated).expect("a header that can be written");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == generated, "include/warpool_torch.h is out of date: run this test with {WRITE}=1");
    for symbol in listed() {
        assert!(generated.contains(&format!("{symbol}(")), "{symbol} is not in the header");
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
