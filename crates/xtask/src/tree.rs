//! The module tree of a crate, read from its files. Modules for tests are left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use syn::{Attribute, Item, UseTree};

/// Names a module: its path below the crate root, which is empty.
pub type ModulePath = Vec<String>;

#[derive(Default)]
pub struct Tree {
    pub modules: BTreeMap<ModulePath, Module>,
}

pub struct Module {
    pub file: PathBuf,
    pub items: Vec<Item>,
    /// Names that `use` brings in, with the path as written.
    pub imported: BTreeMap<String, Vec<String>>,
    /// Paths of `use path::*`.
    pub globs: Vec<Vec<String>>,
}

impl Tree {
    /// Reads the crate whose root file is `root`.
    pub fn read(root: &Path) -> Result<Self, String> {
        let mut tree = Self::default();
        let folder = root.parent().expect("a file has a folder");
        tree.add(Vec::new(), root.to_owned(), folder.to_owned(), read_items(root)?)?;
        Ok(tree)
    }

    /// Names files as seen from `root`.
    pub fn relative_to(mut self, root: &Path) -> Self {
        for module in self.modules.values_mut() {
            if let Ok(relative) = module.file.strip_prefix(root) {
                module.file = relative.to_owned();
            }
        }
        self
    }

    /// A tree from sources by module path, for tests.
    #[cfg(test)]
    pub fn from_sources(sources: &[(&str, &str)]) -> Self {
        let mut tree = Self::default();
        for (path, source) in sources {
            let path: ModulePath = path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
            let items = syn::parse_file(source).expect("valid Rust").items;
            tree.insert(path.clone(), PathBuf::from(path.join("/") + ".rs"), items);
        }
        tree
    }

    fn insert(&mut self, path: ModulePath, file: PathBuf, items: Vec<Item>) {
        let (mut imported, mut globs) = (BTreeMap::new(), Vec::new());
        for item in &items {
            if let Item::Use(item) = item {
                flatten(&item.tree, &mut Vec::new(), &mut |path, name| match name {
                    Some(name) => drop(imported.insert(name, path)),
                    None => globs.push(path),
                });
            }
        }
        self.modules.insert(path, Module { file, items, imported, globs });
    }

    /// Adds a module and those that it declares. `folder` is where files of its children lie.
    fn add(&mut self, path: ModulePath, file: PathBuf, folder: PathBuf, items: Vec<Item>) -> Result<(), String> {
        for item in &items {
            let Item::Mod(module) = item else { continue };
            if is_for_tests(&module.attrs) {
                continue;
            }
            let name = module.ident.to_string();
            let child = [path.as_slice(), std::slice::from_ref(&name)].concat();
            match &module.content {
                Some((_, items)) => self.add(child, file.clone(), folder.join(&name), items.clone())?,
                None => {
                    let flat = folder.join(format!("{name}.rs"));
                    let nested = folder.join(&name).join("mod.rs");
                    let file = if flat.is_file() { flat } else { nested };
                    let items = read_items(&file)?;
                    self.add(child, file, folder.join(&name), items)?;
                }
            }
        }
        self.insert(path, file, items);
        Ok(())
    }
}

fn read_items(file: &Path) -> Result<Vec<Item>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?.items)
}

/// Whether an item exists only in tests: `#[cfg(test)]`, `#[cfg(doctest)]`, `#[cfg(all(test, …))]`.
pub fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                list.tokens
                    .to_string()
                    .split(|c: char| !c.is_alphanumeric())
                    .any(|word| word == "test" || word == "doctest")
            })
    })
}

/// Calls `found` with every path of a `use`, and the name that it gets; a glob has none.
pub fn flatten(tree: &UseTree, path: &mut Vec<String>, found: &mut impl FnMut(Vec<String>, Option<String>)) {
    match tree {
        UseTree::Path(part) => {
            path.push(part.ident.to_string());
            flatten(&part.tree, path, found);
            path.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, path, found)),
        UseTree::Glob(_) => found(path.clone(), None),
        UseTree::Name(name) if name.ident == "self" => found(path.clone(), path.last().cloned()),
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            found([path.as_slice(), std::slice::from_ref(&name)].concat(), Some(name));
        }
        UseTree::Rename(renamed) => {
            let original = renamed.ident.to_string();
            let full = if original == "self" { path.clone() } else { [path.as_slice(), &[original]].concat() };
            found(full, Some(renamed.rename.to_string()));
        }
    }
}
