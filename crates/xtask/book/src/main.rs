//! Builds the book of `docs/` and checks its links; `scripts/book` runs it.
//!
//! ```sh
//! cargo run --manifest-path crates/xtask/book/Cargo.toml -- OUT
//! ```
//!
//! The book fails to build if mdBook warns of anything, if a page of `docs/` is in no chapter, or if a link of the
//! pages, or of another Markdown file of the repository, names a file or a heading that does not exist. Links to pages
//! outside of `docs/` become links to the repository. Addresses of other sites are not visited.
//!
//! Exit status: 0, 1 if a check fails, 2 on bad usage or an unreadable file.

mod links;
mod outside;
mod pages;
mod warnings;

use std::path::Path;
use std::process::ExitCode;

use mdbook_driver::MDBook;
use mdbook_driver::errors::Result;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).expect("crates/xtask/book is three down");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [out] = arguments.as_slice() else {
        eprintln!("usage: warpool-book OUT");
        return ExitCode::from(2);
    };
    let warnings = warnings::collect();
    let problems = match build(root, Path::new(out)) {
        Ok(problems) => problems,
        Err(error) => {
            eprintln!("{error:?}");
            return ExitCode::from(2);
        }
    };
    let problems: Vec<String> = warnings.take().into_iter().chain(problems).collect();
    problems.iter().for_each(|problem| eprintln!("{problem}"));
    if problems.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("{} problems in the book", problems.len());
    ExitCode::FAILURE
}

/// Writes the pages and returns what is wrong with them.
fn build(root: &Path, out: &Path) -> Result<Vec<String>> {
    let mut book = MDBook::load(root)?;
    let out = std::path::absolute(out)?;
    book.config.build.build_dir = out.clone();
    let chapters: Vec<_> = book.book.chapters().filter_map(|chapter| chapter.source_path.clone()).collect();
    book.with_preprocessor(outside::LinksOutside::new(root, &book.source_dir(), &book.config)?);
    book.build()?;

    let mut problems = pages::without_chapter(&book.source_dir(), &chapters)?;
    let markdown = pages::tracked(root, "*.md")?;
    problems.extend(links::in_sources(root, &markdown)?);
    let (count, broken) = links::in_pages(&out)?;
    problems.extend(broken);
    println!("{} chapters, {count} links in {}", chapters.len(), out.display());
    Ok(problems)
}
