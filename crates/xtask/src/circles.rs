//! Circles in the graph of imports.

use std::collections::{BTreeMap, BTreeSet};

use crate::imports::Imports;
use crate::tree::ModulePath;

/// Describes every group of modules that use each other, with the imports between them.
pub fn find(imports: &Imports) -> Vec<String> {
    let mut uses: BTreeMap<&ModulePath, Vec<&ModulePath>> = BTreeMap::new();
    for (from, to) in imports.keys() {
        uses.entry(from).or_default().push(to);
    }
    let reached: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
        uses.keys().map(|&module| (module, reachable(&uses, module))).collect();
    let reaches = |from: &ModulePath, to: &ModulePath| reached.get(from).is_some_and(|set| set.contains(to));

    let mut described = BTreeSet::new();
    let mut circles = Vec::new();
    for &module in uses.keys() {
        if !reaches(module, module) || described.contains(module) {
            continue;
        }
        let group: BTreeSet<&ModulePath> =
            reached[module].iter().copied().filter(|other| reaches(other, module)).collect();
        described.extend(group.iter().copied());
        let names: Vec<String> = group.iter().map(|path| path.join("::")).collect();
        let lines: Vec<String> = imports
            .iter()
            .filter(|((from, to), _)| group.contains(from) && group.contains(to))
            .map(|((from, to), place)| format!("\n    {} -> {}: {place}", from.join("::"), to.join("::")))
            .collect();
        circles.push(format!("modules that import each other: {}{}", names.join(", "), lines.concat()));
    }
    circles
}

fn reachable<'a>(uses: &BTreeMap<&'a ModulePath, Vec<&'a ModulePath>>, from: &ModulePath) -> BTreeSet<&'a ModulePath> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&ModulePath> = uses.get(from).into_iter().flatten().copied().collect();
    while let Some(module) = next.pop() {
        if found.insert(module) {
            next.extend(uses.get(module).into_iter().flatten().copied());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(edges: &[(&str, &str)]) -> Vec<String> {
        let path = |name: &str| vec![name.to_owned()];
        find(&edges.iter().map(|&(from, to)| ((path(from), path(to)), "a.rs:1".to_owned())).collect())
    }

    #[test]
    fn a_line_has_none() {
        assert!(circles(&[("a", "b"), ("b", "c"), ("a", "c")]).is_empty());
    }

    #[test]
    fn each_circle_is_described_once_with_its_imports() {
        let found = circles(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("x", "y"), ("y", "x")]);
        assert_eq!(found.len(), 2);
        assert!(found[0].starts_with("modules that import each other: a, b, c\n    a -> b: a.rs:1"), "{}", found[0]);
        assert!(!found[0].contains("d ->"), "{}", found[0]);
    }
}
