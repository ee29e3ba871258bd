//! The page of all ranks: a heat map over time, and what is known of each. `page/ranks.js` reads what is written here.

use serde_json::{Value, json};
use warpool_trace::Category;
use warpool_trace::ranks::{Column, Figures, Ranks};

use super::object;
use crate::explain::holder_object;
use crate::view::Page;

/// The page of one recording beside this one.
pub type Link = Option<String>;

/// How many holders of each rank are in the page.
const HOLDERS_MAX: usize = 12;

/// The page. `links` are the pages of the rows, relative to this one.
#[must_use]
pub fn page(title: &str, ranks: &Ranks, links: &[Link]) -> Page {
    let mut manifest = object(ranks);
    let rows = manifest["ranks"].as_array_mut().into_iter().flatten();
    for (at, (object, row)) in rows.zip(&ranks.rows).enumerate() {
        object["link"] = json!(links.get(at).cloned().flatten());
        if let Some(figures) = row.figures() {
            add_figures(object, figures);
        }
        object["file"] = json!(row.summary.file);
    }
    Page { title: title.to_owned(), manifest: json!({ "title": title, "ranks": manifest }), sections: Vec::new() }
}

fn add_figures(object: &mut Value, figures: &Figures) {
    let column = |of: fn(&Column) -> u64| figures.columns.iter().map(of).collect::<Vec<u64>>();
    let all = Category::ALL.into_iter();
    let categories = all.map(|it| json!({ "name": it.words(), "bytes": figures.bytes_of(it) }));
    object["allocated_over_time"] = json!(column(|column| column.allocated));
    object["reserved_over_time"] = json!(column(|column| column.reserved));
    object["categories"] = categories.filter(|it| it["bytes"] != 0).collect();
    object["holders"] = figures.holders.iter().take(HOLDERS_MAX).map(holder_object).collect();
    object["words"] = json!(figures.verdict.words());
}
