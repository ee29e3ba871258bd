//! Many recordings as one page: a heat map of ranks over time, and with `--pages` the page of each beside it.

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use serde_json::json;
use warpool_report::ranks::{Link, object, page};
use warpool_trace::explain::{ExplainOptions, Frameworks};
use warpool_trace::ranks::{RankRow, Ranks};

use super::{Args, make};
use crate::inputs::in_parallel_on;
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::ranks;
use crate::size;

/// The title, and the name where none is given.
const NAME: &str = "ranks";

pub(super) fn run(args: &Args, files: &[PathBuf], quiet: bool, output: &mut Output) -> Result<Verdict> {
    if args.device.is_some() {
        return Err(CommandError::Usage("--device is for one recording".to_owned()));
    }
    let to = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{NAME}.html")));
    let options = ExplainOptions {
        capacity: args.capacity.bytes(),
        frameworks: Frameworks::default().with(&args.framework),
        ..ExplainOptions::default()
    };
    let ranks = Ranks::new(ranks::summaries(files, args.jobs, args.memory_limit, &options, quiet)?);
    let (links, mut failed) = match args.pages {
        true => pages(args, &ranks, &to, quiet)?,
        false => (Vec::new(), Vec::new()),
    };
    let title = match args.files.as_slice() {
        [one] => one.to_string_lossy().into_owned(),
        _ => NAME.to_owned(),
    };
    let bytes = page(&title, &ranks, &links).write(&to).map_err(CommandError::Usage)?;
    let mut report = object(&ranks);
    report["page"] = json!(to.to_string_lossy());
    report["page_bytes"] = json!(bytes);
    report["pages"] = json!(links.iter().flatten().count());
    output.object(&report)?;
    output.line(format!("{}: {}", output::printable(&to.display().to_string()), size::format(bytes)))?;
    if !quiet {
        output.line("Open it in a browser.")?;
    }
    if let Err(CommandError::Usage(message)) = ranks::verdict(&ranks) {
        failed.insert(0, message);
    }
    match failed.is_empty() {
        true => Ok(Verdict::Success),
        false => Err(CommandError::Usage(failed.join("\nwarpool: "))),
    }
}

/// The pages of all that can be read, in a folder with the name of the heat map. Devices of one file share a page.
fn pages(args: &Args, ranks: &Ranks, to: &Path, quiet: bool) -> Result<(Vec<Link>, Vec<String>)> {
    let folder = to.with_extension("");
    if folder == to {
        return Err(CommandError::Usage(format!("{}: --pages needs a page with an ending, .html", to.display())));
    }
    let wrong = |error| CommandError::Usage(format!("cannot make the folder {}: {error}", folder.display()));
    std::fs::create_dir_all(&folder).map_err(wrong)?;
    let mut files: Vec<PathBuf> = Vec::new();
    let mut names: Vec<String> = Vec::new();
    for row in ranks.rows.iter().filter(|row| row.figures().is_some()) {
        let file = PathBuf::from(&row.summary.file);
        if !files.contains(&file) {
            names.push(page_name(files.len(), row));
            files.push(file);
        }
    }
    let gate = args.jobs.gate(files.len());
    let work = |file: &Path, bar: &ProgressBar| {
        let at = files.iter().position(|it| it == file).unwrap_or(0);
        let one = |limit| {
            let (page, _) = make(file, &names[at], args, Some(limit), bar)?;
            page.write(&folder.join(&names[at])).map(drop)
        };
        match args.memory_limit {
            Some(limit) => one(limit),
            None => gate.within(one, |error: &String| error.contains("--memory-limit")),
        }
    };
    let mut written = vec![false; files.len()];
    let mut failed = Vec::new();
    in_parallel_on(args.jobs.jobs(files.len()), &files, quiet, work, |index, result| {
        match result {
            Ok(()) => written[index] = true,
            Err(error) => failed.push(output::printable(&error)),
        }
        Ok(())
    })?;
    let folder = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let link = |row: &RankRow| {
        let at = files.iter().position(|file| file.to_string_lossy() == row.summary.file)?;
        written[at].then(|| format!("{}/{}", encoded(&folder), names[at]))
    };
    Ok((ranks.rows.iter().map(link).collect(), failed))
}

/// A name of letters, digits and hyphens.
fn page_name(number: usize, row: &RankRow) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let name: String = row.name.chars().map(plain).collect();
    format!("{number:04}-{name}.html")
}

/// A folder's name in an address.
fn encoded(name: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    name.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_encoded() {
        assert_eq!(encoded("job 7/%é"), "job%207%2F%25%C3%A9");
        assert_eq!(encoded("ranks_1.x-2"), "ranks_1.x-2");
    }
}
