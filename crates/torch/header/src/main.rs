//! The C header of the shared object, generated from its functions. `.ci/run` checks that the committed header is up to
//! date:
//!
//! ```sh
//! cargo run --manifest-path crates/torch/header/Cargo.toml -- check   # exit status 1 if it is out of date
//! cargo run --manifest-path crates/torch/header/Cargo.toml -- write
//! ```

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = here.parent().expect("this folder is in the library's");
    let committed = library.join("include/warpool_torch.h");
    let generated = generate(library, &here.join("cbindgen.toml"));
    match std::env::args().nth(1).as_deref() {
        Some("check") if std::fs::read(&committed).is_ok_and(|text| text == generated) => ExitCode::SUCCESS,
        Some("check") => {
            eprintln!("{} is out of date: run this with `write`", committed.display());
            ExitCode::FAILURE
        }
        Some("write") => {
            std::fs::write(&committed, generated).expect("the header can be written");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("usage: warpool-torch-header check | write");
            ExitCode::from(2)
        }
    }
}

fn generate(library: &Path, config: &Path) -> Vec<u8> {
    let config = cbindgen::Config::from_file(config).expect("a configuration");
    let files = [
        "torch_pool",
        "abi/library",
        "abi/memory",
        "abi/stats",
        "abi/history",
        "abi/settings",
        "abi/pools",
        "abi/blocks",
        "abi/device_stats",
        "abi/snapshot",
        "abi/observers",
        "abi/checkpoints",
        "abi/pinned",
        "abi/pinned_history",
        "abi/sharing",
        "abi/sleep",
        "abi/elastic",
        "recorder/python",
        "abi/recorder",
        "abi/account",
    ];
    let builder = files.iter().fold(cbindgen::Builder::new().with_config(config), |builder, file| {
        builder.with_src(library.join(format!("src/{file}.rs")))
    });
    let mut header = Vec::new();
    builder.generate().expect("a header").write(&mut header);
    header
}
