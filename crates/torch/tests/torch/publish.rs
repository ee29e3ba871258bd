//! The page of a process that uses the C interface.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Duration;

use warpool::share::{PageDirectory, Reading};

use crate::c_programs::build;
use crate::shared_object::{has, scratch, simulated};

#[test]
fn a_process_publishes_from_its_start_until_it_ends() {
    if !has("cc") {
        return;
    }
    let folder = scratch("publish");
    let (program, pages) = (build("publish", &folder), folder.join("pages"));
    for (publish, is_on) in [("", true), ("read-only", true), ("False", false)] {
        let mut command = simulated(&program);
        command.env("WARPOOL_PUBLISH", publish).env("WARPOOL_PAGES", &pages).env("WARPOOL_SIM", "devices:2");
        let mut process = command.arg("--an-argument").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let listing = PageDirectory::open(&pages).unwrap().list().unwrap();
        assert_eq!((listing.pages.len(), listing.problems.as_slice()), (usize::from(is_on), &[][..]), "{publish:?}");
        if let Some(page) = listing.pages.first() {
            let identity = page.identity();
            assert_eq!((identity.pid, identity.devices.len()), (process.id(), 2));
            assert_eq!(identity.command, "publish --an-argument");
            listing.refresh(Duration::from_secs(60));
            let Reading::Values(values) = page.read(0) else { panic!("{:?}", page.read(0)) };
            assert_eq!((values.counters.bytes_allocated, values.counters.ooms), (3 << 20, 1));
            assert_eq!(values.last_oom.map(|event| event.bytes_requested), Some(1 << 50));
        }
        // The process ends, and its child does not.
        let input = process.stdin.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(listing.pages.iter().all(|page| !page.is_alive()), "the child does not keep the page");
        assert_eq!(PageDirectory::open(&pages).unwrap().list().unwrap().pages.len(), 0);
        drop(input);
    }
}
