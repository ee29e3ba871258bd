//! `cards`: the devices that an option `gpu` can name.

use serde_json::{Value, json};
use warpool_trace::cards::Card;

use crate::request::answer::Answer;
use crate::request::error::Result;
use crate::request::options::Options;

/// `cards`: their keys, which `gpu` takes, names and bytes.
pub fn answer(options: Options) -> Result<Answer> {
    options.finish("cards")?;
    let card = |card: &Card| json!({ "key": card.key, "name": card.name, "bytes": card.bytes_total() });
    Ok(Answer::new(json!({ "cards": Card::ALL.iter().map(card).collect::<Vec<Value>>() })))
}
