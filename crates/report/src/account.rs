//! Whose the memory of a device is: the sum of what the allocator, the shared object that stands before the driver, and
//! the driver's list of processes say. The only thing that is computed in this crate.

use std::fmt::Write as _;

use serde_json::{Value, json};
use warpool::memory::report::{AccountRow, DeviceAccount};

use crate::size;

/// What the shared object `warpool_inject` counted in a process.
#[derive(Clone, Debug)]
pub struct Injected {
    pid: u64,
    devices: Vec<InjectedDevice>,
}

/// What it counted on one device.
#[derive(Clone, Debug)]
pub struct InjectedDevice {
    /// The device, as the process numbers it.
    pub device: u32,
    /// Its UUID, as 32 digits.
    pub uuid: String,
    /// Its memory.
    pub total: u64,
    used: u64,
    before: Option<u64>,
    rows: Vec<InjectedRow>,
    /// The same when most was in use.
    most: (u64, Vec<InjectedRow>),
}

#[derive(Clone, Debug)]
struct InjectedRow {
    owner: String,
    kind: String,
    bytes: i64,
}

/// What else is known of a device.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The device.
    pub device: u32,
    /// Its memory.
    pub total: u64,
    /// What of it is free.
    pub free: u64,
    /// What the allocator has reserved, if there is one.
    pub reserved: Option<u64>,
    /// The processes that use the device, with their bytes, as the driver lists them.
    pub processes: Option<Vec<(u32, Option<u64>)>>,
    /// This process.
    pub pid: u32,
}

impl Injected {
    /// Reads the text that the shared object writes.
    ///
    /// # Errors
    /// If it is not such a text, with a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if value["version"] != 1 {
            return Err(format!("it has version {} and not 1", value["version"]));
        }
        let devices = value["devices"].as_array().ok_or("it has no devices")?;
        let devices = devices.iter().map(InjectedDevice::read).collect::<Option<_>>().ok_or("a value is missing")?;
        Ok(Self { pid: value["pid"].as_u64().ok_or("it has no process")?, devices })
    }

    /// The process.
    #[must_use]
    pub const fn pid(&self) -> u64 {
        self.pid
    }

    /// The devices that it used.
    #[must_use]
    pub fn devices(&self) -> &[InjectedDevice] {
        &self.devices
    }
}

fn rows(value: &Value) -> Option<Vec<InjectedRow>> {
    let row = |value: &Value| {
        Some(InjectedRow {
            owner: value["owner"].as_str()?.to_owned(),
            kind: value["kind"].as_str()?.to_owned(),
            bytes: value["bytes"].as_i64()?,
        })
    };
    value.as_array()?.iter().map(row).collect()
}

impl InjectedDevice {
    fn read(value: &Value) -> Option<Self> {
        Some(Self {
            device: u32::try_from(value["device"].as_u64()?).ok()?,
            uuid: value["uuid"].as_str()?.to_owned(),
            total: value["total"].as_u64()?,
            used: value["used"].as_u64()?,
            before: value["before"].as_u64(),
            rows: rows(&value["rows"])?,
            most: (value["most"]["used"].as_u64()?, rows(&value["most"]["rows"])?),
        })
    }

    /// The account when most was in use, from this alone.
    #[must_use]
    pub fn account_at_most(&self) -> DeviceAccount {
        let (used, rows) = if self.most.0 > 0 { self.most.clone() } else { (self.used, self.rows.clone()) };
        let free = self.total.saturating_sub(used);
        let known = Known { device: self.device, total: self.total, free, ..Known::default() };
        let account = account(&known, Some(&Self { used, rows, ..self.clone() }));
        DeviceAccount {
            remarks: vec!["what other processes use is as it was when this one began".to_owned()],
            ..account
        }
    }
}

/// How a row of the shared object is called, and known.
fn words(kind: &str) -> (&'static str, &'static str) {
    const BY_CALL: &str = "asked for by its calls of the driver";
    const AROUND: &str = "measured around its calls of the driver";
    match kind {
        "context" => ("context", "measured when it was made"),
        "context_and_others" => ("context, and what others had then", "in use when it was made"),
        "allocations" => ("allocations", BY_CALL),
        "modules" => ("modules and kernels", AROUND),
        "graphs" => ("graphs", AROUND),
        "streams" => ("streams", AROUND),
        "pools" => ("stream-ordered pools", "the driver says it"),
        "overhead" => ("rounding of allocations, page tables", "measured around allocations"),
        _ => ("other", AROUND),
    }
}

fn row(owner: &str, what: &str, bytes: u64, known_by: &str) -> AccountRow {
    AccountRow { owner: owner.to_owned(), what: what.to_owned(), bytes, known_by: known_by.to_owned() }
}

/// Whose memory of a device it is.
#[must_use]
pub fn account(known: &Known, injected: Option<&InjectedDevice>) -> DeviceAccount {
    let mut rows = Vec::new();
    let mut remarks = Vec::new();
    if let Some(reserved) = known.reserved {
        rows.push(row(AccountRow::ALLOCATOR, AccountRow::RESERVED, reserved, "the allocator counts it"));
    }
    if let Some(injected) = injected {
        rows.extend(own_rows(injected, known.reserved));
    }
    let own: u64 = rows.iter().map(|row| row.bytes).sum();
    let before = injected.and_then(|injected| injected.before);
    let listed = known.processes.as_deref().filter(|processes| !processes.is_empty());
    let this = listed.and_then(|processes| processes.iter().position(|process| process.0 == known.pid));
    // In a container the driver may know processes by other ids.
    let this = this.or_else(|| {
        let near = |process: &(u32, Option<u64>)| process.1.is_some_and(|bytes| bytes.abs_diff(own) <= own / 50);
        injected.and_then(|_| listed?.iter().position(near))
    });
    match (listed, this) {
        (Some(processes), Some(this)) => {
            let others = || processes.iter().enumerate().filter(|&(at, _)| at != this).map(|(_, process)| process);
            let bytes: u64 = others().filter_map(|process| process.1).sum();
            if others().next().is_some() {
                rows.push(row("other processes", &counted(others().count()), bytes, "the driver lists them"));
            }
            if others().any(|process| process.1.is_none()) {
                remarks.push("the driver does not say what some processes use".to_owned());
            }
            if injected.is_none()
                && let Some(all) = processes[this].1
            {
                let rest = all.saturating_sub(known.reserved.unwrap_or(0));
                rows.push(row("this process", "context, modules, libraries", rest, "the driver lists it"));
            }
        }
        _ => {
            if let Some(before) = before.filter(|&before| before > 0) {
                rows.push(row("other processes", "before this one began", before, "in use then"));
            }
            remarks.push(if known.processes.is_none() {
                "the processes that use the device are not known: NVIDIA's management library is missing, or refuses"
                    .to_owned()
            } else {
                "the driver does not show this process the processes that use the device, as in a container with \
                    process ids of its own: what others took since this one began is not explained"
                    .to_owned()
            });
        }
    }
    if injected.is_none() {
        remarks.push(
            "what belongs to which library is not known: start the program with `warpool record -- COMMAND`".to_owned(),
        );
    }
    rows.retain(|row| row.bytes > 0);
    let used = known.total.saturating_sub(known.free);
    DeviceAccount { device: known.device, total: known.total, used, rows, remarks }
}

fn counted(processes: usize) -> String {
    if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") }
}

/// What this process took beside what the allocator has reserved.
fn own_rows(injected: &InjectedDevice, reserved: Option<u64>) -> Vec<AccountRow> {
    let mut of_allocator = i64::try_from(reserved.unwrap_or(0)).unwrap_or(i64::MAX);
    // The memory of the allocator is allocated by its calls, or in pools by `cudaMallocAsync`.
    let mut bytes: Vec<i64> = injected.rows.iter().map(|row| row.bytes).collect();
    for kind in ["allocations", "pools"] {
        for (row, bytes) in injected.rows.iter().zip(&mut bytes) {
            let is_allocators = row.owner == AccountRow::ALLOCATOR || (kind == "pools" && row.owner == "CUDA");
            if is_allocators && row.kind == kind {
                let taken = of_allocator.min(*bytes).max(0);
                (of_allocator, *bytes) = (of_allocator - taken, *bytes - taken);
            }
        }
    }
    // What one owner took and another gave back, such as chunks that small allocations share, is rounding.
    let negative: i64 = bytes.iter().copied().filter(|&bytes| bytes < 0).sum();
    if let Some(overhead) = injected.rows.iter().position(|row| row.kind == "overhead" && row.bytes > 0) {
        bytes[overhead] += negative;
    }
    let shown = |(found, bytes): (&InjectedRow, i64)| {
        let (what, known_by) = words(&found.kind);
        let is_rest = found.owner == AccountRow::ALLOCATOR && found.kind == "allocations" && reserved.is_some();
        let what = if is_rest { "beyond what it has reserved" } else { what };
        row(&found.owner, what, u64::try_from(bytes).unwrap_or(0), known_by)
    };
    let mut rows: Vec<AccountRow> = injected.rows.iter().zip(bytes).map(shown).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

/// The account as JSON (docs/json.md).
#[must_use]
pub fn object(account: &DeviceAccount) -> Value {
    let row = |row: &AccountRow| {
        let AccountRow { owner, what, bytes, known_by } = row;
        json!({ "owner": owner, "what": what, "bytes": bytes, "known_by": known_by })
    };
    json!({
        "device": account.device,
        "total_bytes": account.total,
        "used_bytes": account.used,
        "unexplained_bytes": account.unexplained(),
        "rows": account.rows.iter().map(row).collect::<Vec<_>>(),
        "remarks": account.remarks,
    })
}

/// The account as lines of text.
#[must_use]
pub fn text(account: &DeviceAccount) -> String {
    let percent = |bytes: i64| 100.0 * bytes as f64 / account.used.max(1) as f64;
    let mut text =
        format!("GPU {}: {} of {} in use\n", account.device, size::format(account.used), size::format(account.total));
    let mut line = |bytes: i64, owner: &str, what: &str, known_by: &str| {
        let sign = if bytes < 0 { "-" } else { "" };
        let size = format!("{sign}{}", size::format(bytes.unsigned_abs()));
        let _ = writeln!(text, "  {size:>10} {:>6.1}%  {owner}: {what}{known_by}", percent(bytes));
    };
    for row in &account.rows {
        line(i64::try_from(row.bytes).unwrap_or(i64::MAX), &row.owner, &row.what, &format!(" ({})", row.known_by));
    }
    line(account.unexplained(), "unexplained", "in use, and of nobody above", "");
    for remark in &account.remarks {
        let _ = writeln!(text, "  Remark: {remark}.");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What the shared object counted, as `owner kind MiB`.
    fn injected(rows: &str, before: Option<u64>) -> InjectedDevice {
        let row = |text: &str| {
            let words: Vec<&str> = text.trim().rsplitn(3, ' ').collect();
            let bytes = words[0].parse::<i64>().expect("a number") * MIB as i64;
            json!({ "owner": words[2], "kind": words[1], "bytes": bytes })
        };
        let rows: Vec<Value> = rows.split(',').map(row).collect();
        let device = json!({
            "device": 0, "uuid": "00", "total": 8192 * MIB, "used": 0, "before": before.map(|mib| mib * MIB),
            "rows": rows, "most": { "used": 0, "rows": [] },
        });
        let text = json!({ "version": 1, "pid": 7, "devices": [device] }).to_string();
        Injected::parse(&text).expect("a text").devices()[0].clone()
    }

    /// The rows as `owner, what: MiB`, with what is unexplained.
    fn check(known: &Known, injected: Option<&InjectedDevice>, expected: &[&str]) -> DeviceAccount {
        let found = account(known, injected);
        let mut rows: Vec<String> =
            found.rows.iter().map(|row| format!("{}, {}: {}", row.owner, row.what, row.bytes / MIB)).collect();
        rows.push(format!("unexplained: {}", found.unexplained() / MIB as i64));
        assert_eq!(rows, expected);
        found
    }

    fn known(used: u64, reserved: u64, processes: &[(u32, u64)]) -> Known {
        let list = processes.iter().map(|&(pid, mib)| (pid, Some(mib * MIB))).collect();
        let (total, free) = (8192 * MIB, (8192 - used) * MIB);
        Known { device: 0, total, free, reserved: Some(reserved * MIB), processes: Some(list), pid: 7 }
    }

    #[test]
    fn the_allocators_memory_is_not_counted_twice() {
        let counted = injected("CUDA context 500,the allocator allocations 110,cuBLAS allocations 64", None);
        let rows = [
            "the allocator, reserved: 100",
            "CUDA, context: 500",
            "cuBLAS, allocations: 64",
            "the allocator, beyond what it has reserved: 10",
            "unexplained: 3",
        ];
        check(&known(677, 100, &[(7, 677)]), Some(&counted), &rows);
        // With cudaMallocAsync its memory is in a pool of the driver.
        let counted = injected("CUDA context 500,CUDA pools 128", None);
        let rows =
            ["the allocator, reserved: 100", "CUDA, context: 500", "CUDA, stream-ordered pools: 28", "unexplained: 0"];
        check(&known(628, 100, &[(7, 628)]), Some(&counted), &rows);
    }

    /// One owner's small allocation took the page that another's gave back.
    #[test]
    fn what_others_gave_back_is_rounding() {
        let counted = injected("CUDA overhead 6,cuBLAS allocations 4,cuDNN modules -2", None);
        let rows = ["CUDA, rounding of allocations, page tables: 4", "cuBLAS, allocations: 4", "unexplained: 0"];
        check(&known(8, 0, &[(7, 8)]), Some(&counted), &rows);
    }

    #[test]
    fn other_processes_are_those_that_the_driver_lists() {
        let counted = injected("CUDA context 500", Some(250));
        let rows = ["CUDA, context: 500", "other processes, 2 processes: 330", "unexplained: 0"];
        check(&known(830, 0, &[(4, 300), (7, 500), (9, 30)]), Some(&counted), &rows);
        // By ids of another namespace: this one is the one with as much as was counted here.
        let rows = ["CUDA, context: 500", "other processes, 1 process: 300", "unexplained: 30"];
        check(&known(830, 0, &[(10_004, 300), (10_007, 505)]), Some(&counted), &rows);
        // Not shown at all: what was in use before.
        let rows = ["CUDA, context: 500", "other processes, before this one began: 250", "unexplained: 80"];
        let found = check(&known(830, 0, &[]), Some(&counted), &rows);
        assert!(found.remarks[0].contains("as in a container"), "{:?}", found.remarks);
    }

    #[test]
    fn without_the_shared_object_the_process_is_one_row() {
        let rows = [
            "the allocator, reserved: 100",
            "other processes, 1 process: 30",
            "this process, context, modules, libraries: 570",
            "unexplained: 0",
        ];
        let found = check(&known(700, 100, &[(7, 670), (9, 30)]), None, &rows);
        assert!(found.remarks[0].contains("warpool record"), "{:?}", found.remarks);
        check(&known(700, 100, &[]), None, &["the allocator, reserved: 100", "unexplained: 600"]);
    }

    #[test]
    fn more_than_is_in_use_is_told() {
        let counted = injected("CUDA context 500", None);
        let found = check(&known(490, 0, &[(7, 490)]), Some(&counted), &["CUDA, context: 500", "unexplained: -10"]);
        let text = text(&found);
        assert!(text.contains("  -10 MiB   -2.0%  unexplained: "), "{text}");
        assert_eq!(object(&found)["unexplained_bytes"], -10 * MIB as i64);
    }

    #[test]
    fn another_text_is_an_error() {
        for (text, part) in [
            ("", "EOF"),
            ("{}", "version"),
            (r#"{"version":2}"#, "version 2"),
            (r#"{"version":1,"devices":[{}],"pid":1}"#, "missing"),
            (r#"{"version":1,"pid":1}"#, "devices"),
        ] {
            let error = Injected::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
