//! Copies and fills.

use super::Check;
use super::bench::{Bench, to_bytes};
use super::owned::Owned;
use crate::expect::{Checked, expect_code, expect_code_of, expect_same};
use warpool_driver::ErrorCode::InvalidValue;
use warpool_driver::{Address, DevicePtr, Pattern};

pub(super) const CHECKS: &[Check] = super::checks![
    copies_move_exactly_their_bytes,
    uploads_and_downloads_move_exactly_their_bytes,
    large_copies_arrive_whole,
    fills_write_every_pattern,
    patterns_need_aligned_addresses,
    nothing_is_moved_by_no_bytes,
    ranges_past_the_end_are_refused,
    memory_that_is_not_pinned_is_refused,
    copies_keep_their_place_in_the_stream,
    copies_and_fills_do_not_wait,
    uploads_wait_for_the_default_stream,
    uploads_ignore_non_blocking_streams,
    a_device_copies_to_itself_as_a_peer,
    copies_cross_devices,
    kernels_cross_devices_with_peer_access,
    ; provoking:
    freed_memory_is_refused,
];

const ROOM: usize = 70_000;

fn copies_move_exactly_their_bytes(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let sizes = [1, 2, 3, 7, 64, 1001, 4096, 65_537];
    for (from_host, to_host) in [(true, false), (false, false), (false, true), (true, true)] {
        let (source, target) = (bench.random_bytes(ROOM), bench.random_bytes(ROOM));
        let src = side(bench, &source, from_host)?;
        let dst = side(bench, &target, to_host)?;
        let mut want = target;
        for n in sizes {
            let (from, to) = (bench.below(97) as usize, bench.below(97) as usize);
            bench.driver.copy(moved(dst, to), moved(src, from), n as u64, stream)?;
            want[to..to + n].copy_from_slice(&source[from..from + n]);
            bench.sync(stream)?;
            let got = match dst {
                Address::Device(ptr) => bench.bytes_at(ptr, ROOM)?,
                Address::Host(ptr) => bench.pinned_bytes(ptr, ROOM)?,
            };
            let what = format!("{n} bytes from {} to {}", name(from_host), name(to_host));
            expect_same(&what, &got, &want)?;
        }
    }
    Ok(())
}

fn name(host: bool) -> &'static str {
    if host { "the host" } else { "the device" }
}

/// Memory on one side, holding `bytes`.
fn side(bench: &Bench<'_>, bytes: &[u8], host: bool) -> Checked<Address> {
    Ok(if host { bench.pinned_of(bytes)?.into() } else { bench.memory_of(bytes)?.into() })
}

fn moved(address: Address, by: usize) -> Address {
    match address {
        Address::Device(ptr) => ptr.offset(by as u64).into(),
        Address::Host(ptr) => ptr.offset(by as u64).into(),
    }
}

fn uploads_and_downloads_move_exactly_their_bytes(bench: &Bench<'_>) -> Checked {
    let mut want = bench.random_bytes(ROOM);
    let ptr = bench.memory_of(&want)?;
    for n in [1, 3, 255, 4097, 65_535] {
        let (at, bytes) = (bench.below(1000) as usize, bench.random_bytes(n));
        bench.driver.upload(bench.device, ptr.offset(at as u64), &bytes)?;
        want[at..at + n].copy_from_slice(&bytes);
        expect_same("all of the memory", &bench.bytes_at(ptr, ROOM)?, &want)?;
        expect_same("the part", &bench.bytes_at(ptr.offset(at as u64), n)?, &bytes)?;
    }
    Ok(())
}

fn large_copies_arrive_whole(bench: &Bench<'_>) -> Checked {
    const N: u32 = 4 << 20;
    let (stream, bytes) = (bench.stream()?, 4 * u64::from(N));
    let (first, second, back) = (bench.memory(bytes)?, bench.memory(bytes)?, bench.pinned(bytes)?);
    bench.launch(bench.kernels()?.fill_index, N, &[first.into(), warpool_driver::KernelArg::U32(N)], stream)?;
    bench.driver.copy(second.into(), first.into(), bytes, stream)?;
    bench.driver.copy(back.into(), second.into(), bytes, stream)?;
    bench.sync(stream)?;
    expect_same("16 MiB", &bench.pinned_bytes(back, bytes as usize)?, &to_bytes(&(0..N).collect::<Vec<_>>()))
}

fn fills_write_every_pattern(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let mut want = bench.random_bytes(8192);
    let ptr = bench.memory_of(&want)?;
    let fills = [
        (Pattern::U8(0xa5), 1, 1),
        (Pattern::U8(0), 13, 501),
        (Pattern::U16(0xbeef), 1002, 1),
        (Pattern::U16(0x1234), 1010, 333),
        (Pattern::U32(0xdead_beef), 2004, 1),
        (Pattern::U32(0x0102_0304), 2012, 1501),
    ];
    for (pattern, at, count) in fills {
        bench.driver.fill(ptr.offset(at), pattern, count, stream)?;
        let one = match pattern {
            Pattern::U8(value) => value.to_le_bytes().to_vec(),
            Pattern::U16(value) => value.to_le_bytes().to_vec(),
            Pattern::U32(value) => value.to_le_bytes().to_vec(),
        };
        let (at, n) = (at as usize, one.len() * count as usize);
        want[at..at + n].copy_from_slice(&one.repeat(count as usize));
    }
    bench.sync(stream)?;
    expect_same("the filled memory and its neighbours", &bench.bytes_at(ptr, 8192)?, &want)
}

fn patterns_need_aligned_addresses(bench: &Bench<'_>) -> Checked {
    let (stream, ptr) = (bench.stream()?, bench.memory_of(&[7; 64])?);
    for (pattern, offset) in [(Pattern::U16(1), 1), (Pattern::U32(1), 1), (Pattern::U32(1), 2)] {
        expect_code(bench.driver.fill(ptr.offset(offset), pattern, 1, stream), InvalidValue)?;
    }
    bench.sync(stream)?;
    expect_same("the memory after the failures", &bench.bytes_at(ptr, 64)?, &[7; 64])
}

fn nothing_is_moved_by_no_bytes(bench: &Bench<'_>) -> Checked {
    let (stream, ptr, pinned) = (bench.stream()?, bench.memory_of(&[7; 64])?, bench.pinned_of(&[8; 64])?);
    bench.driver.copy(ptr.into(), pinned.into(), 0, stream)?;
    bench.driver.fill(ptr, Pattern::U32(1), 0, stream)?;
    bench.driver.upload(bench.device, ptr, &[])?;
    bench.driver.download(bench.device, ptr, &mut [])?;
    bench.sync(stream)?;
    expect_same("the memory", &bench.bytes_at(ptr, 64)?, &[7; 64])
}

fn ranges_past_the_end_are_refused(bench: &Bench<'_>) -> Checked {
    const BYTES: u64 = 1 << 20;
    let stream = bench.stream()?;
    let ptr = bench.memory_of(&vec![7; BYTES as usize])?;
    let pinned = bench.pinned_of(&vec![8; BYTES as usize])?;
    let far = DevicePtr(ptr.0 + (1 << 42));
    let refused = |what: &str, result: warpool_driver::Result<()>| expect_code_of(what, result, InvalidValue);
    let copy = |dst: Address, src: Address, n| bench.driver.copy(dst, src, n, stream);
    refused("a fill past the end", bench.driver.fill(ptr, Pattern::U8(1), 2 * BYTES, stream))?;
    refused("a fill far away", bench.driver.fill(far, Pattern::U8(1), 16, stream))?;
    refused("a copy to far away", copy(far.into(), ptr.into(), 4))?;
    refused("a copy from far away", copy(ptr.into(), far.into(), 4))?;
    refused("a copy past the end of pinned memory", copy(ptr.into(), pinned.offset(64).into(), BYTES))?;
    refused("a copy past the end of device memory", copy(ptr.offset(64).into(), pinned.into(), BYTES))?;
    refused("an upload far away", bench.driver.upload(bench.device, far, &[1; 16]))?;
    refused("a download from far away", bench.driver.download(bench.device, far, &mut [1; 16]))?;
    bench.sync(stream)?;
    expect_same("the memory after the failures", &bench.bytes_at(ptr, BYTES as usize)?, &vec![7; BYTES as usize])
}

fn freed_memory_is_refused(bench: &Bench<'_>) -> Checked {
    let (stream, other) = (bench.stream()?, bench.memory_of(&[7; 64])?);
    let gone = bench.memory(8 << 20)?;
    bench.free_memory(gone)?;
    expect_code(bench.driver.fill(gone, Pattern::U8(1), 16, stream), InvalidValue)?;
    expect_code(bench.driver.copy(other.into(), gone.into(), 16, stream), InvalidValue)?;
    let pinned = bench.pinned(4096)?;
    bench.disown(Owned::Pinned(pinned));
    bench.driver.host_free(pinned)?;
    expect_code(bench.driver.copy(other.into(), pinned.into(), 16, stream), InvalidValue)?;
    bench.sync(stream)?;
    expect_same("the memory after the failures", &bench.bytes_at(other, 64)?, &[7; 64])
}

fn memory_that_is_not_pinned_is_refused(bench: &Bench<'_>) -> Checked {
    let (stream, ptr) = (bench.stream()?, bench.memory_of(&[7; 64])?);
    let ordinary = bench.pages(1).ptr();
    expect_code(bench.driver.copy(ptr.into(), ordinary.into(), 16, stream), InvalidValue)?;
    expect_code(bench.driver.copy(ordinary.into(), ptr.into(), 16, stream), InvalidValue)?;
    bench.sync(stream)?;
    expect_same("the memory after the failures", &bench.bytes_at(ptr, 64)?, &[7; 64])
}

fn copies_keep_their_place_in_the_stream(bench: &Bench<'_>) -> Checked {
    let (stream, n) = (bench.stream()?, 512_u32);
    let ptr = bench.words_of(&vec![0; n as usize])?;
    let back = bench.pinned(16 * 4 * u64::from(n))?;
    bench.spin(stream)?;
    for round in 0..16 {
        bench.add(ptr, n, 1, stream)?;
        let place = back.offset(round * 4 * u64::from(n));
        bench.driver.copy(place.into(), ptr.into(), 4 * u64::from(n), stream)?;
    }
    bench.sync(stream)?;
    let want: Vec<u32> = (1..=16).flat_map(|round| vec![round; n as usize]).collect();
    expect_same("sixteen snapshots", &bench.pinned_bytes(back, 16 * 4 * n as usize)?, &to_bytes(&want))
}

fn copies_and_fills_do_not_wait(bench: &Bench<'_>) -> Checked {
    let (stream, ptr, pinned) = (bench.stream()?, bench.memory(4096)?, bench.pinned_of(&[5; 4096])?);
    bench.spin_long(stream)?;
    bench.driver.fill(ptr, Pattern::U8(1), 4096, stream)?;
    bench.driver.copy(ptr.into(), pinned.into(), 2048, stream)?;
    bench.expect_busy("the work in front of the copy", stream)?;
    bench.sync(stream)?;
    let want = [vec![5; 2048], vec![1; 2048]].concat();
    expect_same("what they left", &bench.bytes_at(ptr, 4096)?, &want)
}

fn uploads_wait_for_the_default_stream(bench: &Bench<'_>) -> Checked {
    let (legacy, blocking) = (bench.default_stream()?, bench.blocking_stream()?);
    let ptr = bench.memory_of(&[0; 64])?;
    for stream in [legacy, blocking] {
        bench.spin(stream)?;
        bench.driver.fill(ptr, Pattern::U8(9), 64, stream)?;
        bench.driver.upload(bench.device, ptr.offset(16), &[4; 16])?;
        let want = [vec![9; 16], vec![4; 16], vec![9; 32]].concat();
        expect_same("the fill, then the upload", &bench.bytes_at(ptr, 64)?, &want)?;
        bench.spin(stream)?;
        bench.driver.fill(ptr, Pattern::U8(3), 64, stream)?;
        expect_same("the fill, then the download", &bench.bytes_at(ptr, 64)?, &[3; 64])?;
    }
    Ok(())
}

fn uploads_ignore_non_blocking_streams(bench: &Bench<'_>) -> Checked {
    let (stream, ptr) = (bench.stream()?, bench.memory(64)?);
    bench.spin_long(stream)?;
    bench.driver.upload(bench.device, ptr, &[6; 64])?;
    expect_same("what was uploaded", &bench.bytes_at(ptr, 64)?, &[6; 64])?;
    bench.expect_busy("the non-blocking stream", stream)
}

fn a_device_copies_to_itself_as_a_peer(bench: &Bench<'_>) -> Checked {
    let (stream, here, bytes) = (bench.stream()?, bench.device, bench.random_bytes(5001));
    let (src, dst) = (bench.memory_of(&bytes)?, bench.memory(5001)?);
    bench.driver.copy_peer(dst, here, src, here, 5001, stream)?;
    bench.sync(stream)?;
    expect_same("the copy", &bench.bytes_at(dst, 5001)?, &bytes)
}

fn copies_cross_devices(bench: &Bench<'_>) -> Checked {
    let (here, there) = (bench.device, bench.second_device()?);
    let (stream, bytes) = (bench.stream()?, bench.random_bytes(9999));
    let (src, back) = (bench.memory_of(&bytes)?, bench.memory(9999)?);
    let far = bench.memory_on(there, 9999)?;
    bench.driver.copy_peer(far, there, src, here, 9999, stream)?;
    bench.sync(stream)?;
    let mut seen = vec![0; 9999];
    bench.driver.download(there, far, &mut seen)?;
    expect_same("what arrived there", &seen, &bytes)?;
    bench.driver.copy_peer(back, here, far, there, 9999, stream)?;
    bench.sync(stream)?;
    expect_same("what came back", &bench.bytes_at(back, 9999)?, &bytes)
}

fn kernels_cross_devices_with_peer_access(bench: &Bench<'_>) -> Checked {
    let there = bench.peer()?;
    let (stream, n) = (bench.stream()?, 1000_u32);
    let far = bench.memory_on(there, 4000)?;
    let words = bench.random_words(n as usize);
    bench.driver.upload(there, far, &to_bytes(&words))?;
    bench.driver.peer_enable(bench.device, there)?;
    let worked = bench.add(far, n, 21, stream).and_then(|()| bench.sync(stream));
    bench.driver.peer_disable(bench.device, there)?;
    worked?;
    let mut seen = vec![0; 4000];
    bench.driver.download(there, far, &mut seen)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(21)).collect();
    expect_same("what the kernel left there", &seen, &to_bytes(&want))
}
