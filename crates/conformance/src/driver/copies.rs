//! Copies and fills.

use warpool_driver::ErrorCode::InvalidValue;
use warpool_driver::{Address, DevicePtr, Pattern};

use crate::check::Check;
use crate::context::{Resource, TestContext, to_bytes};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq};

pub(crate) const CHECKS: &[Check] = crate::checks![
    copies_write_exactly_their_range,
    uploads_and_downloads_transfer_exactly_their_range,
    row_copies_write_exactly_their_rows,
    row_copies_are_checked,
    large_copies_are_complete,
    fills_support_every_pattern,
    misaligned_patterns_are_rejected,
    zero_length_copies_and_fills_are_no_ops,
    out_of_range_copies_are_rejected,
    pageable_memory_is_rejected,
    copies_run_in_submission_order,
    copies_and_fills_are_asynchronous,
    uploads_wait_for_legacy_and_blocking_streams,
    uploads_do_not_wait_for_non_blocking_streams,
    peer_copy_within_one_device,
    peer_copy_between_two_devices,
    kernels_access_peer_memory,
    copy_ranges_are_checked_to_the_byte,
    overruns_into_adjacent_allocations_are_rejected,
    ; provoking hazards:
    freed_memory_is_rejected,
    host_addresses_are_rejected_as_device_addresses,
];

const BUFFER_BYTES: usize = 70_000;

fn copies_write_exactly_their_range(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let sizes = [1, 2, 3, 7, 64, 1001, 4096, 65_537];
    for (from_host, to_host) in [(true, false), (false, false), (false, true), (true, true)] {
        let (source, target) = (context.random_bytes(BUFFER_BYTES), context.random_bytes(BUFFER_BYTES));
        let src = alloc_on_side(context, &source, from_host)?;
        let dst = alloc_on_side(context, &target, to_host)?;
        let mut want = target;
        for n in sizes {
            let (from, to) = (context.random_below(97) as usize, context.random_below(97) as usize);
            context.driver.copy(offset(dst, to), offset(src, from), n as u64, stream)?;
            want[to..to + n].copy_from_slice(&source[from..from + n]);
            context.synchronize(stream)?;
            let got = match dst {
                Address::Device(ptr) => context.read_bytes(ptr, BUFFER_BYTES)?,
                Address::Host(ptr) => context.read_pinned(ptr, BUFFER_BYTES)?,
            };
            let what = format!("{n} bytes from {} to {}", name(from_host), name(to_host));
            expect_slice_eq(&what, &got, &want)?;
        }
    }
    Ok(())
}

fn row_copies_write_exactly_their_rows(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    for (from_host, to_host) in [(true, false), (false, false), (false, true), (true, true)] {
        let (source, target) = (context.random_bytes(BUFFER_BYTES), context.random_bytes(BUFFER_BYTES));
        let src = alloc_on_side(context, &source, from_host)?;
        let dst = alloc_on_side(context, &target, to_host)?;
        let mut want = target;
        for (rows, width, src_pitch, dst_pitch) in [(1, 1, 1, 1), (3, 100, 128, 100), (17, 33, 40, 1000), (0, 8, 8, 8)]
        {
            let (from, to) = (context.random_below(97) as usize, context.random_below(97) as usize);
            let [wide, pitched_dst, pitched_src] = [width, dst_pitch, src_pitch].map(|bytes: usize| bytes as u64);
            let (dst_at, src_at) = (offset(dst, to), offset(src, from));
            context.driver.copy_2d(dst_at, pitched_dst, src_at, pitched_src, wide, rows as u64, stream)?;
            for row in 0..rows {
                let (to, from) = (to + row * dst_pitch, from + row * src_pitch);
                want[to..to + width].copy_from_slice(&source[from..from + width]);
            }
            context.synchronize(stream)?;
            let got = match dst {
                Address::Device(ptr) => context.read_bytes(ptr, BUFFER_BYTES)?,
                Address::Host(ptr) => context.read_pinned(ptr, BUFFER_BYTES)?,
            };
            let what = format!("{rows} rows of {width} bytes from {} to {}", name(from_host), name(to_host));
            expect_slice_eq(&what, &got, &want)?;
        }
    }
    Ok(())
}

fn row_copies_are_checked(context: &TestContext) -> CheckResult {
    let (stream, a, b) = (context.stream()?, context.alloc(4096)?, context.alloc(4096)?);
    for (dst_pitch, src_pitch, width, rows) in
        [(100, 128, 101, 2), (128, 100, 101, 2), (1024, 100, 97, 5), (100, 1024, 1024, 5), (u64::MAX, 100, 1, 3)]
    {
        let copied = context.driver.copy_2d(b.into(), dst_pitch, a.into(), src_pitch, width, rows, stream);
        expect_error(copied, InvalidValue)?;
    }
    Ok(context.driver.copy_2d(b.into(), 1024, a.into(), 1024, 1024, 4, stream)?)
}

fn name(host: bool) -> &'static str {
    if host { "the host" } else { "the device" }
}

/// Host or device memory that contains `bytes`.
fn alloc_on_side(context: &TestContext, bytes: &[u8], host: bool) -> CheckResult<Address> {
    Ok(if host { context.alloc_pinned_bytes(bytes)?.into() } else { context.alloc_bytes(bytes)?.into() })
}

fn offset(address: Address, by: usize) -> Address {
    match address {
        Address::Device(ptr) => ptr.offset(by as u64).into(),
        Address::Host(ptr) => ptr.offset(by as u64).into(),
    }
}

fn uploads_and_downloads_transfer_exactly_their_range(context: &TestContext) -> CheckResult {
    let mut want = context.random_bytes(BUFFER_BYTES);
    let ptr = context.alloc_bytes(&want)?;
    for n in [1, 3, 255, 4097, 65_535] {
        let (at, bytes) = (context.random_below(1000) as usize, context.random_bytes(n));
        context.driver.upload(context.device_id, ptr.offset(at as u64), &bytes)?;
        want[at..at + n].copy_from_slice(&bytes);
        expect_slice_eq("the whole allocation", &context.read_bytes(ptr, BUFFER_BYTES)?, &want)?;
        expect_slice_eq("the uploaded range", &context.read_bytes(ptr.offset(at as u64), n)?, &bytes)?;
    }
    Ok(())
}

fn large_copies_are_complete(context: &TestContext) -> CheckResult {
    const N: u32 = 4 << 20;
    let (stream, bytes) = (context.stream()?, 4 * u64::from(N));
    let (first, second, back) = (context.alloc(bytes)?, context.alloc(bytes)?, context.alloc_pinned(bytes)?);
    context.fill_index(first, N, stream)?;
    context.driver.copy(second.into(), first.into(), bytes, stream)?;
    context.driver.copy(back.into(), second.into(), bytes, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("16 MiB", &context.read_pinned(back, bytes as usize)?, &to_bytes(&(0..N).collect::<Vec<_>>()))
}

fn fills_support_every_pattern(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let mut want = context.random_bytes(8192);
    let ptr = context.alloc_bytes(&want)?;
    let fills = [
        (Pattern::U8(0xa5), 1, 1),
        (Pattern::U8(0), 13, 501),
        (Pattern::U16(0xbeef), 1002, 1),
        (Pattern::U16(0x1234), 1010, 333),
        (Pattern::U32(0xdead_beef), 2004, 1),
        (Pattern::U32(0x0102_0304), 2012, 1501),
    ];
    for (pattern, at, count) in fills {
        context.driver.fill(ptr.offset(at), pattern, count, stream)?;
        let one = match pattern {
            Pattern::U8(value) => value.to_le_bytes().to_vec(),
            Pattern::U16(value) => value.to_le_bytes().to_vec(),
            Pattern::U32(value) => value.to_le_bytes().to_vec(),
        };
        let (at, n) = (at as usize, one.len() * count as usize);
        want[at..at + n].copy_from_slice(&one.repeat(count as usize));
    }
    context.synchronize(stream)?;
    expect_slice_eq("the filled memory and the memory around it", &context.read_bytes(ptr, 8192)?, &want)
}

fn misaligned_patterns_are_rejected(context: &TestContext) -> CheckResult {
    let (stream, ptr) = (context.stream()?, context.alloc_bytes(&[7; 64])?);
    for (pattern, offset) in [(Pattern::U16(1), 1), (Pattern::U32(1), 1), (Pattern::U32(1), 2)] {
        expect_error(context.driver.fill(ptr.offset(offset), pattern, 1, stream), InvalidValue)?;
    }
    context.synchronize(stream)?;
    expect_slice_eq("the memory after the rejected calls", &context.read_bytes(ptr, 64)?, &[7; 64])
}

fn zero_length_copies_and_fills_are_no_ops(context: &TestContext) -> CheckResult {
    let (stream, ptr, pinned) =
        (context.stream()?, context.alloc_bytes(&[7; 64])?, context.alloc_pinned_bytes(&[8; 64])?);
    context.driver.copy(ptr.into(), pinned.into(), 0, stream)?;
    context.driver.fill(ptr, Pattern::U32(1), 0, stream)?;
    context.driver.upload(context.device_id, ptr, &[])?;
    context.driver.download(context.device_id, ptr, &mut [])?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory", &context.read_bytes(ptr, 64)?, &[7; 64])
}

fn out_of_range_copies_are_rejected(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 1 << 20;
    let stream = context.stream()?;
    let ptr = context.alloc_bytes(&vec![7; BYTES as usize])?;
    let pinned = context.alloc_pinned_bytes(&vec![8; BYTES as usize])?;
    let far = DevicePtr(ptr.0 + (1 << 42));
    let rejected = |what: &str, result: warpool_driver::Result<()>| expect_error_of(what, result, InvalidValue);
    let copy = |dst: Address, src: Address, n| context.driver.copy(dst, src, n, stream);
    rejected("a fill past the end", context.driver.fill(ptr, Pattern::U8(1), 2 * BYTES, stream))?;
    rejected("a fill of unknown memory", context.driver.fill(far, Pattern::U8(1), 16, stream))?;
    rejected("a copy to unknown memory", copy(far.into(), ptr.into(), 4))?;
    rejected("a copy from unknown memory", copy(ptr.into(), far.into(), 4))?;
    rejected("a copy past the end of pinned memory", copy(ptr.into(), pinned.offset(64).into(), BYTES))?;
    rejected("a copy past the end of device memory", copy(ptr.offset(64).into(), pinned.into(), BYTES))?;
    rejected("an upload to unknown memory", context.driver.upload(context.device_id, far, &[1; 16]))?;
    rejected("a download from unknown memory", context.driver.download(context.device_id, far, &mut [1; 16]))?;
    context.synchronize(stream)?;
    expect_slice_eq(
        "the memory after the rejected calls",
        &context.read_bytes(ptr, BYTES as usize)?,
        &vec![7; BYTES as usize],
    )
}

fn copy_ranges_are_checked_to_the_byte(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 5000;
    // Uploads and downloads are in the order of this stream.
    let (stream, driver) = (context.legacy_stream()?, &context.driver);
    let ptr = context.alloc_bytes(&[7; BYTES as usize])?;
    let other = context.alloc_bytes(&[6; 2 * BYTES as usize])?;
    let pinned = context.alloc_pinned_bytes(&[8; BYTES as usize])?;
    for (at, bytes, fits) in [(0, BYTES, true), (0, BYTES + 1, false), (BYTES - 1, 1, true), (BYTES - 1, 2, false)] {
        let (start, host) = (ptr.offset(at), pinned.offset(at));
        let mut buffer = vec![9; bytes as usize];
        let results = [
            ("a fill", driver.fill(start, Pattern::U8(9), bytes, stream)),
            ("a copy to it", driver.copy(start.into(), other.into(), bytes, stream)),
            ("a copy from it", driver.copy(other.into(), start.into(), bytes, stream)),
            ("a copy to pinned memory", driver.copy(host.into(), other.into(), bytes, stream)),
            ("a copy from pinned memory", driver.copy(other.into(), host.into(), bytes, stream)),
            ("a copy between peers", {
                let here = context.device_id;
                driver.copy_peer(start, here, other, here, bytes, stream)
            }),
            ("an upload", driver.upload(context.device_id, start, &buffer)),
            ("a download", driver.download(context.device_id, start, &mut buffer)),
        ];
        for (what, result) in results {
            let what = format!("{what} of {bytes} bytes from byte {at} of {BYTES} on");
            if fits {
                expect_eq(&what, result.map_err(|error| error.code), Ok(()))?;
            } else {
                expect_error_of(&what, result, InvalidValue)?;
            }
        }
    }
    context.synchronize(stream)
}

fn overruns_into_adjacent_allocations_are_rejected(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 2 << 20;
    let stream = context.stream()?;
    let blocks = (0..16).map(|_| context.alloc(BYTES)).collect::<CheckResult<Vec<_>>>()?;
    for &block in &blocks {
        context.driver.fill(block, Pattern::U8(7), BYTES, stream)?;
    }
    for &block in &blocks {
        let end = block.offset(BYTES - 512);
        expect_error(context.driver.fill(end, Pattern::U8(1), 1024, stream), InvalidValue)?;
        expect_error(context.driver.copy(end.into(), blocks[0].into(), 1024, stream), InvalidValue)?;
        expect_error(context.driver.upload(context.device_id, end, &[1; 1024]), InvalidValue)?;
    }
    context.synchronize(stream)?;
    for &block in &blocks {
        expect_slice_eq("the start of each allocation", &context.read_bytes(block, 1024)?, &[7; 1024])?;
    }
    Ok(())
}

fn host_addresses_are_rejected_as_device_addresses(context: &TestContext) -> CheckResult {
    let (stream, driver, ptr) = (context.stream()?, &context.driver, context.alloc_bytes(&[7; 64])?);
    let ordinary = DevicePtr(context.host_pages(1).ptr().0);
    expect(!driver.is_device_memory(ordinary, 16), "ordinary memory is not the device's")?;
    expect(driver.is_device_memory(ptr, 64) && !driver.is_device_memory(ptr, 65), "device memory up to its end")?;
    let refused = |what: &str, result: warpool_driver::Result<()>| expect_error_of(what, result, InvalidValue);
    refused("a fill", driver.fill(ordinary, Pattern::U8(1), 16, stream))?;
    refused("a copy to it", driver.copy(ordinary.into(), ptr.into(), 16, stream))?;
    refused("a copy from it", driver.copy(ptr.into(), ordinary.into(), 16, stream))?;
    refused("an upload", driver.upload(context.device_id, ordinary, &[1; 16]))?;
    refused("a download", driver.download(context.device_id, ordinary, &mut [1; 16]))?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory after the failures", &context.read_bytes(ptr, 64)?, &[7; 64])?;
    // Pinned memory has an address on the device, and can be used by it.
    let pinned = context.alloc_pinned_bytes(&[3; 64])?;
    let there = driver.host_device_ptr(context.device_id, pinned)?;
    expect(!driver.is_device_memory(there, 64), "pinned memory is not the device's")?;
    driver.fill(there, Pattern::U8(5), 64, stream)?;
    driver.copy(ptr.into(), there.into(), 64, stream)?;
    expect_error(driver.fill(there, Pattern::U8(6), 65, stream), InvalidValue)?;
    context.synchronize(stream)?;
    expect_slice_eq("what was filled and copied", &context.read_bytes(ptr, 64)?, &[5; 64])
}

fn freed_memory_is_rejected(context: &TestContext) -> CheckResult {
    let (stream, other) = (context.stream()?, context.alloc_bytes(&[7; 64])?);
    let freed = context.alloc(8 << 20)?;
    context.free(freed)?;
    expect_error(context.driver.fill(freed, Pattern::U8(1), 16, stream), InvalidValue)?;
    expect_error(context.driver.copy(other.into(), freed.into(), 16, stream), InvalidValue)?;
    let pinned = context.alloc_pinned(4096)?;
    context.untrack(Resource::Pinned(pinned));
    context.driver.host_free(pinned)?;
    expect_error(context.driver.copy(other.into(), pinned.into(), 16, stream), InvalidValue)?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory after the rejected calls", &context.read_bytes(other, 64)?, &[7; 64])
}

fn pageable_memory_is_rejected(context: &TestContext) -> CheckResult {
    let (stream, ptr) = (context.stream()?, context.alloc_bytes(&[7; 64])?);
    let ordinary = context.host_pages(1).ptr();
    expect_error(context.driver.copy(ptr.into(), ordinary.into(), 16, stream), InvalidValue)?;
    expect_error(context.driver.copy(ordinary.into(), ptr.into(), 16, stream), InvalidValue)?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory after the rejected calls", &context.read_bytes(ptr, 64)?, &[7; 64])
}

fn copies_run_in_submission_order(context: &TestContext) -> CheckResult {
    let (stream, n) = (context.stream()?, 512_u32);
    let ptr = context.alloc_words(&vec![0; n as usize])?;
    let back = context.alloc_pinned(16 * 4 * u64::from(n))?;
    context.delay(stream)?;
    for round in 0..16 {
        context.add_u32(ptr, n, 1, stream)?;
        let place = back.offset(round * 4 * u64::from(n));
        context.driver.copy(place.into(), ptr.into(), 4 * u64::from(n), stream)?;
    }
    context.synchronize(stream)?;
    let want: Vec<u32> = (1..=16).flat_map(|round| vec![round; n as usize]).collect();
    expect_slice_eq("the sixteen copies", &context.read_pinned(back, 16 * 4 * n as usize)?, &to_bytes(&want))
}

fn copies_and_fills_are_asynchronous(context: &TestContext) -> CheckResult {
    let (stream, ptr, pinned) = (context.stream()?, context.alloc(4096)?, context.alloc_pinned_bytes(&[5; 4096])?);
    context.keep_busy(stream)?;
    context.driver.fill(ptr, Pattern::U8(1), 4096, stream)?;
    context.driver.copy(ptr.into(), pinned.into(), 2048, stream)?;
    context.expect_busy("the stream of the copy", stream)?;
    context.synchronize(stream)?;
    let want = [vec![5; 2048], vec![1; 2048]].concat();
    expect_slice_eq("the filled and copied memory", &context.read_bytes(ptr, 4096)?, &want)
}

fn uploads_wait_for_legacy_and_blocking_streams(context: &TestContext) -> CheckResult {
    let (legacy, blocking) = (context.legacy_stream()?, context.blocking_stream()?);
    let ptr = context.alloc_bytes(&[0; 64])?;
    for stream in [legacy, blocking] {
        context.delay(stream)?;
        context.driver.fill(ptr, Pattern::U8(9), 64, stream)?;
        context.driver.upload(context.device_id, ptr.offset(16), &[4; 16])?;
        let want = [vec![9; 16], vec![4; 16], vec![9; 32]].concat();
        expect_slice_eq("the memory after a fill and an upload", &context.read_bytes(ptr, 64)?, &want)?;
        context.delay(stream)?;
        context.driver.fill(ptr, Pattern::U8(3), 64, stream)?;
        expect_slice_eq("the memory after a fill", &context.read_bytes(ptr, 64)?, &[3; 64])?;
    }
    Ok(())
}

fn uploads_do_not_wait_for_non_blocking_streams(context: &TestContext) -> CheckResult {
    let (stream, ptr) = (context.stream()?, context.alloc(64)?);
    context.keep_busy(stream)?;
    context.driver.upload(context.device_id, ptr, &[6; 64])?;
    expect_slice_eq("the uploaded memory", &context.read_bytes(ptr, 64)?, &[6; 64])?;
    context.expect_busy("the non-blocking stream", stream)
}

fn peer_copy_within_one_device(context: &TestContext) -> CheckResult {
    let (stream, here, bytes) = (context.stream()?, context.device_id, context.random_bytes(5001));
    let (src, dst) = (context.alloc_bytes(&bytes)?, context.alloc(5001)?);
    context.driver.copy_peer(dst, here, src, here, 5001, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("the copy", &context.read_bytes(dst, 5001)?, &bytes)
}

fn peer_copy_between_two_devices(context: &TestContext) -> CheckResult {
    let (here, there) = (context.device_id, context.second_device_id()?);
    let (stream, bytes) = (context.stream()?, context.random_bytes(9999));
    let (src, back) = (context.alloc_bytes(&bytes)?, context.alloc(9999)?);
    let far = context.alloc_on(there, 9999)?;
    context.driver.copy_peer(far, there, src, here, 9999, stream)?;
    context.synchronize(stream)?;
    let mut seen = vec![0; 9999];
    context.driver.download(there, far, &mut seen)?;
    expect_slice_eq("the memory of the other device", &seen, &bytes)?;
    context.driver.copy_peer(back, here, far, there, 9999, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory copied back", &context.read_bytes(back, 9999)?, &bytes)
}

fn kernels_access_peer_memory(context: &TestContext) -> CheckResult {
    let there = context.peer_device_id()?;
    let (stream, n) = (context.stream()?, 1000_u32);
    let far = context.alloc_on(there, 4000)?;
    let words = context.random_words(n as usize);
    context.driver.upload(there, far, &to_bytes(&words))?;
    context.driver.peer_enable(context.device_id, there)?;
    let worked = context.add_u32(far, n, 21, stream).and_then(|()| context.synchronize(stream));
    context.driver.peer_disable(context.device_id, there)?;
    worked?;
    let mut seen = vec![0; 4000];
    context.driver.download(there, far, &mut seen)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(21)).collect();
    expect_slice_eq("the results in peer memory", &seen, &to_bytes(&want))
}
