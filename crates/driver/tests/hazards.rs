//! Small wrong programs, each with its corrected twin: the wrong one gives exactly its hazard, the other none.

mod common;

use common::{BYTES, DEVICE, KERNELS, Lab, WORDS};
use warpool_driver::sim::{HazardKind, SimConfig};
use warpool_driver::*;

/// A program, wrong unless `fixed`. Errors of the wrong one do not matter: the log must tell.
struct Program {
    name: &'static str,
    hazard: HazardKind,
    run: fn(&Lab, fixed: bool) -> Result<()>,
}

const PROGRAMS: &[Program] = &[
    Program {
        name: "a second stream reads without waiting for the first",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            let out = lab.gpu.mem_alloc(DEVICE, BYTES)?;
            lab.fill(1, lab.one)?;
            if fixed {
                lab.order(lab.one, lab.two)?;
            }
            lab.gpu.copy(out.into(), lab.memory.into(), BYTES, lab.two)
        },
    },
    Program {
        name: "a second stream overwrites what the first still reads",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            let out = lab.gpu.mem_alloc(DEVICE, BYTES)?;
            lab.fill(1, lab.one)?;
            lab.gpu.stream_synchronize(lab.one)?;
            lab.gpu.copy(out.into(), lab.memory.into(), BYTES, lab.one)?;
            if fixed {
                lab.order(lab.one, lab.two)?;
            }
            lab.fill(2, lab.two)
        },
    },
    Program {
        name: "the event was recorded before the work that matters",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            if !fixed {
                lab.gpu.event_record(lab.event, lab.one, EventScope::Plain)?;
            }
            lab.fill(1, lab.one)?;
            if fixed {
                lab.gpu.event_record(lab.event, lab.one, EventScope::Plain)?;
            }
            lab.gpu.stream_wait_event(lab.two, lab.event, EventScope::Plain)?;
            lab.fill(2, lab.two)
        },
    },
    Program {
        name: "a download does not wait for a non-blocking stream",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            lab.fill(1, lab.one)?;
            if fixed {
                lab.gpu.stream_synchronize(lab.one)?;
            }
            lab.gpu.download(DEVICE, lab.memory, &mut [0; 16])
        },
    },
    Program {
        name: "one piece of memory at two addresses, used from two streams",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            let (here, physical) = lab.mapped()?;
            let there = lab.map(physical)?;
            lab.gpu.fill(here, Pattern::U8(1), 64, lab.one)?;
            if fixed {
                lab.order(lab.one, lab.two)?;
            }
            lab.gpu.fill(there, Pattern::U8(2), 64, lab.two)
        },
    },
    Program {
        name: "two branches of a graph write the same bytes",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            let branch = lab.gpu.event_create(DEVICE, EventOptions::default())?;
            let exec = lab.capture(|| {
                lab.gpu.event_record(branch, lab.one, EventScope::Plain)?;
                lab.gpu.stream_wait_event(lab.two, branch, EventScope::Plain)?;
                lab.fill(1, lab.one)?;
                if fixed {
                    lab.order(lab.one, lab.two)?;
                }
                lab.fill(2, lab.two)?;
                lab.order(lab.two, lab.one)
            })?;
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a replay does not wait for the stream that feeds it",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            let exec = lab.capture(|| lab.add(lab.memory, WORDS, 1, lab.one))?;
            lab.fill(0, lab.two)?;
            if fixed {
                lab.order(lab.two, lab.one)?;
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "pool memory used in a stream that knows nothing of its allocation",
        hazard: HazardKind::Race,
        run: |lab, fixed| {
            let pool = lab.gpu.pool_default(DEVICE)?;
            let ptr = lab.gpu.pool_alloc(pool, BYTES, lab.one)?;
            if fixed {
                lab.order(lab.one, lab.two)?;
            }
            lab.gpu.fill(ptr, Pattern::U8(1), BYTES, lab.two)
        },
    },
    Program {
        name: "pool memory freed in one stream while another uses it",
        hazard: HazardKind::UseAfterFree,
        run: |lab, fixed| {
            let pool = lab.gpu.pool_default(DEVICE)?;
            let ptr = lab.gpu.pool_alloc(pool, BYTES, lab.one)?;
            lab.order(lab.one, lab.two)?;
            lab.gpu.fill(ptr, Pattern::U8(1), BYTES, lab.two)?;
            if fixed {
                lab.order(lab.two, lab.one)?;
            }
            lab.gpu.pool_free(ptr, lab.one)
        },
    },
    Program {
        name: "a kernel with a pointer that was freed",
        hazard: HazardKind::UseAfterFree,
        run: |lab, fixed| {
            let ptr = lab.gpu.mem_alloc(DEVICE, BYTES)?;
            lab.gpu.fill(ptr, Pattern::U8(0), BYTES, lab.one)?;
            if fixed {
                lab.add(ptr, WORDS, 1, lab.one)?;
                lab.gpu.mem_free(ptr)
            } else {
                lab.gpu.mem_free(ptr)?;
                lab.add(ptr, WORDS, 1, lab.one)
            }
        },
    },
    Program {
        name: "a copy into memory that was freed",
        hazard: HazardKind::UseAfterFree,
        run: |lab, fixed| {
            let ptr = lab.gpu.mem_alloc(DEVICE, BYTES)?;
            if !fixed {
                lab.gpu.mem_free(ptr)?;
            }
            lab.gpu.copy(ptr.into(), lab.memory.into(), BYTES, lab.one)
        },
    },
    Program {
        name: "memory used after it went back to an allocator",
        hazard: HazardKind::UseAfterFree,
        run: |lab, fixed| {
            lab.gpu.suballocated(lab.memory, 512, lab.one);
            if fixed {
                lab.gpu.fill(lab.memory, Pattern::U8(1), 512, lab.one)?;
            }
            lab.gpu.suballocation_freed(lab.memory, 512);
            if !fixed {
                lab.gpu.fill(lab.memory, Pattern::U8(1), 512, lab.one)?;
            }
            Ok(())
        },
    },
    Program {
        name: "memory unmapped under a running kernel",
        hazard: HazardKind::UseAfterUnmap,
        run: |lab, fixed| {
            let (ptr, _) = lab.mapped()?;
            lab.add(ptr, WORDS, 1, lab.one)?;
            if fixed {
                lab.gpu.stream_synchronize(lab.one)?;
            }
            lab.gpu.vm_unmap(ptr, 2 << 20)
        },
    },
    Program {
        name: "a kernel on addresses that were unmapped before",
        hazard: HazardKind::UseAfterUnmap,
        run: |lab, fixed| {
            let (ptr, physical) = lab.mapped()?;
            lab.gpu.vm_unmap(ptr, 2 << 20)?;
            let ptr = if fixed { lab.map(physical)? } else { ptr };
            lab.add(ptr, WORDS, 1, lab.one)
        },
    },
    Program {
        name: "other memory mapped in its place under a running kernel",
        hazard: HazardKind::UseAfterUnmap,
        run: |lab, fixed| {
            let (ptr, _) = lab.mapped()?;
            let other = lab.gpu.vm_create(DEVICE, 2 << 20, PhysicalOptions::default())?;
            lab.add(ptr, WORDS, 1, lab.one)?;
            if fixed {
                lab.gpu.stream_synchronize(lab.one)?;
            }
            lab.gpu.vm_unmap(ptr, 2 << 20)?;
            lab.gpu.vm_map(ptr, other)?;
            let all = [DeviceAccess { device: DEVICE, access: Access::ReadWrite }];
            lab.gpu.vm_set_access(ptr, 2 << 20, &all)
        },
    },
    Program {
        name: "a copy onto itself",
        hazard: HazardKind::OverlappingCopy,
        run: |lab, fixed| {
            let distance = if fixed { 1024 } else { 1023 };
            lab.gpu.copy(lab.memory.offset(distance).into(), lab.memory.into(), 1024, lab.one)
        },
    },
    Program {
        name: "a graph replayed after the event that it records was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |lab, fixed| {
            let exec = lab.capture(|| lab.gpu.event_record(lab.event, lab.one, EventScope::External))?;
            if !fixed {
                lab.gpu.event_destroy(lab.event)?;
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a kernel beyond the end of its memory",
        hazard: HazardKind::IllegalAccess,
        run: |lab, fixed| {
            let (ptr, _) = lab.mapped()?;
            let words = if fixed { WORDS } else { (2 << 18) + 1 };
            lab.add(ptr, words, 1, lab.one)
        },
    },
    Program {
        name: "a kernel one word beyond the end of a small allocation",
        hazard: HazardKind::IllegalAccess,
        run: |lab, fixed| {
            let ptr = lab.gpu.mem_alloc(DEVICE, 16)?;
            lab.add(ptr, if fixed { 4 } else { 5 }, 1, lab.one)
        },
    },
    Program {
        name: "a kernel given a number where it takes an address",
        hazard: HazardKind::KernelFault,
        run: |lab, fixed| {
            let module = lab.gpu.module_load(DEVICE, &KERNELS)?;
            let add = lab.gpu.function_get(module, "add")?;
            let first = if fixed { lab.memory.into() } else { 1_u64.into() };
            lab.gpu.kernel_launch(add, LaunchShape::ONE, &[first, 4_u32.into(), 1_u32.into()], lab.one)
        },
    },
    Program {
        name: "mapped memory without access",
        hazard: HazardKind::IllegalAccess,
        run: |lab, fixed| {
            let physical = lab.gpu.vm_create(DEVICE, 2 << 20, PhysicalOptions::default())?;
            let ptr = lab.gpu.vm_reserve(2 << 20, 0, None)?;
            lab.gpu.vm_map(ptr, physical)?;
            let access = if fixed { Access::ReadWrite } else { Access::Read };
            lab.gpu.vm_set_access(ptr, 2 << 20, &[DeviceAccess { device: DEVICE, access }])?;
            lab.add(ptr, WORDS, 1, lab.one)
        },
    },
    Program {
        name: "a sum over memory that nobody filled",
        hazard: HazardKind::UninitializedRead,
        run: |lab, fixed| {
            let out = lab.gpu.mem_alloc(DEVICE, 4)?;
            lab.gpu.fill(out, Pattern::U32(0), 1, lab.one)?;
            if fixed {
                lab.fill(0, lab.one)?;
            }
            lab.sum(out, lab.memory, WORDS, lab.one)
        },
    },
    Program {
        name: "a block handed to a second stream while the first still writes it",
        hazard: HazardKind::ReusedInFlight,
        run: |lab, fixed| {
            lab.gpu.suballocated(lab.memory, 512, lab.one);
            lab.gpu.fill(lab.memory, Pattern::U8(1), 512, lab.one)?;
            lab.gpu.suballocation_freed(lab.memory, 512);
            if fixed {
                lab.gpu.stream_synchronize(lab.one)?;
            }
            lab.gpu.suballocated(lab.memory, 512, lab.two);
            lab.gpu.fill(lab.memory, Pattern::U8(2), 512, lab.two)
        },
    },
    Program {
        name: "a block reused by its stream while another stream still reads it",
        hazard: HazardKind::ReusedInFlight,
        run: |lab, fixed| {
            let out = lab.gpu.mem_alloc(DEVICE, BYTES)?;
            lab.gpu.suballocated(lab.memory, BYTES, lab.one);
            lab.fill(1, lab.one)?;
            lab.order(lab.one, lab.two)?;
            lab.gpu.copy(out.into(), lab.memory.into(), BYTES, lab.two)?;
            if fixed {
                // What record_stream is for.
                lab.order(lab.two, lab.one)?;
            }
            lab.gpu.suballocation_freed(lab.memory, BYTES);
            lab.gpu.suballocated(lab.memory, BYTES, lab.one);
            lab.fill(2, lab.one)
        },
    },
    Program {
        name: "the host reads a result before the copy has ended",
        hazard: HazardKind::HostRace,
        run: |lab, fixed| {
            let host = lab.gpu.host_alloc(DEVICE, BYTES, HostOptions::default())?;
            lab.fill(1, lab.one)?;
            lab.gpu.copy(host.into(), lab.memory.into(), BYTES, lab.one)?;
            if fixed {
                lab.gpu.stream_synchronize(lab.one)?;
            }
            lab.gpu.host_read(host, &mut [0; 16])
        },
    },
    Program {
        name: "the host writes the next input before the copy of the last has ended",
        hazard: HazardKind::HostRace,
        run: |lab, fixed| {
            let host = lab.gpu.host_alloc(DEVICE, BYTES, HostOptions::default())?;
            lab.gpu.host_write(host, &[1; BYTES as usize])?;
            lab.gpu.copy(lab.memory.into(), host.into(), BYTES, lab.one)?;
            if fixed {
                lab.gpu.event_record(lab.event, lab.one, EventScope::Plain)?;
                lab.gpu.event_synchronize(lab.event)?;
            }
            lab.gpu.host_write(host, &[2; BYTES as usize])
        },
    },
    Program {
        name: "an event recorded after it was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |lab, fixed| {
            if !fixed {
                lab.gpu.event_destroy(lab.event)?;
            }
            lab.gpu.event_record(lab.event, lab.one, EventScope::Plain)
        },
    },
    Program {
        name: "work for a stream that was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |lab, fixed| {
            if !fixed {
                lab.gpu.stream_destroy(lab.one)?;
            }
            lab.fill(1, lab.one)
        },
    },
    Program {
        name: "a graph launched after it was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |lab, fixed| {
            let exec = lab.capture(|| lab.fill(1, lab.one))?;
            if !fixed {
                lab.gpu.graph_exec_destroy(exec)?;
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a graph replayed over freed memory",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |lab, fixed| {
            let ptr = lab.gpu.mem_alloc(DEVICE, BYTES)?;
            let exec = lab.capture(|| lab.gpu.fill(ptr, Pattern::U8(1), BYTES, lab.one))?;
            lab.gpu.graph_launch(exec, lab.one)?;
            if !fixed {
                lab.gpu.mem_free(ptr)?;
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a graph replayed over a block that went back to its allocator",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |lab, fixed| {
            let exec = lab.capture(|| lab.fill(1, lab.one))?;
            if !fixed {
                lab.gpu.suballocation_freed(lab.memory, BYTES);
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a graph replayed over a block that went back to its allocator and has another owner",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |lab, fixed| {
            lab.gpu.suballocated(lab.memory, BYTES, lab.one);
            let exec = lab.capture(|| lab.fill(1, lab.one))?;
            lab.gpu.graph_launch(exec, lab.one)?;
            if !fixed {
                lab.gpu.suballocation_freed(lab.memory, BYTES);
                lab.gpu.suballocated(lab.memory, BYTES, lab.one);
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a graph replayed over memory that was unmapped",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |lab, fixed| {
            let (ptr, _) = lab.mapped()?;
            let exec = lab.capture(|| lab.add(ptr, WORDS, 1, lab.one))?;
            lab.gpu.graph_launch(exec, lab.one)?;
            lab.gpu.stream_synchronize(lab.one)?;
            if !fixed {
                lab.gpu.vm_unmap(ptr, 2 << 20)?;
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a graph replayed over memory that was freed to its pool",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |lab, fixed| {
            let pool = lab.gpu.pool_default(DEVICE)?;
            let ptr = lab.gpu.pool_alloc(pool, BYTES, lab.one)?;
            let exec = lab.capture(|| lab.gpu.fill(ptr, Pattern::U8(1), BYTES, lab.one))?;
            if !fixed {
                lab.gpu.pool_free(ptr, lab.one)?;
            }
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "memory freed while a replay over it is under way",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |lab, fixed| {
            let (ptr, _) = lab.mapped()?;
            let exec = lab.capture(|| lab.add(ptr, WORDS, 1, lab.one))?;
            lab.gpu.graph_launch(exec, lab.one)?;
            if fixed {
                lab.gpu.stream_synchronize(lab.one)?;
            }
            lab.gpu.vm_unmap(ptr, 2 << 20)
        },
    },
    Program {
        name: "a graph whose kernel was given the address of freed memory",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |lab, fixed| {
            let ptr = lab.gpu.mem_alloc(DEVICE, BYTES)?;
            lab.gpu.mem_free(ptr)?;
            lab.gpu.capture_begin(lab.one, CaptureMode::Relaxed)?;
            lab.add(lab.memory, WORDS, 1, lab.one)?;
            let graph = lab.gpu.capture_end(lab.one)?;
            let exec = lab.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
            let node = lab.gpu.graph_topology(graph)?.nodes[0].id;
            let ptr = if fixed { lab.memory } else { ptr };
            let args = [ptr.into(), KernelArg::U32(WORDS), KernelArg::U32(2)];
            lab.gpu.graph_exec_set_kernel(exec, node, lab.add, LaunchShape::ONE, &args)?;
            lab.gpu.graph_launch(exec, lab.one)
        },
    },
    Program {
        name: "a capture left unjoined",
        hazard: HazardKind::CaptureUnjoined,
        run: |lab, fixed| {
            lab.capture(|| {
                lab.order(lab.one, lab.two)?;
                lab.fill(1, lab.two)?;
                if fixed { lab.order(lab.two, lab.one) } else { Ok(()) }
            })?;
            Ok(())
        },
    },
    Program {
        name: "an allocation in the middle of a capture",
        hazard: HazardKind::CaptureInvalidated,
        run: |lab, fixed| {
            let mode = if fixed { CaptureMode::Relaxed } else { CaptureMode::Global };
            lab.gpu.capture_begin(lab.one, mode)?;
            let ptr = lab.gpu.mem_alloc(DEVICE, BYTES);
            let graph = lab.gpu.capture_end(lab.one)?;
            lab.gpu.graph_destroy(graph)?;
            ptr.map(drop)
        },
    },
    Program {
        name: "a wait for an event from outside in the middle of a capture",
        hazard: HazardKind::CaptureInvalidated,
        run: |lab, fixed| {
            lab.gpu.event_record(lab.event, lab.two, EventScope::Plain)?;
            let scope = if fixed { EventScope::External } else { EventScope::Plain };
            lab.capture(|| lab.gpu.stream_wait_event(lab.one, lab.event, scope)).map(drop)
        },
    },
];

fn run(program: &Program, seed: u64, fixed: bool) -> Vec<String> {
    let mut config = SimConfig::default().with_seed(seed);
    config.check_uninitialized = program.hazard == HazardKind::UninitializedRead;
    let lab = Lab::new(config).expect("the lab itself is correct");
    let outcome = (program.run)(&lab, fixed);
    let rest = lab.gpu.device_synchronize(DEVICE);
    if fixed {
        outcome.and(rest).unwrap_or_else(|error| panic!("{}, fixed, seed {seed}: {error}", program.name));
    }
    lab.gpu.hazards().iter().map(ToString::to_string).collect()
}

#[test]
fn wrong_programs_give_their_hazard_and_corrected_ones_none() {
    for program in PROGRAMS {
        for seed in 0..16 {
            let log = run(program, seed, false);
            assert_eq!(log.len(), 1, "{}, seed {seed}: {log:#?}", program.name);
            assert!(log[0].starts_with(program.hazard.name()), "{}, seed {seed}: {log:#?}", program.name);
            let log = run(program, seed, true);
            assert!(log.is_empty(), "{}, fixed, seed {seed}: {log:#?}", program.name);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_log_twice() {
    for program in PROGRAMS {
        for seed in 0..4 {
            assert_eq!(run(program, seed, false), run(program, seed, false), "{}, seed {seed}", program.name);
        }
    }
}

#[test]
fn an_entry_names_operations_streams_bytes_and_the_reason() {
    let entry = |name: &str| run(PROGRAMS.iter().find(|p| p.name == name).expect("a program"), 0, false).remove(0);
    let race = entry("a second stream overwrites what the first still reads");
    for part in [
        "copy #",
        "fill #",
        "in stream ",
        "4096 bytes",
        "has waited for stream 3 only up to operation 1; this was operation 2",
    ] {
        assert!(race.contains(part), "{race:?} says nothing of {part:?}");
    }
    let graph = entry("two branches of a graph write the same bytes");
    assert!(graph.contains("the graph has no path from node"), "{graph}");
    let host = entry("the host reads a result before the copy has ended");
    assert!(host.contains("host_read #") && host.contains("of the host memory pinned by call #"), "{host}");
    let freed = entry("a kernel with a pointer that was freed");
    assert!(freed.contains("kernel add #") && freed.contains("freed by call #"), "{freed}");
}

#[test]
fn a_replay_over_memory_that_is_gone_names_the_graph_and_the_address() {
    let over_gone = PROGRAMS.iter().filter(|program| program.hazard == HazardKind::GraphUsesFreedMemory);
    let entries: Vec<String> = over_gone.map(|program| run(program, 0, false).remove(0)).collect();
    assert!(entries.len() >= 7);
    for entry in &entries {
        assert!(entry.contains("(node 0 of graph exec 1, launch #") && entry.contains(" at 0x"), "{entry}");
    }
}

#[test]
fn a_kernel_given_new_arguments_since_may_use_what_was_handed_out_again() -> Result<()> {
    let lab = Lab::new(SimConfig::default())?;
    lab.gpu.suballocated(lab.memory, BYTES, lab.one);
    lab.gpu.capture_begin(lab.one, CaptureMode::Relaxed)?;
    lab.add(lab.memory, WORDS, 1, lab.one)?;
    let graph = lab.gpu.capture_end(lab.one)?;
    let exec = lab.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    let node = lab.gpu.graph_topology(graph)?.nodes[0].id;
    lab.gpu.suballocation_freed(lab.memory, BYTES);
    lab.gpu.suballocated(lab.memory, BYTES, lab.one);
    let args = [lab.memory.into(), KernelArg::U32(WORDS), KernelArg::U32(2)];
    lab.gpu.graph_exec_set_kernel(exec, node, lab.add, LaunchShape::ONE, &args)?;
    lab.gpu.graph_launch(exec, lab.one)?;
    lab.gpu.device_synchronize(DEVICE)?;
    assert!(lab.gpu.hazards().is_empty(), "{:#?}", lab.gpu.hazards());
    Ok(())
}

#[test]
fn an_illegal_access_breaks_the_device_for_good() -> Result<()> {
    let lab = Lab::new(SimConfig::default().with_devices(2))?;
    lab.add(DevicePtr(0x1234_5000), 1, 1, lab.one)?;
    let codes = [
        lab.gpu.stream_synchronize(lab.one).map(drop),
        lab.gpu.stream_synchronize(lab.two).map(drop),
        lab.gpu.mem_alloc(DEVICE, 512).map(drop),
        lab.gpu.mem_info(DEVICE).map(drop),
        lab.gpu.event_query(lab.event).map(drop),
        lab.gpu.mem_free(lab.memory),
        lab.gpu.stream_destroy(lab.one),
    ];
    for outcome in codes {
        let error = outcome.expect_err("the device is broken");
        assert!(error.is_sticky() && error.code == ErrorCode::IllegalAddress, "{error}");
    }
    lab.gpu.mem_alloc(DeviceId(1), 512)?;
    Ok(())
}

#[test]
fn the_default_stream_waits_for_a_blocking_stream_that_was_destroyed_at_work() -> Result<()> {
    for seed in 0..8 {
        let lab = Lab::new(SimConfig::default().with_seed(seed))?;
        let blocking = lab.gpu.stream_create(DEVICE, StreamOptions { non_blocking: false, priority: 0 })?;
        lab.fill(1, blocking)?;
        lab.gpu.stream_destroy(blocking)?;
        lab.fill(2, lab.gpu.stream_default(DEVICE)?)?;
        lab.gpu.device_synchronize(DEVICE)?;
        assert!(lab.gpu.hazards().is_empty(), "seed {seed}: {:#?}", lab.gpu.hazards());
    }
    Ok(())
}
