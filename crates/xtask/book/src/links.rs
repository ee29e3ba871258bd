//! Links: in the Markdown files of the repository, as a forge shows them, and in the pages of the book, as mdBook wrote
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use mdbook_driver::errors::Result;
use mdbook_markdown::pulldown_cmark::{Event, Parser, Tag, TagEnd};

use crate::outside::{is_address, joined, targets};

/// Links of Markdown files, relative to `root`, that name nothing.
pub fn in_sources(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let mut headings: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(root.join(file))?;
        for (range, target) in targets(&text).into_iter().filter(|(_, target)| !is_address(target)) {
            let line = text[..range.start].lines().count().max(1);
            let place = format!("{}:{line}: the link to {target}", file.display());
            let (path, anchor) = target.split_once('#').map_or((&*target, None), |(path, anchor)| (path, Some(anchor)));
            let folder = file.parent().unwrap_or(Path::new(""));
            let named = if path.is_empty() { Some(file.clone()) } else { joined(folder, path) };
            let Some(named) = named.filter(|named| root.join(named).exists()) else {
                problems.push(format!("{place}: there is no such file"));
                continue;
            };
            let Some(anchor) = anchor else { continue };
            if !headings.contains_key(&named) {
                headings.insert(named.clone(), slugs(&std::fs::read_to_string(root.join(&named))?));
            }
            if !headings[&named].contains(anchor) {
                problems.push(format!("{place}: {} has no such heading", named.display()));
            }
        }
    }
    Ok(problems)
}

/// The anchors of a file's headings, as forges make them.
fn slugs(text: &str) -> BTreeSet<String> {
    let mut slugs = BTreeSet::new();
    let mut heading: Option<String> = None;
    for event in Parser::new(text) {
        match (event, &mut heading) {
            (Event::Start(Tag::Heading { .. }), _) => heading = Some(String::new()),
            (Event::Text(part) | Event::Code(part), Some(title)) => title.push_str(&part),
            (Event::SoftBreak, Some(title)) => title.push(' '),
            (Event::End(TagEnd::Heading(_)), _) => {
                let slug = slug(&heading.take().unwrap_or_default());
                let repeated = (1..).map(|number| format!("{slug}-{number}"));
                let free = std::iter::once(slug.clone()).chain(repeated).find(|slug| !slugs.contains(slug));
                slugs.extend(free);
            }
            _ => {}
        }
    }
    slugs
}

fn slug(title: &str) -> String {
    let kept = title.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

/// How many links the pages have, and those that name no file or no element.
pub fn in_pages(out: &Path) -> Result<(usize, Vec<String>)> {
    let mut pages = BTreeMap::new();
    read(out, Path::new(""), &mut pages)?;
    // These two show parts of the others again.
    let shown = pages.iter().filter(|(name, _)| !["print.html", "toc.html"].iter().any(|other| name.ends_with(other)));
    let (mut count, mut problems) = (0, Vec::new());
    for (name, page) in shown {
        for target in page.targets.iter().filter(|target| !is_address(target) && !target.starts_with("data:")) {
            count += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let folder = name.parent().unwrap_or(Path::new(""));
            let named = if path.is_empty() { Some(name.clone()) } else { joined(folder, path) };
            let exists = named.as_ref().is_some_and(|named| out.join(named).is_file());
            let missing = match named.as_ref().and_then(|named| pages.get(named)) {
                _ if !exists => "there is no such file",
                Some(other) if !anchor.is_empty() && !other.ids.contains(anchor) => "the page has no such heading",
                _ => continue,
            };
            problems.push(format!("{}: the link to {target}: {missing}", name.display()));
        }
    }
    Ok((count, problems))
}

/// What a page names, and what can be named in it.
#[derive(Debug)]
struct Page {
    targets: Vec<String>,
    ids: BTreeSet<String>,
}

fn read(out: &Path, folder: &Path, pages: &mut BTreeMap<PathBuf, Page>) -> Result<()> {
    for entry in std::fs::read_dir(out.join(folder))? {
        let entry = entry?;
        let name = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            read(out, &name, pages)?;
        } else if name.extension().is_some_and(|extension| extension == "html") {
            let text = std::fs::read_to_string(entry.path())?;
            let targets = [" href=\"", " src=\""].iter().flat_map(|name| attributes(&text, name)).collect();
            pages.insert(name, Page { targets, ids: attributes(&text, " id=\"").collect() });
        }
    }
    Ok(())
}

/// The values of an attribute. mdBook writes them in double quotes.
fn attributes(text: &str, name: &str) -> impl Iterator<Item = String> {
    let values = text.split(name).skip(1).filter_map(|rest| Some(rest.split_once('"')?.0));
    values.map(|value| value.replace("&amp;", "&").replace("%20", " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_have_the_anchors_of_a_forge() {
        let found = slugs("# `warpool explain`, schema version 2\n## Tests\n## Tests\n## It's 1.5 x: _yes_\n");
        let expected = ["its-15-x-yes", "tests", "tests-1", "warpool-explain-schema-version-2"];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn values_of_attributes() {
        let text = r##"<a class="x" href="a.html?b&amp;c"><h2 id="one">"##;
        assert_eq!(attributes(text, " href=\"").collect::<Vec<_>>(), ["a.html?b&c"]);
        assert_eq!(attributes(text, " id=\"").collect::<Vec<_>>(), ["one"]);
    }
}
