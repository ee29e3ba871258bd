//! Small wrong programs, each with a corrected version: the wrong one gives exactly its hazard, the other none.

use crate::fixture::{BYTES, DEVICE, Fixture, KERNELS, WORDS};
use warpool_driver::sim::{HazardKind, SimConfig};
use warpool_driver::*;

/// A program, wrong unless `fixed`. Errors of the wrong version do not matter, only the log.
struct Program {
    name: &'static str,
    hazard: HazardKind,
    run: fn(&Fixture, fixed: bool) -> Result<()>,
}

const PROGRAMS: &[Program] = &[
    Program {
        name: "a second stream reads without waiting for the first",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            let out = fixture.gpu.mem_alloc(DEVICE, BYTES)?;
            fixture.fill(1, fixture.one)?;
            if fixed {
                fixture.order(fixture.one, fixture.two)?;
            }
            fixture.gpu.copy(out.into(), fixture.memory.into(), BYTES, fixture.two)
        },
    },
    Program {
        name: "a second stream overwrites what the first still reads",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            let out = fixture.gpu.mem_alloc(DEVICE, BYTES)?;
            fixture.fill(1, fixture.one)?;
            fixture.gpu.stream_synchronize(fixture.one)?;
            fixture.gpu.copy(out.into(), fixture.memory.into(), BYTES, fixture.one)?;
            if fixed {
                fixture.order(fixture.one, fixture.two)?;
            }
            fixture.fill(2, fixture.two)
        },
    },
    Program {
        name: "the event was recorded before the work that matters",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            if !fixed {
                fixture.gpu.event_record(fixture.event, fixture.one, EventScope::Plain)?;
            }
            fixture.fill(1, fixture.one)?;
            if fixed {
                fixture.gpu.event_record(fixture.event, fixture.one, EventScope::Plain)?;
            }
            fixture.gpu.stream_wait_event(fixture.two, fixture.event, EventScope::Plain)?;
            fixture.fill(2, fixture.two)
        },
    },
    Program {
        name: "a download does not wait for a non-blocking stream",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            fixture.fill(1, fixture.one)?;
            if fixed {
                fixture.gpu.stream_synchronize(fixture.one)?;
            }
            fixture.gpu.download(DEVICE, fixture.memory, &mut [0; 16])
        },
    },
    Program {
        name: "memory mapped at two addresses, used from two streams",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            let (here, physical) = fixture.mapped()?;
            let there = fixture.map(physical)?;
            fixture.gpu.fill(here, Pattern::U8(1), 64, fixture.one)?;
            if fixed {
                fixture.order(fixture.one, fixture.two)?;
            }
            fixture.gpu.fill(there, Pattern::U8(2), 64, fixture.two)
        },
    },
    Program {
        name: "two branches of a graph write the same bytes",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            let branch = fixture.gpu.event_create(DEVICE, EventOptions::default())?;
            let exec = fixture.capture(|| {
                fixture.gpu.event_record(branch, fixture.one, EventScope::Plain)?;
                fixture.gpu.stream_wait_event(fixture.two, branch, EventScope::Plain)?;
                fixture.fill(1, fixture.one)?;
                if fixed {
                    fixture.order(fixture.one, fixture.two)?;
                }
                fixture.fill(2, fixture.two)?;
                fixture.order(fixture.two, fixture.one)
            })?;
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a graph launch does not wait for the stream that writes its input",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            let exec = fixture.capture(|| fixture.add(fixture.memory, WORDS, 1, fixture.one))?;
            fixture.fill(0, fixture.two)?;
            if fixed {
                fixture.order(fixture.two, fixture.one)?;
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "pool memory used in a stream that did not wait for its allocation",
        hazard: HazardKind::Race,
        run: |fixture, fixed| {
            let pool = fixture.gpu.pool_default(DEVICE)?;
            let ptr = fixture.gpu.pool_alloc(pool, BYTES, fixture.one)?;
            if fixed {
                fixture.order(fixture.one, fixture.two)?;
            }
            fixture.gpu.fill(ptr, Pattern::U8(1), BYTES, fixture.two)
        },
    },
    Program {
        name: "pool memory freed in one stream while another uses it",
        hazard: HazardKind::UseAfterFree,
        run: |fixture, fixed| {
            let pool = fixture.gpu.pool_default(DEVICE)?;
            let ptr = fixture.gpu.pool_alloc(pool, BYTES, fixture.one)?;
            fixture.order(fixture.one, fixture.two)?;
            fixture.gpu.fill(ptr, Pattern::U8(1), BYTES, fixture.two)?;
            if fixed {
                fixture.order(fixture.two, fixture.one)?;
            }
            fixture.gpu.pool_free(ptr, fixture.one)
        },
    },
    Program {
        name: "a kernel with a pointer that was freed",
        hazard: HazardKind::UseAfterFree,
        run: |fixture, fixed| {
            let ptr = fixture.gpu.mem_alloc(DEVICE, BYTES)?;
            fixture.gpu.fill(ptr, Pattern::U8(0), BYTES, fixture.one)?;
            if fixed {
                fixture.add(ptr, WORDS, 1, fixture.one)?;
                fixture.gpu.mem_free(ptr)
            } else {
                fixture.gpu.mem_free(ptr)?;
                fixture.add(ptr, WORDS, 1, fixture.one)
            }
        },
    },
    Program {
        name: "a copy into memory that was freed",
        hazard: HazardKind::UseAfterFree,
        run: |fixture, fixed| {
            let ptr = fixture.gpu.mem_alloc(DEVICE, BYTES)?;
            if !fixed {
                fixture.gpu.mem_free(ptr)?;
            }
            fixture.gpu.copy(ptr.into(), fixture.memory.into(), BYTES, fixture.one)
        },
    },
    Program {
        name: "memory used after its allocator freed it",
        hazard: HazardKind::UseAfterFree,
        run: |fixture, fixed| {
            fixture.gpu.suballocated(fixture.memory, 512, fixture.one);
            if fixed {
                fixture.gpu.fill(fixture.memory, Pattern::U8(1), 512, fixture.one)?;
            }
            fixture.gpu.suballocation_freed(fixture.memory, 512);
            if !fixed {
                fixture.gpu.fill(fixture.memory, Pattern::U8(1), 512, fixture.one)?;
            }
            Ok(())
        },
    },
    Program {
        name: "memory unmapped while a kernel uses it",
        hazard: HazardKind::UseAfterUnmap,
        run: |fixture, fixed| {
            let (ptr, _) = fixture.mapped()?;
            fixture.add(ptr, WORDS, 1, fixture.one)?;
            if fixed {
                fixture.gpu.stream_synchronize(fixture.one)?;
            }
            fixture.gpu.vm_unmap(ptr, 2 << 20)
        },
    },
    Program {
        name: "a kernel that uses addresses that were unmapped before",
        hazard: HazardKind::UseAfterUnmap,
        run: |fixture, fixed| {
            let (ptr, physical) = fixture.mapped()?;
            fixture.gpu.vm_unmap(ptr, 2 << 20)?;
            let ptr = if fixed { fixture.map(physical)? } else { ptr };
            fixture.add(ptr, WORDS, 1, fixture.one)
        },
    },
    Program {
        name: "other memory mapped at its addresses while a kernel uses it",
        hazard: HazardKind::UseAfterUnmap,
        run: |fixture, fixed| {
            let (ptr, _) = fixture.mapped()?;
            let other = fixture.gpu.vm_create(DEVICE, 2 << 20, PhysicalOptions::default())?;
            fixture.add(ptr, WORDS, 1, fixture.one)?;
            if fixed {
                fixture.gpu.stream_synchronize(fixture.one)?;
            }
            fixture.gpu.vm_unmap(ptr, 2 << 20)?;
            fixture.gpu.vm_map(ptr, other)?;
            let all = [DeviceAccess { device: DEVICE, access: Access::ReadWrite }];
            fixture.gpu.vm_set_access(ptr, 2 << 20, &all)
        },
    },
    Program {
        name: "a copy onto itself",
        hazard: HazardKind::OverlappingCopy,
        run: |fixture, fixed| {
            let distance = if fixed { 1024 } else { 1023 };
            fixture.gpu.copy(fixture.memory.offset(distance).into(), fixture.memory.into(), 1024, fixture.one)
        },
    },
    Program {
        name: "a graph replayed after the event that it records was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |fixture, fixed| {
            let exec =
                fixture.capture(|| fixture.gpu.event_record(fixture.event, fixture.one, EventScope::External))?;
            if !fixed {
                fixture.gpu.event_destroy(fixture.event)?;
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a kernel beyond the end of its memory",
        hazard: HazardKind::IllegalAccess,
        run: |fixture, fixed| {
            let (ptr, _) = fixture.mapped()?;
            let words = if fixed { WORDS } else { (2 << 18) + 1 };
            fixture.add(ptr, words, 1, fixture.one)
        },
    },
    Program {
        name: "a kernel one word beyond the end of a small allocation",
        hazard: HazardKind::IllegalAccess,
        run: |fixture, fixed| {
            let ptr = fixture.gpu.mem_alloc(DEVICE, 16)?;
            fixture.add(ptr, if fixed { 4 } else { 5 }, 1, fixture.one)
        },
    },
    Program {
        name: "a kernel given a number where it takes an address",
        hazard: HazardKind::KernelFault,
        run: |fixture, fixed| {
            let module = fixture.gpu.module_load(DEVICE, &KERNELS)?;
            let add = fixture.gpu.function_get(module, "add")?;
            let first = if fixed { fixture.memory.into() } else { 1_u64.into() };
            fixture.gpu.kernel_launch(add, LaunchShape::ONE, &[first, 4_u32.into(), 1_u32.into()], fixture.one)
        },
    },
    Program {
        name: "mapped memory without access",
        hazard: HazardKind::IllegalAccess,
        run: |fixture, fixed| {
            let physical = fixture.gpu.vm_create(DEVICE, 2 << 20, PhysicalOptions::default())?;
            let ptr = fixture.gpu.vm_reserve(2 << 20, 0, None)?;
            fixture.gpu.vm_map(ptr, physical)?;
            let access = if fixed { Access::ReadWrite } else { Access::Read };
            fixture.gpu.vm_set_access(ptr, 2 << 20, &[DeviceAccess { device: DEVICE, access }])?;
            fixture.add(ptr, WORDS, 1, fixture.one)
        },
    },
    Program {
        name: "a sum over memory that was never written",
        hazard: HazardKind::UninitializedRead,
        run: |fixture, fixed| {
            let out = fixture.gpu.mem_alloc(DEVICE, 4)?;
            fixture.gpu.fill(out, Pattern::U32(0), 1, fixture.one)?;
            if fixed {
                fixture.fill(0, fixture.one)?;
            }
            fixture.sum(out, fixture.memory, WORDS, fixture.one)
        },
    },
    Program {
        name: "a block allocated to a second stream while the first still writes it",
        hazard: HazardKind::ReusedInFlight,
        run: |fixture, fixed| {
            fixture.gpu.suballocated(fixture.memory, 512, fixture.one);
            fixture.gpu.fill(fixture.memory, Pattern::U8(1), 512, fixture.one)?;
            fixture.gpu.suballocation_freed(fixture.memory, 512);
            if fixed {
                fixture.gpu.stream_synchronize(fixture.one)?;
            }
            fixture.gpu.suballocated(fixture.memory, 512, fixture.two);
            fixture.gpu.fill(fixture.memory, Pattern::U8(2), 512, fixture.two)
        },
    },
    Program {
        name: "a block reused by its stream while another stream still reads it",
        hazard: HazardKind::ReusedInFlight,
        run: |fixture, fixed| {
            let out = fixture.gpu.mem_alloc(DEVICE, BYTES)?;
            fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
            fixture.fill(1, fixture.one)?;
            fixture.order(fixture.one, fixture.two)?;
            fixture.gpu.copy(out.into(), fixture.memory.into(), BYTES, fixture.two)?;
            if fixed {
                // What record_stream does in PyTorch.
                fixture.order(fixture.two, fixture.one)?;
            }
            fixture.gpu.suballocation_freed(fixture.memory, BYTES);
            fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
            fixture.fill(2, fixture.one)
        },
    },
    Program {
        name: "the host reads a result before the copy is done",
        hazard: HazardKind::HostRace,
        run: |fixture, fixed| {
            let host = fixture.gpu.host_alloc(DEVICE, BYTES, HostOptions::default())?;
            fixture.fill(1, fixture.one)?;
            fixture.gpu.copy(host.into(), fixture.memory.into(), BYTES, fixture.one)?;
            if fixed {
                fixture.gpu.stream_synchronize(fixture.one)?;
            }
            fixture.gpu.host_read(host, &mut [0; 16])
        },
    },
    Program {
        name: "the host writes the next input before the copy of the last is done",
        hazard: HazardKind::HostRace,
        run: |fixture, fixed| {
            let host = fixture.gpu.host_alloc(DEVICE, BYTES, HostOptions::default())?;
            fixture.gpu.host_write(host, &[1; BYTES as usize])?;
            fixture.gpu.copy(fixture.memory.into(), host.into(), BYTES, fixture.one)?;
            if fixed {
                fixture.gpu.event_record(fixture.event, fixture.one, EventScope::Plain)?;
                fixture.gpu.event_synchronize(fixture.event)?;
            }
            fixture.gpu.host_write(host, &[2; BYTES as usize])
        },
    },
    Program {
        name: "an event recorded after it was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |fixture, fixed| {
            if !fixed {
                fixture.gpu.event_destroy(fixture.event)?;
            }
            fixture.gpu.event_record(fixture.event, fixture.one, EventScope::Plain)
        },
    },
    Program {
        name: "work queued in a stream that was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |fixture, fixed| {
            if !fixed {
                fixture.gpu.stream_destroy(fixture.one)?;
            }
            fixture.fill(1, fixture.one)
        },
    },
    Program {
        name: "a graph launched after it was destroyed",
        hazard: HazardKind::UseAfterDestroy,
        run: |fixture, fixed| {
            let exec = fixture.capture(|| fixture.fill(1, fixture.one))?;
            if !fixed {
                fixture.gpu.graph_exec_destroy(exec)?;
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a graph that uses freed memory",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |fixture, fixed| {
            let ptr = fixture.gpu.mem_alloc(DEVICE, BYTES)?;
            let exec = fixture.capture(|| fixture.gpu.fill(ptr, Pattern::U8(1), BYTES, fixture.one))?;
            fixture.gpu.graph_launch(exec, fixture.one)?;
            if !fixed {
                fixture.gpu.mem_free(ptr)?;
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a graph that uses a block that its allocator freed",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |fixture, fixed| {
            let exec = fixture.capture(|| fixture.fill(1, fixture.one))?;
            if !fixed {
                fixture.gpu.suballocation_freed(fixture.memory, BYTES);
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a graph that uses a block that its allocator freed and reused",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |fixture, fixed| {
            fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
            let exec = fixture.capture(|| fixture.fill(1, fixture.one))?;
            fixture.gpu.graph_launch(exec, fixture.one)?;
            if !fixed {
                fixture.gpu.suballocation_freed(fixture.memory, BYTES);
                fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a graph that uses unmapped memory",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |fixture, fixed| {
            let (ptr, _) = fixture.mapped()?;
            let exec = fixture.capture(|| fixture.add(ptr, WORDS, 1, fixture.one))?;
            fixture.gpu.graph_launch(exec, fixture.one)?;
            fixture.gpu.stream_synchronize(fixture.one)?;
            if !fixed {
                fixture.gpu.vm_unmap(ptr, 2 << 20)?;
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a graph that uses memory freed to its pool",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |fixture, fixed| {
            let pool = fixture.gpu.pool_default(DEVICE)?;
            let ptr = fixture.gpu.pool_alloc(pool, BYTES, fixture.one)?;
            let exec = fixture.capture(|| fixture.gpu.fill(ptr, Pattern::U8(1), BYTES, fixture.one))?;
            if !fixed {
                fixture.gpu.pool_free(ptr, fixture.one)?;
            }
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "memory unmapped while a graph that uses it runs",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |fixture, fixed| {
            let (ptr, _) = fixture.mapped()?;
            let exec = fixture.capture(|| fixture.add(ptr, WORDS, 1, fixture.one))?;
            fixture.gpu.graph_launch(exec, fixture.one)?;
            if fixed {
                fixture.gpu.stream_synchronize(fixture.one)?;
            }
            fixture.gpu.vm_unmap(ptr, 2 << 20)
        },
    },
    Program {
        name: "a graph whose kernel got the address of freed memory as a new argument",
        hazard: HazardKind::GraphUsesFreedMemory,
        run: |fixture, fixed| {
            let ptr = fixture.gpu.mem_alloc(DEVICE, BYTES)?;
            fixture.gpu.mem_free(ptr)?;
            fixture.gpu.capture_begin(fixture.one, CaptureMode::Relaxed)?;
            fixture.add(fixture.memory, WORDS, 1, fixture.one)?;
            let graph = fixture.gpu.capture_end(fixture.one)?;
            let exec = fixture.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
            let node = fixture.gpu.graph_topology(graph)?.nodes[0].id;
            let ptr = if fixed { fixture.memory } else { ptr };
            let args = [ptr.into(), KernelArg::U32(WORDS), KernelArg::U32(2)];
            fixture.gpu.graph_exec_set_kernel(exec, node, fixture.add, LaunchShape::ONE, &args)?;
            fixture.gpu.graph_launch(exec, fixture.one)
        },
    },
    Program {
        name: "a capture with an unjoined stream",
        hazard: HazardKind::CaptureUnjoined,
        run: |fixture, fixed| {
            fixture.capture(|| {
                fixture.order(fixture.one, fixture.two)?;
                fixture.fill(1, fixture.two)?;
                if fixed { fixture.order(fixture.two, fixture.one) } else { Ok(()) }
            })?;
            Ok(())
        },
    },
    Program {
        name: "an allocation during a capture",
        hazard: HazardKind::CaptureInvalidated,
        run: |fixture, fixed| {
            let mode = if fixed { CaptureMode::Relaxed } else { CaptureMode::Global };
            fixture.gpu.capture_begin(fixture.one, mode)?;
            let ptr = fixture.gpu.mem_alloc(DEVICE, BYTES);
            let graph = fixture.gpu.capture_end(fixture.one)?;
            fixture.gpu.graph_destroy(graph)?;
            ptr.map(drop)
        },
    },
    Program {
        name: "a wait during a capture for an event recorded outside",
        hazard: HazardKind::CaptureInvalidated,
        run: |fixture, fixed| {
            fixture.gpu.event_record(fixture.event, fixture.two, EventScope::Plain)?;
            let scope = if fixed { EventScope::External } else { EventScope::Plain };
            fixture.capture(|| fixture.gpu.stream_wait_event(fixture.one, fixture.event, scope)).map(drop)
        },
    },
];

fn run(program: &Program, seed: u64, fixed: bool) -> Vec<String> {
    let mut config = SimConfig::default().with_seed(seed);
    config.check_uninitialized = program.hazard == HazardKind::UninitializedRead;
    let fixture = Fixture::new(config).expect("the fixture is correct");
    let outcome = (program.run)(&fixture, fixed);
    let rest = fixture.gpu.device_synchronize(DEVICE);
    if fixed {
        outcome.and(rest).unwrap_or_else(|error| panic!("{}, fixed, seed {seed}: {error}", program.name));
    }
    fixture.gpu.hazards().iter().map(ToString::to_string).collect()
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
fn the_same_seed_gives_the_same_log() {
    for program in PROGRAMS {
        for seed in 0..4 {
            assert_eq!(run(program, seed, false), run(program, seed, false), "{}, seed {seed}", program.name);
        }
    }
}

#[test]
fn entries_name_operations_streams_bytes_and_the_reason() {
    let entry = |name: &str| run(PROGRAMS.iter().find(|p| p.name == name).expect("a program"), 0, false).remove(0);
    let race = entry("a second stream overwrites what the first still reads");
    let reason = "has waited for stream 3 only up to operation 1; this was operation 2";
    for part in ["copy #", "fill #", "in stream ", "4096 bytes", reason] {
        assert!(race.contains(part), "{race:?} does not contain {part:?}");
    }
    let graph = entry("two branches of a graph write the same bytes");
    assert!(graph.contains("the graph has no path from node"), "{graph}");
    let host = entry("the host reads a result before the copy is done");
    assert!(host.contains("host_read #") && host.contains("of the host memory pinned by call #"), "{host}");
    let unwaited = entry("a second stream reads without waiting for the first");
    assert!(unwaited.contains("stream 4 has not waited for operation 1 of stream 3 ("), "{unwaited}");
    let freed = entry("a kernel with a pointer that was freed");
    assert!(freed.contains("kernel add #") && freed.contains("freed by call #"), "{freed}");
}

#[test]
fn graph_hazards_name_the_graph_and_the_address() {
    let over_freed = PROGRAMS.iter().filter(|program| program.hazard == HazardKind::GraphUsesFreedMemory);
    let entries: Vec<String> = over_freed.map(|program| run(program, 0, false).remove(0)).collect();
    assert!(entries.len() >= 7);
    for entry in &entries {
        assert!(entry.contains("(node 0 of graph exec 1, launch #") && entry.contains(" at 0x"), "{entry}");
    }
}

#[test]
fn new_kernel_arguments_may_use_memory_reused_since_the_capture() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default())?;
    fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
    fixture.gpu.capture_begin(fixture.one, CaptureMode::Relaxed)?;
    fixture.add(fixture.memory, WORDS, 1, fixture.one)?;
    let graph = fixture.gpu.capture_end(fixture.one)?;
    let exec = fixture.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    let node = fixture.gpu.graph_topology(graph)?.nodes[0].id;
    fixture.gpu.suballocation_freed(fixture.memory, BYTES);
    fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
    let args = [fixture.memory.into(), KernelArg::U32(WORDS), KernelArg::U32(2)];
    fixture.gpu.graph_exec_set_kernel(exec, node, fixture.add, LaunchShape::ONE, &args)?;
    fixture.gpu.graph_launch(exec, fixture.one)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    assert!(fixture.gpu.hazards().is_empty(), "{:#?}", fixture.gpu.hazards());
    Ok(())
}

#[test]
fn an_illegal_access_breaks_the_device() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default().with_devices(2))?;
    fixture.add(DevicePtr(0x1234_5000), 1, 1, fixture.one)?;
    let codes = [
        fixture.gpu.stream_synchronize(fixture.one).map(drop),
        fixture.gpu.stream_synchronize(fixture.two).map(drop),
        fixture.gpu.mem_alloc(DEVICE, 512).map(drop),
        fixture.gpu.mem_info(DEVICE).map(drop),
        fixture.gpu.event_query(fixture.event).map(drop),
        fixture.gpu.mem_free(fixture.memory),
        fixture.gpu.stream_destroy(fixture.one),
    ];
    for outcome in codes {
        let error = outcome.expect_err("the device is broken");
        assert!(error.is_sticky() && error.code == ErrorCode::IllegalAddress, "{error}");
    }
    fixture.gpu.mem_alloc(DeviceId(1), 512)?;
    Ok(())
}

#[test]
fn the_default_stream_waits_for_a_destroyed_blocking_stream_with_work() -> Result<()> {
    for seed in 0..8 {
        let fixture = Fixture::new(SimConfig::default().with_seed(seed))?;
        let blocking = fixture.gpu.stream_create(DEVICE, StreamOptions { non_blocking: false, priority: 0 })?;
        fixture.fill(1, blocking)?;
        fixture.gpu.stream_destroy(blocking)?;
        fixture.fill(2, fixture.gpu.stream_default(DEVICE)?)?;
        fixture.gpu.device_synchronize(DEVICE)?;
        assert!(fixture.gpu.hazards().is_empty(), "seed {seed}: {:#?}", fixture.gpu.hazards());
    }
    Ok(())
}
