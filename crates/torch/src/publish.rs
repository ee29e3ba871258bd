//! The page of this process, which `warpool top` shows: published when the runtime starts, unless `WARPOOL_PUBLISH` is
//! `False`. Nothing here fails a start: a program that cannot publish runs as well, with a warning.

use std::sync::{Arc, OnceLock};

use warpool::Instance;
use warpool::memory::{DeviceAllocator, HostAllocator};
use warpool::share::{
    LedgerPages, PageDirectory, PageOptions, ProcessPage, PublishOptions, Publisher, SharedPages, TagSource,
};

use crate::environment::Publish;

/// Never dropped, as the runtime. In a forked child it is the parent's, and does nothing.
static PUBLISHER: OnceLock<Publisher> = OnceLock::new();

/// The folder, and the page in it; made when it is first needed.
static PAGE: OnceLock<(PageDirectory, Arc<ProcessPage>)> = OnceLock::new();

/// What is published of the process's runtime.
pub(crate) struct Published<'a> {
    pub(crate) instance: &'a Instance,
    pub(crate) allocator: &'a Arc<dyn DeviceAllocator>,
    pub(crate) host: &'a HostAllocator,
    pub(crate) tags: TagSource,
}

/// Publishes its page, and joins the processes that share its GPUs.
pub(crate) fn start(published: Published<'_>, how: &Publish) {
    share(&**published.allocator, how);
    if how.is_on {
        match publish(published, how) {
            // A child that was forked before its own start has none.
            Ok(publisher) => drop(PUBLISHER.set(publisher)),
            Err(error) => tracing::warn!("warpool top does not show this process: {error}"),
        }
    }
}

/// Joins the processes that share the GPUs, if the settings say so. What it cannot join it uses alone, with a warning.
pub(crate) fn share(allocator: &dyn DeviceAllocator, how: &Publish) {
    if !allocator.settings().share.enabled {
        return;
    }
    let joined = page(allocator.instance(), how).and_then(|(directory, page)| {
        let pages: Arc<dyn LedgerPages> = Arc::new(SharedPages::new(directory.clone(), Arc::clone(page)));
        allocator.share(&pages)
    });
    if let Err(error) = joined {
        tracing::warn!("share:True has no effect: {error}");
    }
}

fn page(instance: &Instance, how: &Publish) -> warpool::Result<&'static (PageDirectory, Arc<ProcessPage>)> {
    if let Some(page) = PAGE.get() {
        return Ok(page);
    }
    let folder = how.folder.clone().unwrap_or_else(PageDirectory::default_path);
    let directory = PageDirectory::open(&folder)?;
    let page = Arc::new(directory.publish(instance, &PageOptions { command: command() })?);
    Ok(PAGE.get_or_init(|| (directory, page)))
}

fn publish(published: Published<'_>, how: &Publish) -> warpool::Result<Publisher> {
    let Published { instance, allocator, host, tags } = published;
    let (_, page) = page(instance, how)?;
    let options = PublishOptions { accepts_limits: how.accepts_limits, host: Some(host.clone()), tags: Some(tags) };
    Publisher::start(page, allocator, options)
}

/// The command line of this process, with the program's name without its folder.
fn command() -> String {
    let mut arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let program = arguments.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().to_owned();
    arguments.fold(name, |command, argument| command + " " + &argument)
}
