//! Annotations while a pickle is read.

use warpool::memory::report::Annotation;

use super::convert::{signed, text};
use super::invalid::Invalid;
use super::schema::Keyword;
use super::texts::TextTable;
use crate::budget::Budget;
use crate::pickle::Value;

/// The keys of an annotation that were read; texts by number.
#[derive(Default)]
pub(super) struct AnnotationDraft {
    name: Option<u32>,
    stage: Option<u32>,
    device: Option<i64>,
    time_us: Option<i64>,
}

impl AnnotationDraft {
    pub(super) fn set(&mut self, key: Option<Keyword>, value: Value) -> Result<(), Invalid> {
        match key {
            Some(Keyword::Name) => self.name = Some(text(value)?),
            Some(Keyword::Stage) => self.stage = Some(text(value)?),
            Some(Keyword::Device) => self.device = Some(signed(value)?),
            Some(Keyword::TimeUs) => self.time_us = Some(signed(value)?),
            _ => {}
        }
        Ok(())
    }

    fn complete(&self, texts: &TextTable) -> Result<Annotation, Invalid> {
        let text = |text: Option<u32>| text.map_or_else(String::new, |text| texts.get(text).to_owned());
        Ok(Annotation {
            name: text(self.name),
            stage: text(self.stage),
            device: self.device.ok_or_else(|| Invalid::missing("device"))?,
            time_us: self.time_us.ok_or_else(|| Invalid::missing("time_us"))?,
        })
    }
}

/// The annotations of those numbers, with their texts.
pub(super) fn complete(
    numbers: &[u32],
    drafts: &[AnnotationDraft],
    texts: &TextTable,
    budget: &Budget,
) -> Result<Vec<Annotation>, Invalid> {
    let complete = |(index, &number): (usize, &u32)| {
        let annotation = drafts[number as usize].complete(texts);
        let annotation = annotation.map_err(|invalid| invalid.within(&format!(".external_annotations[{index}]")))?;
        // Each annotation has its own copy of its texts. While the list grows, there are two lists.
        let texts = annotation.name.len() + annotation.stage.len() + 32;
        budget.take(3 * size_of::<Annotation>() as u64 + texts as u64)?;
        Ok(annotation)
    };
    numbers.iter().enumerate().map(complete).collect()
}
