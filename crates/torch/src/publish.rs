//! The page of this process, which `warpool top` shows: published when the runtime starts, unless `WARPOOL_PUBLISH` is
//! `False`. Nothing here fails a start: a program that cannot publish runs as well, with a warning.

use std::sync::{Arc, OnceLock};

use warpool::share::{PageDirectory, PageOptions, PublishOptions, Publisher, TagSource};

use crate::environment::Publish;
use crate::runtime::{self, Runtime};

/// Never dropped, as the runtime. In a forked child it is the parent's, and does nothing.
static PUBLISHER: OnceLock<Publisher> = OnceLock::new();

/// Publishes the page of the process's runtime.
pub(crate) fn start(runtime: &Runtime, how: &Publish) {
    if how.is_on {
        match publish(runtime, how) {
            // A child that was forked before its own start has none.
            Ok(publisher) => drop(PUBLISHER.set(publisher)),
            Err(error) => tracing::warn!("warpool top does not show this process: {error}"),
        }
    }
}

fn publish(runtime: &Runtime, how: &Publish) -> warpool::Result<Publisher> {
    let folder = how.folder.clone().unwrap_or_else(PageDirectory::default_path);
    let options = PageOptions { command: command() };
    let page = Arc::new(PageDirectory::open(&folder)?.publish(runtime.instance(), &options)?);
    let tags: TagSource = Arc::new(|| runtime::started().map(Runtime::tags).unwrap_or_default());
    let options = PublishOptions {
        accepts_limits: how.accepts_limits,
        host: Some(runtime.pinned.allocator().clone()),
        tags: Some(tags),
    };
    Publisher::start(&page, runtime.shared_allocator(), options)
}

/// The command line of this process, with the program's name without its folder.
fn command() -> String {
    let mut arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let program = arguments.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().to_owned();
    arguments.fold(name, |command, argument| command + " " + &argument)
}
