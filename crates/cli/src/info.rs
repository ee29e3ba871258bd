//! `warpool info`: devices, their features, and NVIDIA's libraries on this machine.

use serde_json::{Value, json};
use warpool_cuda::CudaDriver;
use warpool_driver::{DeviceId, DeviceProperties, Driver};

use crate::driver::{self, SimArgs};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// Lists devices with their features, and the NVIDIA libraries that were found
///
/// Without --driver it lists the devices of every driver, or why a driver cannot be opened.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 success, 1 a driver call failed, 2 the driver of --driver cannot be opened.\n\n\
    Examples:\n  \
    warpool info\n  \
    warpool info --driver cuda --json\n  \
    warpool info --driver sim --sim-memory 80GiB"
)]
pub struct Args {
    /// List only this driver: sim or cuda
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    #[command(flatten)]
    sim: SimArgs,
    /// One JSON object per driver, device and library
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    match &args.driver {
        Some(name) => show_driver(&*driver::open(name, &args.sim, 0)?, output)?,
        None => {
            show_cuda_or_reason(output)?;
            show_driver(&*driver::open("sim", &args.sim, 0)?, output)?;
        }
    }
    show_libraries(output)?;
    Ok(Verdict::Success)
}

fn show_cuda_or_reason(output: &mut Output) -> Result<()> {
    let reason = match CudaDriver::open() {
        Err(error) => error.to_string(),
        Ok(driver) => match show_driver(&driver, output) {
            // A driver that opens but fails gets a line too.
            Err(CommandError::Driver(error)) => error.to_string(),
            other => return other,
        },
    };
    output.object(&json!({ "kind": "driver", "driver": "cuda", "available": false, "reason": reason }))?;
    output.line(format!("driver cuda: not available: {reason}\n"))?;
    Ok(())
}

fn show_driver(driver: &dyn Driver, output: &mut Output) -> Result<()> {
    let kind = driver.kind();
    let count = driver.device_count()?;
    let devices: Vec<_> = (0..count)
        .map(DeviceId)
        .map(|device| Ok((device, driver.device_properties(device)?)))
        .collect::<Result<_>>()?;

    output.object(&json!({ "kind": "driver", "driver": kind, "available": true, "devices": count }))?;
    for (device, properties) in devices {
        output.object(&object(kind, device, &properties))?;
        let mut table = output::table(&["property", "value"]);
        table.add_rows(rows(&properties).map(|(name, value)| [name.to_owned(), value]));
        output.table(&format!("driver {kind}, {device}: {}", properties.name), &table)?;
    }
    Ok(())
}

fn object(kind: &str, device: DeviceId, properties: &DeviceProperties) -> Value {
    // All fields by name, so that a new one is not forgotten.
    let DeviceProperties {
        name,
        uuid,
        compute_capability: (major, minor),
        bytes_total,
        multiprocessors,
        granularity,
        virtual_memory,
        host_registration,
        async_pools,
        conditional_nodes,
        ipc_events,
        share_posix_fd,
        share_fabric,
        rdma,
        multicast_granularity,
        peers,
    } = properties;
    json!({
        "kind": "device",
        "driver": kind,
        "device": device.0,
        "name": name,
        "uuid": uuid.to_string(),
        "compute_capability": format!("{major}.{minor}"),
        "bytes_total": bytes_total,
        "multiprocessors": multiprocessors,
        "granularity": granularity,
        "virtual_memory": virtual_memory,
        "host_registration": host_registration,
        "async_pools": async_pools,
        "conditional_nodes": conditional_nodes,
        "ipc_events": ipc_events,
        "share_posix_fd": share_posix_fd,
        "share_fabric": share_fabric,
        "rdma": rdma,
        "multicast_granularity": multicast_granularity,
        "peers": peers.iter().map(|peer| peer.0).collect::<Vec<_>>(),
    })
}

fn rows(properties: &DeviceProperties) -> [(&'static str, String); 15] {
    let yes = |supported: bool| if supported { "yes" } else { "no" }.to_owned();
    let (major, minor) = properties.compute_capability;
    let multicast = properties.multicast_granularity;
    let peers: Vec<String> = properties.peers.iter().map(ToString::to_string).collect();
    [
        ("UUID", properties.uuid.to_string()),
        ("compute capability", format!("{major}.{minor}")),
        ("memory", size::format(properties.bytes_total)),
        ("multiprocessors", properties.multiprocessors.to_string()),
        ("granularity", size::format(properties.granularity)),
        ("virtual memory", yes(properties.virtual_memory)),
        ("host registration", yes(properties.host_registration)),
        ("async pools", yes(properties.async_pools)),
        ("conditional nodes", yes(properties.conditional_nodes)),
        ("interprocess events", yes(properties.ipc_events)),
        ("sharing by file descriptor", yes(properties.share_posix_fd)),
        ("sharing over a fabric", yes(properties.share_fabric)),
        ("RDMA", yes(properties.rdma)),
        ("multicast granularity", if multicast == 0 { "no multicast".to_owned() } else { size::format(multicast) }),
        ("peers", if peers.is_empty() { "none".to_owned() } else { peers.join(", ") }),
    ]
}

fn show_libraries(output: &mut Output) -> Result<()> {
    let mut table = output::table(&["library", "version", "opened as, or what is unavailable without it"]);
    for library in warpool_cuda::libraries() {
        let found = library.found.as_ref();
        let version = found.and_then(|found| found.version.as_deref());
        output.object(&json!({
            "kind": "library",
            "library": library.name,
            "found": found.is_some(),
            "version": version,
            "opened_as": found.map(|found| &found.name),
            "if_missing": library.if_missing,
        }))?;
        table.add_row(match found {
            Some(found) => [library.name, version.unwrap_or("unknown"), &found.name],
            None => [library.name, "missing", library.if_missing],
        });
    }
    output.table("NVIDIA's libraries on this machine", &table)?;
    Ok(())
}
