//! Links from a page to files outside of the book become links to the repository: the same text works in a checkout,
//! on a forge and in the book.

use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use mdbook_driver::book::{Book, Chapter};
use mdbook_driver::config::Config;
use mdbook_driver::errors::Result;
use mdbook_markdown::pulldown_cmark::{Event, Options, Parser, Tag};
use mdbook_preprocessor::{Preprocessor, PreprocessorContext};

/// The preprocessor.
#[derive(Debug)]
pub struct LinksOutside {
    /// The book's folder, relative to the repository.
    source: PathBuf,
    /// The address of a file of the repository is this and its path.
    repository: String,
}

impl LinksOutside {
    /// Reads the repository's address from the configuration of the book.
    pub fn new(root: &Path, source: &Path, config: &Config) -> Result<Self> {
        let address: Option<String> = config.get("output.html.git-repository-url")?;
        let address = address.ok_or_else(|| std::io::Error::other("book.toml has no git-repository-url"))?;
        let source = source.strip_prefix(root)?.to_owned();
        Ok(Self { source, repository: format!("{}/blob/main/", address.trim_end_matches('/')) })
    }

    /// The same text with other links.
    fn rewritten(&self, chapter: &Chapter) -> String {
        let Some(page) = &chapter.source_path else { return chapter.content.clone() };
        let page = self.source.join(page);
        let mut text = chapter.content.clone();
        // From the end, so that earlier positions stay.
        for (range, target) in targets(&chapter.content).into_iter().rev() {
            let Some(file) = self.outside(&page, &target) else { continue };
            let link = text[range.clone()].replacen(&target, &format!("{}{file}", self.repository), 1);
            text.replace_range(range, &link);
        }
        text
    }

    /// The path in the repository, with the anchor, if a link leaves the book.
    fn outside(&self, page: &Path, target: &str) -> Option<String> {
        if is_address(target) || target.starts_with('#') {
            return None;
        }
        let (file, anchor) = target.split_at(target.find('#').unwrap_or(target.len()));
        let file = joined(page.parent()?, file)?;
        (!file.starts_with(&self.source)).then(|| format!("{}{anchor}", file.display()))
    }
}

impl Preprocessor for LinksOutside {
    fn name(&self) -> &str {
        "links-outside"
    }

    fn run(&self, _: &PreprocessorContext, mut book: Book) -> Result<Book> {
        book.for_each_chapter_mut(|chapter| chapter.content = self.rewritten(chapter));
        Ok(book)
    }
}

/// Whether a link names another site.
pub fn is_address(target: &str) -> bool {
    ["http://", "https://", "mailto:"].iter().any(|scheme| target.starts_with(scheme))
}

/// A relative path from a folder, without `.` and `..`; `None` if it leaves the repository.
pub fn joined(folder: &Path, path: &str) -> Option<PathBuf> {
    let mut joined = PathBuf::new();
    for component in folder.join(path).components() {
        match component {
            Component::Normal(name) => joined.push(name),
            Component::ParentDir => joined.pop().then_some(())?,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(joined)
}

/// The links and images of a page: where the last part of each is, from its text on, and its target.
pub fn targets(text: &str) -> Vec<(Range<usize>, String)> {
    let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES | Options::ENABLE_STRIKETHROUGH;
    let events = Parser::new_ext(text, options).into_offset_iter();
    let links = events.filter_map(|(event, range)| match event {
        Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => Some((range, dest_url.into_string())),
        _ => None,
    });
    let links = links.map(|(range, target)| {
        // The text of a link may have its target, too: [docs/a.md](docs/a.md).
        let start = text[range.clone()].rfind("](").map_or(range.start, |at| range.start + at);
        (start..range.end, target)
    });
    links.collect()
}
