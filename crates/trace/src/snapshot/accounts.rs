//! Accounts while a pickle is read: a list of rows, each with its device, in the order of the devices.

use warpool::memory::report::{AccountRow, DeviceAccount};

use super::convert::{text, unsigned};
use super::invalid::Invalid;
use super::schema::Keyword;
use super::texts::TextTable;
use crate::budget::Budget;
use crate::pickle::Value;

/// The keys of a row that were read; texts by number. One with a remark has nothing else.
#[derive(Default)]
pub(super) struct AccountDraft {
    device: u64,
    total: u64,
    used: u64,
    bytes: u64,
    owner: Option<u32>,
    what: Option<u32>,
    known_by: Option<u32>,
    remark: Option<u32>,
}

impl AccountDraft {
    pub(super) fn set(&mut self, key: Option<Keyword>, value: Value) -> Result<(), Invalid> {
        match key {
            Some(Keyword::Device) => self.device = unsigned(value)?,
            Some(Keyword::TotalBytes) => self.total = unsigned(value)?,
            Some(Keyword::UsedBytes) => self.used = unsigned(value)?,
            Some(Keyword::Bytes) => self.bytes = unsigned(value)?,
            Some(Keyword::Owner) => self.owner = Some(text(value)?),
            Some(Keyword::What) => self.what = Some(text(value)?),
            Some(Keyword::KnownBy) => self.known_by = Some(text(value)?),
            Some(Keyword::Remark) => self.remark = Some(text(value)?),
            _ => {}
        }
        Ok(())
    }
}

/// The accounts of the rows of those numbers.
pub(super) fn complete(
    numbers: &[u32],
    drafts: &[AccountDraft],
    texts: &TextTable,
    budget: &Budget,
) -> Result<Vec<DeviceAccount>, Invalid> {
    let mut accounts: Vec<DeviceAccount> = Vec::new();
    for &number in numbers {
        let draft = &drafts[number as usize];
        let device = u32::try_from(draft.device)
            .map_err(|_| Invalid::new(format!("{} is not a device", draft.device)).within(".warpool_account"))?;
        let text = |text: Option<u32>| text.map_or_else(String::new, |text| texts.get(text).to_owned());
        let row = AccountRow {
            owner: text(draft.owner),
            what: text(draft.what),
            bytes: draft.bytes,
            known_by: text(draft.known_by),
        };
        let remark = draft.remark.map(|remark| texts.get(remark).to_owned());
        // Each row has its own copy of its texts. While a list grows, there are two lists.
        let copied =
            row.owner.len() + row.what.len() + row.known_by.len() + remark.as_ref().map_or(0, String::len) + 64;
        budget.take(3 * size_of::<DeviceAccount>() as u64 + 3 * size_of::<AccountRow>() as u64 + copied as u64)?;
        if accounts.last().is_none_or(|last| last.device != device) {
            accounts.push(DeviceAccount { device, total: draft.total, used: draft.used, ..DeviceAccount::default() });
        }
        let account = accounts.last_mut().expect("one was added");
        match remark {
            Some(remark) => account.remarks.push(remark),
            None => account.rows.push(row),
        }
    }
    Ok(accounts)
}
