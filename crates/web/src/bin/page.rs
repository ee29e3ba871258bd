//! Puts the page for the browser together: the files of `web/` with what depends on the build, the module, and an
//! example recording. `scripts/web` calls it. The folder that it writes can be served by any web server.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};
use warpool_report::view::inline_sources;

/// All files together, each compressed with gzip as servers do, may have this many bytes. The example is not counted.
const BYTES_MAX: usize = 3_000_000;

/// The page itself.
const SOURCES: [&str; 8] =
    ["index.html", "style.css", "icon.svg", "main.js", "job.js", "answer.js", "worker.js", "offline.js"];
const MODULE: &str = "warpool.wasm";
const EXAMPLE: &str = "example.pickle.xz";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [sources, module, example, to] = arguments.as_slice() else {
        eprintln!("usage: warpool-web-page SOURCES MODULE EXAMPLE FOLDER: scripts/web knows them");
        return ExitCode::from(2);
    };
    match build(Path::new(sources), Path::new(module), Path::new(example), Path::new(to)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("warpool-web-page: {message}");
            ExitCode::FAILURE
        }
    }
}

fn build(sources: &Path, module: &Path, example: &Path, to: &Path) -> Result<(), String> {
    let mut files: Vec<(&str, Vec<u8>)> = vec![(MODULE, read(module)?), (EXAMPLE, read(example)?)];
    for name in SOURCES {
        files.push((name, read(&sources.join(name))?));
    }
    let [script, style] = inline_sources();
    replace(&mut files, "index.html", "{viewer-script}", &hash(&script))?;
    replace(&mut files, "index.html", "{viewer-style}", &hash(&style))?;
    let names: Vec<&str> = files.iter().map(|&(name, _)| name).collect();
    // The page is asked for by the name of the folder, too.
    replace(&mut files, "offline.js", "{files}", &format!("./ {}", names.join(" ")))?;
    let version = version(&files);
    replace(&mut files, "offline.js", "{version}", &version)?;

    fs::create_dir_all(to).map_err(|error| format!("{}: {error}", to.display()))?;
    let mut all = 0;
    for (name, bytes) in &files {
        let path = to.join(name);
        fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        let compressed = compressed_bytes(bytes);
        println!("{name:20} {:>9} bytes, {compressed:>9} compressed", bytes.len());
        all += if *name == EXAMPLE { 0 } else { compressed };
    }
    println!("the page, without the example: {all} bytes compressed, at most {BYTES_MAX}");
    match all <= BYTES_MAX {
        true => Ok(()),
        false => Err(format!("the page has {all} bytes compressed; it may have {BYTES_MAX}")),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Replaces the marker, which the file must have.
fn replace(files: &mut [(&str, Vec<u8>)], name: &str, marker: &str, text: &str) -> Result<(), String> {
    let file = files.iter_mut().find(|(file, _)| *file == name);
    let (_, bytes) = file.ok_or_else(|| format!("there is no {name}"))?;
    let before = String::from_utf8(std::mem::take(bytes)).map_err(|error| format!("{name}: {error}"))?;
    if !before.contains(marker) {
        return Err(format!("{name} has no {marker}"));
    }
    *bytes = before.replace(marker, text).into_bytes();
    Ok(())
}

/// The source expression that allows an inline script or style with this text.
fn hash(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text.as_bytes())))
}

/// A name of this build: of what all its files contain.
fn version(files: &[(&str, Vec<u8>)]) -> String {
    let mut all = Sha256::new();
    for (name, bytes) in files {
        all.update(name.as_bytes());
        all.update((bytes.len() as u64).to_le_bytes());
        all.update(bytes);
    }
    all.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn compressed_bytes(bytes: &[u8]) -> usize {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("memory takes all").len()
}
