//! Which module uses which, by `use` and by paths in code, through re-exports.
//!
//! Only siblings count: a module may use what its parent's own file defines, and a parent its children. An import
//! between distant modules counts between their ancestors that are siblings.

use std::collections::BTreeMap;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::tree::{ModulePath, Tree, flatten, is_for_tests};

/// One module uses another: the two siblings, and the position of the first such import.
pub type Imports = BTreeMap<(ModulePath, ModulePath), String>;

/// All imports between siblings, at every level of the tree.
pub fn between_siblings(tree: &Tree) -> Imports {
    let mut imports = Imports::new();
    for (path, module) in &tree.modules {
        let mut paths = Paths::default();
        module.items.iter().for_each(|item| paths.visit_item(item));
        for (used, line) in paths.found {
            let Some(target) = resolve(tree, path, &used, 0).map(Target::module) else { continue };
            let common = path.iter().zip(&target).take_while(|(a, b)| a == b).count();
            // One contains the other.
            if common == path.len() || common == target.len() {
                continue;
            }
            let place = format!("{}:{line} uses {}", module.file.display(), used.join("::"));
            imports.entry((path[..=common].to_vec(), target[..=common].to_vec())).or_insert(place);
        }
    }
    imports
}

/// The target of a path.
enum Target {
    Module(ModulePath),
    /// An item that this module defines.
    ItemOf(ModulePath),
}

impl Target {
    fn module(self) -> ModulePath {
        match self {
            Self::Module(path) | Self::ItemOf(path) => path,
        }
    }
}

/// The module that defines the item named by `path`; `None` if it is not in this crate.
fn resolve(tree: &Tree, from: &ModulePath, path: &[String], depth: usize) -> Option<Target> {
    // Re-exports that lead back to themselves.
    if depth > 16 {
        return None;
    }
    let (first, rest) = path.split_first()?;
    let mut module = match first.as_str() {
        "crate" => Vec::new(),
        "self" => from.clone(),
        "super" => from.split_last()?.1.to_vec(),
        name if tree.modules.contains_key(&child_of(from, name)) => child_of(from, name),
        name => {
            let imported = tree.modules[from].imported.get(name).filter(|imported| imported.as_slice() != path)?;
            match resolve(tree, from, imported, depth + 1)? {
                Target::Module(module) => module,
                // A variant or an associated item: it is where its type is.
                item @ Target::ItemOf(_) => return Some(item),
            }
        }
    };
    for name in rest {
        if name == "super" {
            module.pop();
            continue;
        }
        let child = child_of(&module, name);
        if tree.modules.contains_key(&child) {
            module = child;
            continue;
        }
        let here = tree.modules.get(&module)?;
        if let Some(imported) = here.imported.get(name) {
            match resolve(tree, &module, imported, depth + 1) {
                Some(Target::Module(target)) => {
                    module = target;
                    continue;
                }
                Some(item) => return Some(item),
                None => return Some(Target::ItemOf(module)),
            }
        }
        let defining = |path: &Vec<String>| {
            let module = resolve(tree, &module, path, depth + 1)?.module();
            tree.modules[&module].items.iter().any(|item| defines(item, name)).then_some(module)
        };
        return Some(Target::ItemOf(here.globs.iter().find_map(defining).unwrap_or(module)));
    }
    Some(Target::Module(module))
}

fn child_of(module: &ModulePath, name: &str) -> ModulePath {
    [module.as_slice(), &[name.to_owned()]].concat()
}

fn defines(item: &syn::Item, name: &str) -> bool {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return false,
    };
    ident == name
}

/// The paths of more than one part in a module's code, with their lines.
#[derive(Default)]
struct Paths {
    found: Vec<(Vec<String>, usize)>,
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(_) => return, // A module of its own.
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let line = item.span().start().line;
        flatten(&item.tree, &mut Vec::new(), &mut |path, _| self.found.push((path, line)));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 && path.leading_colon.is_none() {
            let parts = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.found.push((parts, path.span().start().line));
        }
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(sources: &[(&str, &str)]) -> Vec<String> {
        between_siblings(&Tree::from_sources(sources))
            .keys()
            .map(|(from, to)| format!("{} -> {}", from.join("::"), to.join("::")))
            .collect()
    }

    #[test]
    fn use_and_inline_paths_count() {
        let sources =
            [("", "mod a; mod b; mod c;"), ("a", "use crate::b::B;"), ("b", "fn f() { super::c::g(); }"), ("c", "")];
        assert_eq!(edges(&sources), ["a -> b", "b -> c"]);
    }

    #[test]
    fn re_exports_lead_to_where_the_item_is_defined() {
        let sources = [
            ("", "mod a; mod b; pub use b::B;"),
            ("a", "use crate::B; use crate::b::C;"),
            ("b", "mod inner; pub use inner::*; pub struct B;"),
            ("b::inner", "pub struct C;"),
        ];
        assert_eq!(edges(&sources), ["a -> b"]);
    }

    #[test]
    fn distant_modules_count_between_their_sibling_ancestors() {
        let sources =
            [("", "mod a; mod b;"), ("a", "mod x;"), ("a::x", "use crate::b::y::Y;"), ("b", "mod y;"), ("b::y", "")];
        assert_eq!(edges(&sources), ["a -> b"]);
    }

    #[test]
    fn a_variant_is_where_its_enum_is() {
        let sources = [
            ("", "mod a; mod b; mod c;"),
            ("a", "use crate::b::Kind; fn f() { Kind::C; }"),
            ("b", "use crate::c::C; pub enum Kind { C(C) }"),
            ("c", "pub struct C;"),
        ];
        assert_eq!(edges(&sources), ["a -> b", "b -> c"]);
    }

    #[test]
    fn parents_children_and_tests_do_not_count() {
        let sources = [
            ("", "mod a; struct Root; use a::A;"),
            ("a", "use super::Root; #[cfg(test)] mod tests { use crate::b::B; } #[cfg(test)] use crate::b::B;"),
            ("b", ""),
        ];
        assert!(edges(&sources).is_empty());
    }
}
