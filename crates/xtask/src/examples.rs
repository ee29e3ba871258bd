//! Every public item of `warpool` and `driver` belongs to an example of the documentation that is compiled. One names
//! the item, or calls a method or reads a field of an item that belongs to one, whose declaration names the item:
//! `Stats` belongs to an example that calls `stats`. A trait belongs to one that calls a method of it. Methods belong
//! to the example of their type.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, Fields, Ident, ImplItem, Item, Path as TypePath, TraitItem, Type, Visibility};

use crate::tracked;
use crate::tree::{ModulePath, Tree, flatten, is_for_tests};

const CRATES: [&str; 2] = ["warpool", "driver"];
/// What has examples that `cargo test` compiles.
const SOURCES: [&str; 7] = [
    "crates/warpool/src/*.rs",
    "crates/warpool/README.md",
    "crates/driver/src/*.rs",
    "crates/driver/README.md",
    "README.md",
    "docs/rust.md",
    "docs/simulated-gpu.md",
];

/// The public items that belong to no example.
pub fn check(root: &Path) -> Result<Vec<String>, String> {
    let texts = tracked::texts(root, &SOURCES)?;
    let words: BTreeSet<&str> = texts.iter().flat_map(|(_, text)| words_of_examples(text)).collect();
    let read = |name: &&str| Tree::read(&root.join("crates").join(name).join("src/lib.rs"));
    let trees: Vec<Tree> = CRATES.iter().map(read).collect::<Result<_, _>>()?;
    let members: Vec<Member> =
        trees.iter().flat_map(|tree| tree.modules.values()).flat_map(|m| members(&m.items)).collect();
    let belonging = belonging(&members, &words);
    let mut problems = Vec::new();
    for (name, tree) in CRATES.iter().zip(&trees) {
        let items = public_items(tree);
        println!("{name}: {} public items", items.len());
        let without = items.iter().filter(|(item, _)| !belonging.contains(item.as_str()));
        problems.extend(without.map(|(item, module)| format!("{name}: {module}::{item} belongs to no example")));
    }
    Ok(problems)
}

/// A method, field or variant of an item, with the names in its declaration; or a function, which is its own member.
struct Member {
    of: String,
    of_trait: bool,
    name: String,
    names: BTreeSet<String>,
}

/// The names of items that the examples use.
fn belonging<'a>(members: &'a [Member], words: &BTreeSet<&'a str>) -> BTreeSet<&'a str> {
    let mut found = words.clone();
    loop {
        let used =
            members.iter().filter(|member| found.contains(member.of.as_str()) && words.contains(member.name.as_str()));
        let names: Vec<&str> = used.flat_map(|member| member.names.iter().map(String::as_str)).collect();
        let before = found.len();
        found.extend(names);
        // An example that imports all names calls methods of traits that it does not name.
        let called = members.iter().filter(|member| member.of_trait && words.contains(member.name.as_str()));
        found.extend(called.map(|member| member.of.as_str()));
        if found.len() == before {
            return found;
        }
    }
}

fn members(items: &[Item]) -> Vec<Member> {
    let mut found = Vec::new();
    for item in items {
        let of_trait = matches!(item, Item::Trait(_));
        let mut add = |of: &Ident, name: &Ident, visit: &dyn Fn(&mut Names)| {
            let mut names = Names::default();
            visit(&mut names);
            found.push(Member { of: of.to_string(), name: name.to_string(), of_trait, names: names.0 });
        };
        match item {
            Item::Fn(item) => add(&item.sig.ident, &item.sig.ident, &|names| names.visit_signature(&item.sig)),
            Item::Impl(item) => {
                let Type::Path(of) = &*item.self_ty else { continue };
                let of = &of.path.segments.last().expect("a path has a name").ident;
                for member in &item.items {
                    if let ImplItem::Fn(method) = member {
                        add(of, &method.sig.ident, &|names| names.visit_signature(&method.sig));
                    }
                }
            }
            Item::Trait(item) => {
                for member in &item.items {
                    if let TraitItem::Fn(method) = member {
                        add(&item.ident, &method.sig.ident, &|names| names.visit_signature(&method.sig));
                    }
                }
            }
            Item::Struct(item) => add_fields(&item.ident, &item.fields, &mut add),
            Item::Enum(item) => {
                for variant in &item.variants {
                    add(&item.ident, &variant.ident, &|names| names.visit_fields(&variant.fields));
                }
            }
            _ => {}
        }
    }
    found
}

fn add_fields(of: &Ident, fields: &Fields, add: &mut impl FnMut(&Ident, &Ident, &dyn Fn(&mut Names))) {
    for field in fields {
        if let (Some(name), Visibility::Public(_)) = (&field.ident, &field.vis) {
            add(of, name, &|names| names.visit_type(&field.ty));
        }
    }
}

/// The names of types in a declaration.
#[derive(Default)]
struct Names(BTreeSet<String>);

impl<'ast> Visit<'ast> for Names {
    fn visit_path(&mut self, path: &'ast TypePath) {
        self.0.extend(path.segments.last().map(|part| part.ident.to_string()));
        visit::visit_path(self, path);
    }
}

/// The words of the examples in a source file or a page.
fn words_of_examples(text: &str) -> Vec<&str> {
    let (mut words, mut language) = (Vec::new(), None);
    for line in text.lines() {
        let line = line.trim_start();
        let line = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).unwrap_or(line).trim_start();
        match (line.strip_prefix("```"), language) {
            (Some(begins), None) => language = Some(begins),
            (Some(_), Some(_)) => language = None,
            (None, Some("" | "rust" | "no_run" | "rust,no_run" | "should_panic")) => {
                words.extend(line.split(|c: char| !c.is_alphanumeric() && c != '_'));
            }
            (None, _) => {}
        }
    }
    words
}

/// The items that users of the crate can name, each with the first public module that has it.
fn public_items(tree: &Tree) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    collect(tree, &Vec::new(), "", &mut found);
    found
}

fn collect(tree: &Tree, module: &ModulePath, public_path: &str, found: &mut BTreeMap<String, String>) {
    let Some(source) = tree.modules.get(module) else { return };
    let mut add = |name: String| {
        found.entry(name).or_insert_with(|| public_path.to_owned());
    };
    // Modules whose items are public here, each with its public path.
    let mut modules = Vec::new();
    for item in &source.items {
        let (attributes, visibility, name) = match item {
            Item::Const(item) => (&item.attrs, &item.vis, &item.ident),
            Item::Enum(item) => (&item.attrs, &item.vis, &item.ident),
            Item::Fn(item) => (&item.attrs, &item.vis, &item.sig.ident),
            Item::Mod(item) => (&item.attrs, &item.vis, &item.ident),
            Item::Static(item) => (&item.attrs, &item.vis, &item.ident),
            Item::Struct(item) => (&item.attrs, &item.vis, &item.ident),
            Item::Trait(item) => (&item.attrs, &item.vis, &item.ident),
            Item::Type(item) => (&item.attrs, &item.vis, &item.ident),
            Item::Use(item) if is_public(&item.vis) && !is_hidden(&item.attrs) => {
                flatten(&item.tree, &mut Vec::new(), &mut |mut path, name| {
                    path.retain(|part| part != "self");
                    let target = if path.first().is_some_and(|part| part == "crate") {
                        path[1..].to_vec()
                    } else {
                        [module.as_slice(), &path].concat()
                    };
                    match name {
                        None => modules.push((target, public_path.to_owned())),
                        Some(name) if tree.modules.contains_key(&target) => {
                            modules.push((target, format!("{public_path}::{name}")));
                        }
                        // Another crate under a name of its own.
                        Some(_) if path.len() == 1 => {}
                        Some(name) => add(name),
                    }
                });
                continue;
            }
            _ => continue,
        };
        if !is_public(visibility) || is_hidden(attributes) || is_for_tests(attributes) {
            continue;
        }
        let name = name.to_string();
        if matches!(item, Item::Mod(_)) {
            let target = [module.as_slice(), std::slice::from_ref(&name)].concat();
            modules.push((target, format!("{public_path}::{name}")));
        } else {
            add(name);
        }
    }
    for (target, path) in modules {
        collect(tree, &target, &path, found);
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("doc")
            && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "hidden")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_found_where_users_name_them() {
        let tree = Tree::from_sources(&[
            (
                "",
                "pub mod memory; mod typed; pub use typed::{Vector, Hidden as Seen}; pub use other as driver; mod all;
                 pub use all::*;",
            ),
            (
                "memory",
                "mod pool; pub use pool::Pool; pub(crate) use pool::Inner;
                 #[doc(hidden)] pub use pool::Secret;",
            ),
            ("memory::pool", "pub struct Pool; pub struct Inner; pub struct Secret;"),
            ("typed", "pub struct Vector; pub struct Hidden; struct Private;"),
            ("all", "pub fn one() {} pub const TWO: u8 = 2; #[cfg(test)] pub fn three() {}"),
        ]);
        let found: Vec<String> =
            public_items(&tree).into_iter().map(|(item, module)| format!("{module}::{item}")).collect();
        assert_eq!(found, ["::memory::Pool", "::Seen", "::TWO", "::Vector", "::one"]);
    }

    #[test]
    fn an_example_has_what_the_members_that_it_uses_declare() {
        let items = syn::parse_file(
            "struct Pool; impl Pool { fn stats(&self) -> Result<Stats> {} fn other(&self) -> Other {} }
             struct Stats { pub bytes: Bytes, hidden: Hidden, pub unread: Unread }
             trait Called { fn stats() -> Found; } trait Unused { fn never() -> Lost; }",
        );
        let members = members(&items.expect("valid Rust").items);
        let found = belonging(&members, &["Pool", "stats", "bytes", "hidden"].into());
        let expected = ["Bytes", "Called", "Found", "Pool", "Result", "Stats", "bytes", "hidden", "stats"];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn words_are_those_of_compiled_examples() {
        let text = "\
//! Prose.
//! ```
//! let pool = Pool::new();
//! ```
/// ```compile_fail,E0382
/// wrong(pool);
/// ```
```rust
used_of_page();
```
```sh
command
```";
        let mut words = words_of_examples(text);
        words.retain(|word| !word.is_empty());
        assert_eq!(words, ["let", "pool", "Pool", "new", "used_of_page"]);
    }
}
